"""Plans whose messages have their flags in them, "ll" and "ll128", on ranks: results, old flags, failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from collective_cases import MOVED, REDUCTIONS
from execution_checks import check_plan, check_plans, take_part_in_silence
from failure_cases import Raised, raised_by, works

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.protocols import PRICED
from epcomm.collectives.plan import Collective, Dependency, Location, Op, Plan, Position, Program, Step
from epcomm.collectives.plan.fifos import FifoMemory
from epcomm.collectives.plan.local_order import local_order
from epcomm.collectives.plan.lower import lower, prove
from epcomm.collectives.plan.msccl import from_msccl
from epcomm.errors import PeerFailedError
from epcomm.kernels.gpu.cuda import CudaTarget
from epcomm.kernels.protocol import plans as table
from epcomm.kernels.protocol.lines import (
    IN_LINES,
    LINE_DATA_BYTES,
    LL,
    LL128,
    MAX_FLAG,
    PIECE_BYTES,
    PROTOCOLS,
    data_bytes,
    message_bytes,
)
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import run_ranks

MSCCL = sorted((Path(__file__).parent / "data" / "msccl").glob("*.xml"))


def on_ranks(world: int, body: Callable[..., Any], *args: Any, ranks: str = "processes", **init: Any) -> list[Any]:
    """What ``body(communicator, *args)`` returns on each rank."""

    def run() -> Any:
        with epcomm.init(**{"timeout": 60.0, **init}) as comm:
            delay_operations(comm, seed=world, longest=0.0005)
            return body(comm, *args)

    return run_ranks(run, world, ranks=ranks, timeout=200.0)


def test_names_and_sizes() -> None:
    assert set(PROTOCOLS) == set(PRICED)
    for num_bytes in (0, 1, 4, 5, 64, 119, 120, 121, PIECE_BYTES):
        words, lines = -(-num_bytes // 4), -(-num_bytes // LINE_DATA_BYTES)
        assert [message_bytes(way, num_bytes) for way in PROTOCOLS] == [num_bytes, 8 * words, 128 * lines]
        for way in PROTOCOLS:
            assert data_bytes(way, message_bytes(way, num_bytes)) >= num_bytes
            assert message_bytes(way, data_bytes(way, num_bytes)) <= num_bytes


# ---- results


@pytest.mark.parametrize("way", IN_LINES)
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow), 5])
def test_every_algorithm(world: int, way: str) -> None:
    cases = [(1, torch.float32), (37, torch.int64), (1501, torch.float16)] if world == 3 else [(67, torch.int16)]
    on_ranks(world, check_plans, world // 2, 1 + world % 2, cases, way, ranks="threads", num_threads=1)


def check_sizes(comm: epcomm.Communicator, way: str) -> None:
    """Nothing, an item, around a word, a line, a piece; more tiles than slots."""
    ring = ALGORITHMS["ring"].plan("allreduce", comm.size, channels=2, protocol=way)
    for num_items in (0, 1, 3, 4, 119, 120, 121, 2 * PIECE_BYTES - 1, 700_001):
        check_plan(comm, ring, "allreduce", num_items, torch.int8)
    shallow = ALGORITHMS["two_shot"].plan("allreduce", comm.size, pieces=3, fifo_depth=2, protocol=way)
    check_plan(comm, shallow, "allreduce", 700_001, torch.float32, "avg")
    check_plan(comm, ALGORITHMS["bruck"].plan("alltoall", comm.size, protocol=way), "alltoall", 70_001, torch.float32)


@pytest.mark.parametrize("way", IN_LINES)
@pytest.mark.parametrize("world, num_threads", [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_sizes(world: int, num_threads: int, way: str) -> None:
    on_ranks(world, check_sizes, way, num_threads=num_threads)


def check_side_by_side(comm: epcomm.Communicator, way: str) -> None:
    for channels in (1, 2, 4):
        check_plans(comm, 1, channels, [(1501, torch.int64)], way)


@pytest.mark.slow
@pytest.mark.parametrize("way", IN_LINES)
@pytest.mark.parametrize("world, num_threads", [(2, 3), (3, 2)])
def test_programs_that_run_side_by_side(world: int, num_threads: int, way: str) -> None:
    on_ranks(world, check_side_by_side, way, num_threads=num_threads)


def check_dtypes(comm: epcomm.Communicator, way: str) -> None:
    def plan(name: str, kind: str) -> Plan:
        return ALGORITHMS[name].plan(kind, comm.size, root=comm.size - 1, protocol=way)

    for dtype, op in REDUCTIONS:
        if dtype is not torch.bfloat16 or op == "max":  # its sums are rounded
            check_plan(comm, plan("ring", "allreduce"), "allreduce", 67, dtype, op)
            check_plan(comm, plan("double_binary_tree", "reduce"), "reduce", 67, dtype, op, root=comm.size - 1)
    for dtype in MOVED:
        check_plan(comm, plan("bruck", "allgather"), "allgather", 67, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("way", IN_LINES)
def test_every_dtype_and_op(way: str) -> None:
    on_ranks(3, check_dtypes, way)


@pytest.mark.parametrize("path", MSCCL, ids=lambda path: path.stem)
@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) for way in IN_LINES])
def test_plans_that_others_wrote(path: Path, way: str) -> None:
    """Those that say LL run so in `test_plan_execution`, too."""
    plan = replace(from_msccl(path.read_text(), path.name), protocol=way)
    kind, num_chunks = plan.collective.kind, plan.collective.num_chunks

    def body(comm: epcomm.Communicator) -> None:
        for num_items in (16 * num_chunks, 16 * 500 * num_chunks):
            placement = {"in_place": plan.in_place, "out_of_place": plan.out_of_place}
            check_plan(comm, plan, kind, num_items, torch.int32, **placement)

    on_ranks(plan.num_ranks, body, ranks="threads", num_threads=1)


# ---- what messages don't order


def echo(way: str) -> Plan:
    """A broadcast of 2 chunks whose root takes what comes back while, but for the message, it may still be sending.

    What comes back, one chunk further on, would overwrite the second chunk before it is sent.
    """
    given, kept, stage, later = (Location(*at) for at in (("input", 0), ("output", 0), ("scratch", 0), ("scratch", 1)))
    sending = (
        Step(Op.COPY, given, kept, 2), Step(Op.COPY, given, stage, 2), Step(Op.SEND, stage, None, 2, send_to=1),
    )  # fmt: skip
    taking = (Step(Op.RECV, None, later, 2, receive_from=1),)
    passing_on = (Step(Op.RECV_COPY_SEND, None, kept, 2, receive_from=0, send_to=0),)
    programs = ((Program(0, sending), Program(0, taking)), (Program(0, passing_on),))
    return Plan("echo", Collective("broadcast", 2, 2), programs, scratch_chunks=3, in_place=False, protocol=way)


def test_accesses_that_messages_ordered_wait_for_each_other() -> None:
    plan = echo(LL)
    order = [position for position in prove(plan).order if position.rank == 0]
    found = local_order(plan, 0, order)
    assert {position: after for position, after in found.items() if after} == {
        Position(0, 1, 0, 0): {Dependency(0, 1), Dependency(0, 2)}
    }
    assert not any(local_order(plan, 1, [Position(1, 0, 0, 0)]).values())
    places = [dict.fromkeys(PROTOCOLS, value) for value in (0, 1 << 20, 0)]
    fifos = FifoMemory((0, 0), 0, places[0], places[1], 0, 0, places[2])
    sizes = {way: lower(prove(echo(way)), 0, 2, 512, fifos).size for way in PROTOCOLS}
    assert sizes[LL] == sizes[LL128] == sizes["simple"] + table.AFTER_WORDS


@pytest.mark.parametrize("way", PROTOCOLS)
def test_an_answer_to_the_first_chunk_does_not_overwrite_the_second(way: str) -> None:
    on_ranks(2, check_plan, echo(way), "broadcast", 32_000, torch.int64, "sum", 0, False, num_threads=2)


def partly_filled(way: str) -> Plan:
    """A broadcast whose last chunk, which may be smaller, travels from scratch, with room for more, to scratch."""
    given, kept, stage = ([Location(buffer, chunk) for chunk in (0, 1)] for buffer in ("input", "output", "scratch"))
    sending = [Step(Op.COPY, given[chunk], stage[chunk]) for chunk in (0, 1)]
    sending += [Step(Op.SEND, stage[chunk], send_to=1) for chunk in (0, 1)]
    sending += [Step(Op.COPY, given[chunk], kept[chunk]) for chunk in (0, 1)]
    taking = [Step(Op.RECV, None, stage[chunk], receive_from=0) for chunk in (0, 1)]
    taking += [Step(Op.COPY, stage[chunk], kept[chunk]) for chunk in (0, 1)]
    programs = ((Program(0, tuple(sending)),), (Program(0, tuple(taking)),))
    return Plan("scratch", Collective("broadcast", 2, 2), programs, scratch_chunks=2, in_place=False, protocol=way)


def cut_off(way: str) -> Plan:
    """The same, from the input itself: what is sent is less than what there is room for."""
    plan = partly_filled(way)
    ((sending,), taking) = plan.programs
    sends = tuple(replace(step, src=Location("input", step.src.offset)) for step in sending.steps[2:4] if step.src)
    return replace(plan, name="cut off", programs=((replace(sending, steps=sends + sending.steps[4:]),), taking))


@pytest.mark.parametrize("way", PROTOCOLS)
def test_both_ends_of_a_message_agree_how_long_it_is(way: str) -> None:
    def body(comm: epcomm.Communicator) -> None:
        direct = ALGORITHMS["ring"].plan("broadcast", 2, protocol=way)
        for num_items in (17, 1000, 33_001):
            for plan in (partly_filled(way), cut_off(way)):
                check_plan(comm, plan, "broadcast", num_items, torch.int32, in_place=False)
            check_plan(comm, direct, "broadcast", num_items, torch.int32)

    on_ranks(2, body, timeout=20.0)


# ---- flags of earlier messages


def check_beside_others(comm: epcomm.Communicator) -> None:
    """Plans with other slots in the same places, other protocols, other collectives, in turn."""
    made = [
        ALGORITHMS[name].plan("allreduce", comm.size, channels=channels, fifo_depth=depth, protocol=way)
        for name, channels, depth in (("ring", 1, 8), ("one_shot", 2, 2), ("recursive_doubling", 1, 3))
        for way in PROTOCOLS
    ]
    for num_items in (5, 3001, 40_001, 77):
        for plan in made:
            check_plan(comm, plan, "allreduce", num_items, torch.int32)
        works(comm)


def test_slots_of_other_plans_and_after_a_reset() -> None:
    def body(comm: epcomm.Communicator) -> None:
        check_beside_others(comm)
        for _ in range(2):
            comm.barrier()
            if comm.rank == 1:
                comm.abort("enough")
            raised_by(comm.allreduce, torch.ones(5), algorithm="ring")
            comm.reset()
            check_beside_others(comm)

    on_ranks(3, body, num_threads=2)


def flags_used(comm: epcomm.Communicator) -> np.ndarray:
    """This rank's counts of flags, [protocols, workers]: a view."""
    plans = comm._reductions._plans
    return plans._counts.array.view(np.int64)[plans._first_flag_count :].reshape(len(PROTOCOLS), -1)


