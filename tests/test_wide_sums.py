"""Plans whose partial sums are float32: 16-bit results are rounded once, in every world, bit by bit.

Items are so large that sums of two of them are exact in float32 and not in 16 bits: what is rounded on the way shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from collective_cases import addend, reduced, same_bits
from execution_checks import check_plan, on_kernels_of, plans_of
from failure_cases import raised_by
from host_cases import WORLDS, on_hosts
from plan_programs import random_plan

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import Collective, Location, Op, Plan, Program, Step
from epcomm.collectives.plan.conditions import REDUCTIONS
from epcomm.collectives.plan.json_format import from_json, to_json
from epcomm.collectives.plan.lower import prove, scratch_bytes
from epcomm.collectives.plan.msccl import from_msccl
from epcomm.collectives.plan.partial_sums import NARROW
from epcomm.collectives.plan.verify import verify
from epcomm.kernels.cpu.reduction import WIDTHS, reduction_of_two
from epcomm.kernels.protocol import plans as table
from epcomm.kernels.protocol.lines import IN_LINES, LL, LL128, PIECE_BYTES, PROTOCOLS, SIMPLE
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import run_ranks

MSCCL = sorted((Path(__file__).parent / "data" / "msccl").glob("*.xml"))
HALVES = (torch.bfloat16, torch.float16)
_LEAST = {torch.bfloat16: 128, torch.float16: 1024}  # up to twice as much every integer is there
CASES = [(1501, torch.bfloat16, "sum"), (37, torch.float16, "avg"), (1, torch.bfloat16, "prod")]


def large_addend(rank: int, shape: tuple[int, ...], dtype: torch.dtype, op: str, call: int, world: int) -> torch.Tensor:
    """Integers; few factors of a product aren't 1."""
    raw = addend(rank, shape, torch.int64, "sum", call, world) + 100  # 0 to 200
    if op == "prod":
        return torch.where(raw % 4 == rank % 4, 1 + 2 * (raw % 5), 1).to(dtype)
    return (_LEAST[dtype] + raw % 128).to(dtype)


def on_ranks(world: int, body: Callable[..., Any], *args: Any, num_threads: int = 1) -> None:
    def run() -> None:
        with epcomm.init(timeout=60.0, num_threads=num_threads) as comm:
            delay_operations(comm, seed=world, longest=0.0005)
            body(comm, *args)

    run_ranks(run, world, ranks="threads", timeout=200.0)


