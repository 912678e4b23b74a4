"""The steps of `benchmarks/gpu_check.py` check what they say, which ranks on a cpu show as well."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import epcomm
from epcomm.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_check, gpu_networks  # noqa: E402


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


# ---- networks, which may be refused


def child(*lines: str, code: int = 0, seconds: float = 0.0) -> list[str]:
    """A process that prints lines and ends."""
    text = f"import sys, time; print({chr(10).join(lines)!r}, flush=True); time.sleep({seconds})"
    return [sys.executable, "-c", f"{text}; print('last words', file=sys.stderr); sys.exit({code})"]


@pytest.mark.parametrize(
    "command, wanted, detail",
    [
        (child("noise", '{"outcome": "ran", "detail": ""}', "more noise"), "ran", ""),
        (child('{"outcome": "failed", "detail": "wrong"}', code=1), "failed", "wrong"),
        (child("no adapter", code=3), "refused", "its process ended with 3: last words"),
        (child("set up", code=3), "failed", "its process ended with 3: last words"),
        (child("set up", seconds=60), "failed", "no answer in 2 s"),
        (child("waiting", seconds=60), "refused", "no answer in 2 s"),
    ],
)
def test_network_in_a_process(command: list[str], wanted: str, detail: str) -> None:
    found = gpu_networks.outcome_in_process("nvshmem", command, seconds=2.0)
    assert found["outcome"] == wanted and detail in found["detail"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would do it")
@pytest.mark.parametrize("name", gpu_networks.CHECKS)
def test_network_is_refused_without_a_gpu(name: str) -> None:
    found = gpu_networks.outcome(name)
    assert found["outcome"] == "refused" and "finds no CUDA GPU or driver" in found["detail"]


def test_network_that_goes_wrong_has_failed() -> None:
    def run(name: str) -> Any:
        raise AssertionError("the signal is 0")

    assert gpu_networks.outcome("gin", run) == {"outcome": "failed", "detail": "AssertionError: the signal is 0"}


def test_report_of_a_refusal_is_no_failure() -> None:
    output = io.StringIO()
    report = gpu_check.Report(Console(file=output, width=160))
    report.network("gin", lambda name: {"outcome": "refused", "detail": "no adapter"})
    report.network("nccl", lambda name: {"outcome": "ran", "detail": "", "value": {"handle": True}})
    assert [row["outcome"] for row in report.rows] == ["refused", "ran"]
    assert report.rows[1]["value"] == {"handle": True} and json.dumps(report.rows)
    assert "refused NCCL GIN, one rank: put, signal, wait" in output.getvalue() and "no adapter" in output.getvalue()