@pytest.mark.parametrize("way", IN_LINES)
def test_flags_that_begin_again_are_not_found_in_old_messages(way: str) -> None:
    """The numbers that come after the last one are those of the first messages, which lie in the same slots."""
    def body(comm: epcomm.Communicator) -> None:
        plan = ALGORITHMS["ring"].plan("allreduce", comm.size, channels=2, protocol=way)
        check_plan(comm, plan, "allreduce", 5003, torch.int32)
        used = flags_used(comm)[PROTOCOLS.index(way)]
        assert (used == used[0]).all() and 0 < used[0] < 100
        for left in (0, 3, 11):
            comm.barrier()
            flags_used(comm)[PROTOCOLS.index(way)] = MAX_FLAG - left
            check_plan(comm, plan, "allreduce", 5003, torch.int32)
            assert (used == used[0]).all() and 0 < used[0] < 100

    on_ranks(3, body, num_threads=2)


# ---- what is refused, failures


def test_lines_that_may_arrive_in_parts_are_refused() -> None:
    def body(comm: epcomm.Communicator) -> tuple[Raised, torch.Tensor]:
        plans = {way: ALGORITHMS["ring"].plan("allreduce", 2, protocol=way) for way in PROTOCOLS}
        target = comm._runtime.target
        with mock.patch.object(target, "moves_whole_lines", return_value=False):
            raised = raised_by(comm.allreduce, torch.ones(5), algorithm=plans[LL128])
        comm.reset()
        return raised, comm.allreduce(torch.ones(5), algorithm=plans[LL])

    for raised, total in on_ranks(2, body):
        assert "protocol ll128: wanted ranks on one GPU, or on GPUs that NVLink's switch joins" in raised.text
        assert total.tolist() == [2.0] * 5


