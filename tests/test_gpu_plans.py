"""Plans by the GPU target's kernel, interpreted: worlds of it, and worlds that mix it with the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import REDUCTIONS
from execution_checks import check_plan, check_plans
from failure_cases import Raised, raised_by

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.errors import MismatchError
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import run_ranks


def on_ranks(kind: str, world: int, body: Callable[..., Any], *args: Any) -> None:
    def run() -> None:
        with kernels_of(kind), epcomm.init(timeout=60.0) as comm:
            body(comm, *args)

    run_ranks(run, world, timeout=200.0)


def check_some(comm: epcomm.Communicator) -> None:
    """Each kind of step, messages of several chunks, in place and out of place, more tiles than slots."""
    for name, kind in (("ring", "allreduce"), ("halving_doubling", "allreduce"), ("pat", "reduce_scatter"),
                       ("bruck", "allgather"), ("direct", "alltoall"), ("double_binary_tree", "broadcast"),
                       ("one_shot", "reduce")):  # fmt: skip
        in_place = name != "direct"
        if comm.size & (comm.size - 1) == 0 or name != "halving_doubling":
            check_plan(comm, name, kind, 37, torch.float16, root=comm.size - 1, in_place=in_place)
    check_plan(comm, "ring", "allreduce", 0, torch.float32)
    shallow = ALGORITHMS["ring"].plan("allreduce", comm.size, fifo_depth=2)
    check_plan(comm, shallow, "allreduce", 700_001, torch.int8, in_place=False)


@pytest.mark.parametrize("kind, world", [("triton", 2), ("mixed", 3)])
def test_some_algorithms(kind: str, world: int) -> None:
    on_ranks(kind, world, check_some)


@pytest.mark.slow
@pytest.mark.parametrize("kind, world", [("triton", 2), ("triton", 4), ("mixed", 3), ("mixed", 5)])
def test_every_algorithm(kind: str, world: int) -> None:
    on_ranks(kind, world, check_plans, world - 1, 2, [(1, torch.int64), (37, torch.float16)])


def check_arithmetic(comm: epcomm.Communicator, reductions: list[Any]) -> None:
    for dtype, op in reductions:
        if dtype is not torch.bfloat16 or op == "max":  # other sums of it are rounded
            check_plan(comm, "ring", "allreduce", 21, dtype, op, in_place=False)


def test_every_op() -> None:
    """Of the GPU's kernel; the CPU's peers give the same bits."""
    on_ranks("mixed", 2, check_arithmetic, REDUCTIONS[::3])


@pytest.mark.slow
def test_every_dtype_and_op() -> None:
    on_ranks("triton", 3, check_arithmetic, REDUCTIONS)


def test_mismatched_plans() -> None:
    def body() -> Raised:
        with kernels_of("triton"):
            comm = epcomm.init(timeout=30.0)
            plan = ALGORITHMS["ring"].plan("allreduce", comm.size, fifo_depth=4 + comm.rank)
            return raised_by(comm.allreduce, torch.ones(5), algorithm=plan)

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, MismatchError) and "plan ring allreduce" in raised.text, raised