def reducing_plans(world: int, channels: int = 1, way: str = SIMPLE) -> list[Plan]:
    """A wide plan by every algorithm for each collective that sums."""
    found = plans_of(world, world // 2, channels, way)
    return [replace(plan, wide_sums=True) for plan in found if plan.collective.is_reduction]


def check_wide(comm: epcomm.Communicator, plan: Plan, num_items: int, dtype: torch.dtype, op: str = "sum") -> None:
    kind, root = plan.collective.kind, plan.collective.root
    check_plan(comm, plan, kind, num_items, dtype, op, root, plan.in_place, plan.out_of_place, large_addend)


def check_algorithms(comm: epcomm.Communicator, cases: Sequence[tuple[int, torch.dtype, str]], way: str) -> None:
    for plan in reducing_plans(comm.size, 1 + comm.size % 2, way):
        for num_items, dtype, op in cases:
            check_wide(comm, plan, num_items, dtype, op)


def check_random_programs(comm: epcomm.Communicator) -> None:
    for seed, kind in itertools.product(range(3), sorted(REDUCTIONS)):
        plan = replace(random_plan(kind, comm.size, seed, PROTOCOLS[seed % 3]), wide_sums=True)
        for num_items, dtype, op in ((0, torch.float16, "sum"), *CASES[:2]):
            check_wide(comm, plan, num_items, dtype, op)


# ---- plans


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_results_are_rounded_once(world: int) -> None:
    for plan in reducing_plans(world):
        narrow = verify(replace(plan, wide_sums=False))
        assert verify(plan) == replace(narrow, roundings=min(narrow.roundings, 1)), plan.name
        assert world == 1 or verify(plan).roundings == 1
    for plan in plans_of(world, 0, 1, SIMPLE):
        assert plan.collective.is_reduction or verify(replace(plan, wide_sums=True)).roundings == 0


def test_a_plan_says_that_its_sums_are_wide(capsys: pytest.CaptureFixture[str]) -> None:
    narrow, wide = (ALGORITHMS["ring"].plan("allreduce", 3, wide_sums=is_wide) for is_wide in (False, True))
    assert wide == replace(narrow, wide_sums=True) != narrow
    assert hash(wide) != hash(narrow) and prove(wide).fingerprint != prove(narrow).fingerprint
    for plan in (narrow, wide):
        assert from_json(to_json(plan)) == plan
        plan.show()
        printed = capsys.readouterr().out
        assert ("partial sums in float32" in printed, "rounds once" in printed) == (plan.wide_sums, plan.wide_sums)
    assert from_json(to_json(narrow).replace(', "wide_sums": false', "")) == narrow
    raised = raised_by(from_json, to_json(wide).replace('"wide_sums": true', '"wide_sums": 1'))
    assert "line 1: `wide_sums`: wanted true or false, got 1" in raised.text


def test_what_is_wide() -> None:
    """A ring's partial sums are only in messages; who sums one after the other keeps one of each of its chunks."""
    ring, one_shot = (prove(ALGORITHMS[name].plan("allreduce", 4, channels=2)) for name in ("ring", "one_shot"))
    assert ring.partial_sums.num_shadows == [0] * 4 and one_shot.partial_sums.num_shadows == [2] * 4
    num_bytes = [scratch_bytes(one_shot, 0, 256, is_wide) for is_wide in (False, True)]
    assert num_bytes[1] == num_bytes[0] + 2 * 2 * 128
    two = prove(ALGORITHMS["ring"].plan("allreduce", 2))
    assert all(width == NARROW for step in two.partial_sums.widths.values() for widths in step for width in widths)


# ---- arithmetic


@pytest.mark.parametrize("dtype", HALVES)
def test_reductions_of_two(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for widths in WIDTHS:
        call = reduction_of_two(dtype, "avg", *widths)._compiled.ctypes
        dtypes = [torch.float32 if is_wide else dtype for is_wide in widths]
        for num_items in (1, 31, 65, 1001):
            first, second, result = (torch.zeros(num_items + 1, dtype=each)[1:] for each in dtypes)
            for operand in (first, second):
                operand.copy_(torch.randn(num_items, generator=generator))
            sources = np.array([first.data_ptr(), second.data_ptr()])
            call(result.data_ptr(), sources.ctypes.data, 2, num_items * dtype.itemsize, 3, 0)
            total = first.float() + second.float()
            wanted = total if result.dtype is torch.float32 else (total / 3).to(dtype)
            assert same_bits(result, wanted), (dtype, widths, num_items)


# ---- on ranks


@pytest.mark.parametrize("world", [2, 3, 4, 5, *(pytest.param(world, marks=pytest.mark.slow) for world in (6, 7)), 8])
def test_every_algorithm(world: int) -> None:
    on_ranks(world, check_algorithms, CASES, SIMPLE)


@pytest.mark.parametrize("way", IN_LINES)
@pytest.mark.parametrize("world", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_every_algorithm_in_lines(world: int, way: str) -> None:
    on_ranks(world, check_algorithms, [(1501, torch.float16, "sum"), (37, torch.bfloat16, "avg")], way)


def check_that_narrow_sums_differ(comm: epcomm.Communicator) -> None:
    for plan in reducing_plans(comm.size):
        if plan.collective.kind == "allreduce":
            for dtype in HALVES:
                inputs = [large_addend(rank, (501,), dtype, "sum", 0, comm.size) for rank in range(comm.size)]
                got = comm.allreduce(inputs[comm.rank], algorithm=replace(plan, wide_sums=False))
                assert not same_bits(got, reduced(inputs, "sum")), (plan.name, dtype)


def test_sums_that_are_not_wide_would_be_noticed() -> None:
    on_ranks(4, check_that_narrow_sums_differ)


def check_many_tiles(comm: epcomm.Communicator) -> None:
    for (name, op), way in itertools.product((("ring", "sum"), ("two_shot", "avg")), PROTOCOLS):
        plan = ALGORITHMS[name].plan("allreduce", comm.size, channels=2, fifo_depth=2, protocol=way, wide_sums=True)
        check_wide(comm, plan, 100_003, torch.bfloat16, op)


def test_chunks_larger_than_slots() -> None:
    """Several times as large as all slots of a FIFO."""
    with mock.patch.object(table, "MAX_SLOT_BYTES", 8192):
        on_ranks(3, check_many_tiles, num_threads=2)


def check_what_is_not_widened(comm: epcomm.Communicator) -> None:
    ring = ALGORITHMS["ring"].plan("allreduce", comm.size, wide_sums=True)
    for dtype, op in ((torch.float32, "avg"), (torch.int64, "sum"), (torch.bfloat16, "max"), (torch.float64, "prod")):
        check_plan(comm, ring, "allreduce", 67, dtype, op)
        assert "partial" not in comm.describe_allreduce(torch.ones(67, dtype=dtype), op, algorithm=ring)
    text = comm.describe_allreduce(torch.ones(67, dtype=torch.bfloat16), algorithm=ring)
    assert f"{prove(ring).fingerprint}, simple, partial sums in float32" in text
    gathering = ALGORITHMS["bruck"].plan("allgather", comm.size, wide_sums=True)
    check_plan(comm, gathering, "allgather", 67, torch.bfloat16)


def test_other_dtypes_and_ops_are_as_ever() -> None:
    on_ranks(3, check_what_is_not_widened)


@pytest.mark.parametrize("path", MSCCL, ids=lambda path: path.stem)
def test_plans_that_others_wrote(path: Path) -> None:
    """Some work in place only, and read as input what they wrote as output."""
    plan = replace(from_msccl(path.read_text(), path.name), wide_sums=True)
    if plan.collective.is_reduction:
        on_ranks(plan.num_ranks, check_wide, plan, 16 * 50 * plan.collective.num_chunks, torch.bfloat16)


def kept_for_nothing() -> Plan:
    """Ranks 1 and 2 send to 0, which keeps, in a chunk that nobody reads, an input: in place, already a partial sum."""
    given, kept, unused = Location("input", 0), Location("output", 0), Location("scratch", 0)
    summing = (
        Step(Op.RECV_REDUCE_COPY, given, kept, receive_from=1), Step(Op.COPY, given, unused),
        Step(Op.RECV_REDUCE_COPY, kept, kept, receive_from=2),
    )  # fmt: skip
    sending = (Program(0, (Step(Op.SEND, given, send_to=0),)),)
    return Plan("kept", Collective("reduce", 3, 1), ((Program(0, summing),), sending, sending), scratch_chunks=1)


def test_partial_sums_that_differ_in_place_are_refused() -> None:
    def body(comm: epcomm.Communicator) -> None:
        plan = replace(kept_for_nothing(), wide_sums=True)
        raised = raised_by(comm.reduce, torch.ones(5, dtype=torch.bfloat16), algorithm=plan)
        assert "rank 0, channel 0, step 1 has other partial sums in place" in raised.text
        comm.reset()
        check_plan(comm, plan, "reduce", 37, torch.float32)
        for in_place in (False, True):
            check_wide(comm, replace(plan, in_place=in_place, out_of_place=not in_place), 37, torch.float16)

    on_ranks(3, body)


def test_random_programs() -> None:
    on_ranks(3, check_random_programs, num_threads=2)


def test_waits_of_no_chunk() -> None:
    ring = ALGORITHMS["ring"].plan("allreduce", 3, wide_sums=True)
    wait = Step(Op.NOP, count=0)
    longer = tuple(tuple(replace(each, steps=(*each.steps, wait)) for each in programs) for programs in ring.programs)
    on_ranks(3, check_wide, replace(ring, programs=longer), 37, torch.bfloat16)


# ---- on several hosts, and by the GPU target's kernel


def check_between_hosts(comm: epcomm.Communicator) -> None:
    delay_operations(comm, seed=comm.size, longest=0.001)
    for name in ("ring", "recursive_doubling", "two_shot"):
        plan = ALGORITHMS[name].plan("allreduce", comm.size, channels=2, wide_sums=True)
        check_wide(comm, plan, 1501, torch.bfloat16)
    ring = ALGORITHMS["ring"].plan("reduce_scatter", comm.size, wide_sums=True)
    check_wide(comm, ring, 300_001, torch.float16)


@pytest.mark.parametrize("world", ["1+2", pytest.param("2+2", marks=pytest.mark.slow)])
def test_between_hosts(world: str, port: int) -> None:
    on_hosts(WORLDS[world], port, check_between_hosts, num_threads=1)


def check_some(comm: epcomm.Communicator, way: str) -> None:
    """Each kind of step; unaligned results; several pieces of a message."""
    for name, kind in (("ring", "allreduce"), ("recursive_doubling", "allreduce"), ("one_shot", "reduce")):
        plan = ALGORITHMS[name].plan(kind, comm.size, root=comm.size - 1, protocol=way, wide_sums=True)
        check_wide(comm, plan, 37, torch.bfloat16)
    ring = ALGORITHMS["ring"].plan("allreduce", comm.size, protocol=way, wide_sums=True)
    check_wide(comm, ring, PIECE_BYTES, torch.float16, "avg")


@pytest.mark.parametrize("kind, world, way", [
    ("mixed", 3, SIMPLE), ("mixed", 3, LL128),
    *(pytest.param("triton", 3, way, marks=pytest.mark.slow) for way in (SIMPLE, LL, LL128)),
])  # fmt: skip
def test_some_algorithms_interpreted(kind: str, world: int, way: str) -> None:
    on_kernels_of(kind, world, check_some, way)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind, world", [("triton", 3), ("mixed", 5)])
def test_every_algorithm_interpreted(kind: str, world: int) -> None:
    on_kernels_of(kind, world, check_algorithms, [(37, torch.bfloat16, "sum")], SIMPLE)
