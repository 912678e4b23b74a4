"""PyTorch's own tests of `torch.distributed`, on epcomm: `make test-integrations` runs them and compares.

    python tests/integrations/try_c10d.py [--only NAME ...] [--write]

`results/c10d.json` lists every test of `torch.testing._internal.distributed.distributed_test` with its
outcome: passed, why it was skipped (PyTorch's words) or why it failed. The exit code is 1 if a test that has passed
there did not. `--write` writes the file anew.

The tests ask which backend they run on, and know only PyTorch's. So each is told that it is gloo; those that skip gloo,
that it is MPI, which has operations on CPUs that gloo once hadn't. The ranks' process groups are epcomm's all the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.multiprocessing

import epcomm
import epcomm.integrations.c10d

RESULTS = Path(__file__).resolve().parent / "results" / "c10d.json"
WORLD_SIZE = 4  # the least at which no test is skipped for its size
STANDS_FOR = ("gloo", "mpi")
#: Why tests fail that do, by parts of their names.
KNOWN = {
    "monitored_barrier": "torch.distributed.monitored_barrier asks for gloo by name",
    "sparse": "tensors are dense",
    "barrier_timeout": "it looks for gloo's words in the error, which is a TimeoutError",
}


class StandIn(str):
    """The backend's name, which also equals the one that it stands for."""

    stands_for: str

    def __eq__(self, other: object) -> bool:
        return str(self) == other or self.stands_for == other

    __hash__ = str.__hash__


def load_tests(backend: str) -> ModuleType:
    """PyTorch's module of tests, as it is for a backend, with groups of epcomm."""
    os.environ["BACKEND"] = backend
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the tests pickle objects of its classes
    spec.loader.exec_module(module)
    module.BACKEND = StandIn("epcomm")
    module.BACKEND.stands_for = backend
    os.environ["BACKEND"] = "mpi"  # for any other, tests of groups want 8 ranks: so many GPUs
    return module


def make_case(tests: ModuleType) -> type[unittest.TestCase]:
    """A test case whose ranks are forked: they find loaded what they would have to load."""

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Case


class Outcomes(unittest.TestResult):
    """What became of each test, printed as it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, str] = {}

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begin = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str) -> None:
        name = test._testMethodName
        self.found[name] = outcome
        print(f"{time.monotonic() - self._begin:6.1f} s  {name}: {outcome}", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, f"skipped: {reason}")

    def addFailure(self, test: unittest.TestCase, error: Any) -> None:
        text = str(error[1]).strip()
        print(f"{test._testMethodName}: {text}", file=sys.stderr, flush=True)
        reasons = [reason for part, reason in KNOWN.items() if part in test._testMethodName]
        self._note(test, f"failed: {reasons[0] if reasons else text.splitlines()[0]}")

    addError = addFailure


def run_tests(only: list[str]) -> dict[str, str]:
    """Outcomes by name, of the tests whose names have one of the parts `only`, or of all."""
    os.environ |= {"WORLD_SIZE": str(WORLD_SIZE), "OMP_NUM_THREADS": "1"}
    with epcomm.init() as comm:  # loads kernels that the forked ranks would each have to load
        comm.alltoall(comm.allreduce(comm.allgather(torch.ones(1))))
    outcomes = Outcomes()
    for backend in STANDS_FOR:
        case = make_case(load_tests(backend))
        names = unittest.TestLoader().getTestCaseNames(case)
        chosen = [name for name in names if not only or any(part in name for part in only)]
        left = [name for name in chosen if outcomes.found.get(name, "skipped").startswith("skipped")]
        before = dict(outcomes.found)
        unittest.TestSuite(map(case, left)).run(outcomes)
        # what both skip is skipped for the first one's reason
        outcomes.found |= {name: before[name] for name in before if outcomes.found[name].startswith("skipped")}
    return outcomes.found


def main() -> int:
    parser = argparse.ArgumentParser(description="PyTorch's own tests of torch.distributed, on epcomm.")
    parser.add_argument("--only", nargs="*", default=[], help="names of tests, or parts of them")
    parser.add_argument("--write", action="store_true", help="write the file of results")
    options = parser.parse_args()
    found = run_tests(options.only)
    counts = {kind: sum(text.startswith(kind) for text in found.values()) for kind in ("passed", "skipped", "failed")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    if options.write:
        RESULTS.parent.mkdir(exist_ok=True)
        head = {"torch": torch.__version__, "ranks": WORLD_SIZE, **counts}
        RESULTS.write_text(json.dumps({**head, "tests": found}, indent=1) + "\n")
        return 0
    expected = json.loads(RESULTS.read_text())["tests"]
    broken = [name for name in found if expected.get(name) == "passed" and found[name] != "passed"]
    for name in broken:
        print(f"passed before: {name}: {found[name]}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
