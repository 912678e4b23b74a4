"""The backend of `torch.distributed` on the GPU's kernels, interpreted, also beside ranks that have the CPU's."""

from __future__ import annotations

import pytest
from c10d_cases import CASES
from test_c10d import failures, run_cases

from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import run_ranks

# The interpreter runs one operation at a time: in these, messages are under way beside others.
OVERLAPPING = {"messages", "messages_of_any_rank", "works", "subgroups"}


def run_interpreted(names: list[str], kernels: str) -> dict[str, tuple[float, str]]:
    with kernels_of(kernels):
        return run_cases(names)


def check(names: list[str], kernels: str) -> None:
    outcomes = run_ranks(run_interpreted, 2, names, kernels, timeout=110.0)
    errors = [error for name in names for error in failures(outcomes, name)]
    assert not errors, "\n".join(errors)


def test_training() -> None:
    check(["functional_collectives", "data_parallel", "fully_sharded"], "triton")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in OVERLAPPING])
def test_mixed_world(name: str) -> None:
    check([name], "mixed")
