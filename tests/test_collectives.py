"""Every collective against its definition: dtypes, ops, sizes, in and out of place, on worlds of 1 to 7 ranks.

One call of `run_ranks` goes through all cases of one collective on one communicator, with random pauses around every
operation, so each kernel runs hundreds of times on one handle with new data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_checks import (
    CHUNK,
    STREAMING,
    check_alltoall,
    check_gathers,
    check_reduce_scatter,
    check_reductions,
    check_rooted,
    reduction_cases,
)

import epcomm
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import run_ranks

WORLDS = (1, 2, 3, 5, 7)


def on_ranks(world: int, body: Callable[..., None], *args: Any, ranks: str = "processes", **init: Any) -> None:
    """Runs ``body(communicator, *args)`` on all ranks."""

    def run() -> None:
        with epcomm.init(timeout=30.0, **init) as comm:
            delay_operations(comm, seed=world, longest=0.001)
            body(comm, *args)

    run_ranks(run, world, ranks=ranks)


@pytest.mark.parametrize("world", WORLDS)
def test_allreduce_and_reduce(world: int) -> None:
    on_ranks(world, check_reductions, list(reduction_cases()))


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int) -> None:
    large = [(torch.float32, "sum", (CHUNK // 4 + 333,)), (torch.uint8, "max", (3, CHUNK // 16))]
    small = [case for case in reduction_cases() if torch.Size(case[2]).numel() < 10_000]
    on_ranks(world, check_reduce_scatter, small + large)


# ---- data movement


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("body", [check_gathers, check_rooted, check_alltoall])
def test_data_movement(world: int, body: Callable[[epcomm.Communicator], None]) -> None:
    on_ranks(world, body)


# ---- the same on other kinds of ranks


def check_everything(comm: epcomm.Communicator) -> None:
    cases = [(torch.float32, "sum", (5,)), (torch.float32, "sum", (200_001,)), (torch.int8, "sum", (70_000, 3))]
    check_reductions(comm, [*cases, (torch.bfloat16, "avg", (STREAMING // 2 + 9,))])
    check_reduce_scatter(comm, cases)
    for body in (check_gathers, check_rooted, check_alltoall):
        body(comm)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_thread_ranks(world: int) -> None:
    on_ranks(world, check_everything, ranks="threads")


@pytest.mark.parametrize("ranks, world", [("processes", 1), ("processes", 2), ("processes", 3), ("threads", 2)])
def test_two_programs_per_rank(ranks: str, world: int) -> None:
    on_ranks(world, check_everything, ranks=ranks, num_threads=2)


def test_ranks_agree_on_the_number_of_programs() -> None:
    def body() -> None:
        rank = epcomm.world.rendezvous.launched_rank.get().rank
        with epcomm.init(num_threads=1 + rank) as comm:
            check_reductions(comm, [(torch.float32, "sum", (200_001,))])

    run_ranks(body, 2)


# ---- rounding


def rounding_results(world: int, algorithm: str) -> list[bytes]:
    """Sums of random floats, checked against a bound; the result's bytes."""
    unit = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
    found = []
    with epcomm.init(timeout=30.0) as comm:
        for dtype, rounding in unit.items():
            inputs = [
                torch.randn(3001, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(world)
            ]
            result = comm.allreduce(inputs[comm.rank], algorithm=algorithm)
            exact = torch.stack(inputs).double()
            accumulator = min(rounding, 2.0**-24)
            bound = world * accumulator * exact.abs().sum(0) + 1.01 * rounding * exact.sum(0).abs()
            assert ((result.double() - exact.sum(0)).abs() <= bound).all(), dtype
            found.append(bytes(result.view(torch.uint8).numpy()))
    return found


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_rounding_is_bounded_and_the_same_everywhere(algorithm: str) -> None:
    runs = [run_ranks(rounding_results, 5, 5, algorithm, disturb=seed) for seed in range(3)]
    assert all(result == runs[0][0] for run in runs for result in run)
