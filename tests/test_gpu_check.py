"""The steps of `benchmarks/gpu_check.py` check what they say, which ranks on a cpu show as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import epcomm
from epcomm.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("check_collectives", ()),
        ("check_expert_parallel", ("latency", "padded", 9)),
        ("check_expert_parallel", ("throughput", "flat", 33)),
        ("check_quantized", (17,)),
    ],
)
def test_steps(name: str, arguments: tuple[object, ...]) -> None:
    def run() -> object:
        sys.path.insert(0, str(ROOT))
        from benchmarks import gpu_steps

        with epcomm.init(timeout=30.0) as comm:
            return getattr(gpu_steps, name)(comm, *arguments)

    assert all(checked > 0 for result in run_ranks(run, 2) for checked in result.values())


def test_steps_notice_wrong_rows() -> None:
    def run() -> None:
        sys.path.insert(0, str(ROOT))
        from benchmarks import gpu_steps

        with epcomm.init(timeout=30.0) as comm:
            comm.allgather = lambda x: x.repeat(comm.size)  # everyone's are not its own
            gpu_steps.check_collectives(comm)

    with pytest.raises(AssertionError, match="allgather"):
        run_ranks(run, 2)