@pytest.mark.parametrize("multicast, group, wanted", [(1, None, True), (0, True, True), (0, False, False)])
def test_where_cuda_moves_whole_lines(multicast: int, group: bool | None, wanted: bool) -> None:
    target = SimpleNamespace(_group=None if group is None else SimpleNamespace(is_one_gpu=group))
    assert CudaTarget.moves_whole_lines(target, SimpleNamespace(multicast=multicast)) is wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("way", IN_LINES)
def test_a_message_that_does_not_come(way: str) -> None:
    """Whoever polls a word or a line hears of a peer's failure at once, and gives up in time without one."""
    def body(comm: epcomm.Communicator, is_told: bool) -> Raised:
        plan = ALGORITHMS["ring"].plan("allreduce", 2, protocol=way)
        if comm.rank == 0:
            return raised_by(comm.allreduce, torch.ones(5000), algorithm=plan)
        take_part_in_silence(comm, plan)
        if is_told:
            comm.abort("rank 1 has had enough")
        return raised_by(comm.barrier, timeout=60.0)

    told, late = (on_ranks(2, body, is_told, timeout=limit)[0] for is_told, limit in ((True, 60.0), (False, 1.0)))
    assert isinstance(told.error, PeerFailedError) and "rank 1 has had enough" in told.text
    wanted = "rank 1, to send the plan's next message"
    assert isinstance(late.error, epcomm.errors.TimeoutError) and wanted in late.text, late.text
