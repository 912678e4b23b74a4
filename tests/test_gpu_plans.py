"""Plans by the GPU target's kernel, interpreted: worlds of it, and worlds that mix it with the CPU's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collective_cases import REDUCTIONS
from execution_checks import check_plan, check_plans, check_random_plans, on_kernels_of, take_part_in_silence
from failure_cases import Raised, raised_by

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan.msccl import from_msccl
from epcomm.errors import MismatchError
from epcomm.kernels.protocol import lines
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import run_ranks

MSCCL = Path(__file__).parent / "data" / "msccl"


def check_some(comm: epcomm.Communicator, way: str) -> None:
    """Each kind of step, messages of several chunks, in place and out of place, nothing, several pieces."""
    for name, kind in (("ring", "allreduce"), ("halving_doubling", "allreduce"), ("pat", "reduce_scatter"),
                       ("bruck", "allgather"), ("direct", "alltoall"), ("double_binary_tree", "broadcast"),
                       ("one_shot", "reduce")):  # fmt: skip
        in_place = name != "direct"
        if comm.size & (comm.size - 1) == 0 or name != "halving_doubling":
            plan = ALGORITHMS[name].plan(kind, comm.size, root=comm.size - 1, protocol=way)
            check_plan(comm, plan, kind, 37, torch.float16, root=comm.size - 1, in_place=in_place)
    ring = ALGORITHMS["ring"].plan("allreduce", comm.size, protocol=way)
    for num_items in (0, 2 * lines.PIECE_BYTES - 1):
        check_plan(comm, ring, "allreduce", num_items, torch.int8)


WORLDS = [("triton", 2, lines.SIMPLE), ("mixed", 3, lines.SIMPLE), ("triton", 2, lines.LL128), ("mixed", 3, lines.LL)]
MORE_WORLDS = [pytest.param("triton", 2, lines.LL, marks=pytest.mark.slow),
               pytest.param("mixed", 3, lines.LL128, marks=pytest.mark.slow)]  # fmt: skip


@pytest.mark.parametrize("kind, world, way", [*WORLDS, *MORE_WORLDS])
def test_some_algorithms(kind: str, world: int, way: str) -> None:
    on_kernels_of(kind, world, check_some, way)


def run_msccl(name: str, num_items: int) -> None:
    """A plan that others wrote."""
    plan = from_msccl((MSCCL / f"{name}.xml").read_text(), name)
    collective = plan.collective

    def body(comm: epcomm.Communicator) -> None:
        assert num_items % (collective.num_chunks * plan.num_ranks) == 0
        check_plan(
            comm, plan, collective.kind, num_items, torch.int32, in_place=plan.in_place, out_of_place=plan.out_of_place
        )

    on_kernels_of("mixed", plan.num_ranks, body)


def test_a_plan_that_others_wrote() -> None:
    run_msccl("azure_ncv4_allgather_hier_ll", 16)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["azure_ncv4_allreduce_tree_ll", "azure_ndv4_alltoall_ll", "rccl_alltoall_8_small"])
def test_plans_that_others_wrote(name: str) -> None:
    run_msccl(name, 16 * 24)


@pytest.mark.parametrize("kind, world, seeds", [
    ("mixed", 2, range(2)),
    *(pytest.param(kind, world, range(3), marks=[pytest.mark.slow, pytest.mark.timeout(300)])
      for kind, world in (("triton", 2), ("mixed", 3), ("mixed", 4))),
])  # fmt: skip
def test_programs_made_at_random(kind: str, world: int, seeds: range) -> None:
    on_kernels_of(kind, world, check_random_plans, seeds, [(37, torch.int64)])


def check_many_tiles(comm: epcomm.Communicator, way: str) -> None:
    shallow = ALGORITHMS["ring"].plan("allreduce", comm.size, fifo_depth=2, protocol=way)
    check_plan(comm, shallow, "allreduce", 700_001, torch.int8, in_place=False)


@pytest.mark.parametrize("way", [lines.SIMPLE, *(pytest.param(way, marks=pytest.mark.slow) for way in lines.IN_LINES)])
@pytest.mark.parametrize("kind, world", [("triton", 2), ("mixed", 3)])
def test_more_tiles_than_slots(kind: str, world: int, way: str) -> None:
    on_kernels_of(kind, world, check_many_tiles, way)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, world, way", [
    *((kind, world, lines.SIMPLE) for kind, world in (("triton", 2), ("triton", 4), ("mixed", 3), ("mixed", 5))),
    *((kind, world, way) for kind, world in (("triton", 2), ("mixed", 3)) for way in lines.IN_LINES),
])  # fmt: skip
def test_every_algorithm(kind: str, world: int, way: str) -> None:
    on_kernels_of(kind, world, check_plans, world - 1, 2, [(1, torch.int64), (37, torch.float16)], way)


def check_flags(comm: epcomm.Communicator) -> None:
    """Flags of earlier messages are not found again: after a reset, and when their numbers have run out."""
    plans = comm._reductions._plans
    for way in lines.IN_LINES:
        ring = ALGORITHMS["ring"].plan("allreduce", comm.size, protocol=way)
        check_plan(comm, ring, "allreduce", 5003, torch.int32)
        comm.barrier()
        plans._counts.refresh()
        counts = plans._counts.array.view(np.int64)[plans._first_flag_count :].reshape(len(lines.PROTOCOLS), -1)
        counts[lines.PROTOCOLS.index(way)] = lines.MAX_FLAG - 3
        plans._counts.publish()
        check_plan(comm, ring, "allreduce", 5003, torch.int32)
        comm.barrier()
        if comm.rank == 0:
            comm.abort("enough")
        raised_by(comm.barrier)
        comm.reset()
        check_plan(comm, ring, "allreduce", 5003, torch.int32)


def test_flags_of_earlier_messages() -> None:
    on_kernels_of("mixed", 2, check_flags)


def test_a_message_that_does_not_come() -> None:
    """Rank 0, of the CPU's kernel, enters the operation and does nothing of the plan."""
    def body(way: str) -> Raised:
        with kernels_of("mixed"), epcomm.init(timeout=1.5) as comm:
            plan = ALGORITHMS["ring"].plan("allreduce", comm.size, protocol=way)
            if comm.rank == 1:
                return raised_by(comm.allreduce, torch.ones(5000), algorithm=plan)
            take_part_in_silence(comm, plan)
            return raised_by(comm.barrier, timeout=60.0)

    for way in lines.IN_LINES:
        raised = run_ranks(body, 2, way)[1]
        assert "rank 0, to send the plan's next message" in raised.text, (way, raised)


def check_arithmetic(comm: epcomm.Communicator, reductions: list[Any]) -> None:
    for dtype, op in reductions:
        if dtype is not torch.bfloat16 or op == "max":  # other sums of it are rounded
            check_plan(comm, "ring", "allreduce", 21, dtype, op, in_place=False)


def test_every_op() -> None:
    """Of the GPU's kernel; the CPU's peers give the same bits."""
    on_kernels_of("mixed", 2, check_arithmetic, REDUCTIONS[::3])


@pytest.mark.slow
def test_every_dtype_and_op() -> None:
    on_kernels_of("triton", 3, check_arithmetic, REDUCTIONS)


def test_mismatched_plans() -> None:
    def body() -> Raised:
        with kernels_of("triton"):
            comm = epcomm.init(timeout=30.0)
            plan = ALGORITHMS["ring"].plan("allreduce", comm.size, fifo_depth=4 + comm.rank)
            return raised_by(comm.allreduce, torch.ones(5), algorithm=plan)

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, MismatchError) and "plan ring allreduce" in raised.text, raised
