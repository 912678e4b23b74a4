"""Plans whose partial sums travel in float32: 16-bit results are rounded once, on ranks, bit by bit.

Items are so large that sums of two or more of them are exact in float32 and not in 16 bits, so that what is rounded on
the way is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from collective_cases import addend, reduced
from execution_checks import check_plan, plans_of

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import Plan
from epcomm.collectives.plan.lower import prove
from epcomm.kernels.protocol.lines import LL, LL128, PIECE_BYTES, SIMPLE
from epcomm.testing.adversary import delay_operations
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import run_ranks

_LEAST = {torch.bfloat16: 128, torch.float16: 1024}  # up to twice of that all integers are there


def large_addend(rank: int, shape: tuple[int, ...], dtype: torch.dtype, op: str, call: int, world: int) -> torch.Tensor:
    """Integers, of which a product has a few that aren't 1."""
    raw = addend(rank, shape, torch.int64, "sum", call, world) + 100  # 0 to 200
    if op == "prod":
        return torch.where(raw % 4 == rank % 4, 1 + 2 * (raw % 5), 1).to(dtype)
    return (_LEAST[dtype] + raw % 128).to(dtype)


def on_ranks(world: int, body: Callable[..., Any], *args: Any, ranks: str = "threads", **init: Any) -> list[Any]:
    """What ``body(communicator, *args)`` returns on each rank."""

    def run() -> Any:
        with epcomm.init(timeout=60.0, **init) as comm:
            delay_operations(comm, seed=world, longest=0.0005)
            return body(comm, *args)

    return run_ranks(run, world, ranks=ranks, timeout=200.0)


def check_wide(comm: epcomm.Communicator, plan: Plan, num_items: int, dtype: torch.dtype, op: str = "sum") -> None:
    collective = plan.collective
    wide = replace(plan, wide_sums=True)
    check_plan(
        comm, wide, collective.kind, num_items, dtype, op, collective.root, plan.in_place, plan.out_of_place,
        large_addend,
    )  # fmt: skip


def reducing_plans(world: int, root: int, channels: int, way: str = SIMPLE) -> list[Plan]:
    return [plan for plan in plans_of(world, root, channels, way) if plan.collective.is_reduction]


def check_algorithms(comm: epcomm.Communicator, cases: Sequence[tuple[int, torch.dtype, str]], way: str) -> None:
    for plan in reducing_plans(comm.size, comm.size // 2, 1 + comm.size % 2, way):
        for num_items, dtype, op in cases:
            check_wide(comm, plan, num_items, dtype, op)


CASES = [(1501, torch.bfloat16, "sum"), (37, torch.float16, "avg"), (1, torch.bfloat16, "prod")]


@pytest.mark.parametrize("world", [2, 3, 4, 5, *(pytest.param(world, marks=pytest.mark.slow) for world in (6, 7)), 8])
def test_every_algorithm(world: int) -> None:
    on_ranks(world, check_algorithms, CASES, SIMPLE, num_threads=1)


# ---- the GPU target's kernel, interpreted


def on_kernels_of(kind: str, world: int, body: Callable[..., Any], *args: Any) -> None:
    def run() -> None:
        with kernels_of(kind), epcomm.init(timeout=60.0) as comm:
            body(comm, *args)

    run_ranks(run, world, timeout=200.0)


def check_some(comm: epcomm.Communicator, way: str) -> None:
    for name, kind in (("ring", "allreduce"), ("recursive_doubling", "allreduce"), ("pat", "reduce_scatter"),
                       ("one_shot", "reduce")):  # fmt: skip
        plan = ALGORITHMS[name].plan(kind, comm.size, root=comm.size - 1, protocol=way)
        check_wide(comm, plan, 37, torch.bfloat16)
    ring = ALGORITHMS["ring"].plan("allreduce", comm.size, protocol=way)
    check_wide(comm, ring, PIECE_BYTES, torch.float16, "avg")


@pytest.mark.parametrize("kind, world, way", [("triton", 3, SIMPLE), ("mixed", 3, LL128), ("mixed", 4, SIMPLE), ("mixed", 3, LL)])
def test_some_algorithms_interpreted(kind: str, world: int, way: str) -> None:
    on_kernels_of(kind, world, check_some, way)
