"""Every collective with the GPU target's kernels, interpreted: worlds of them, and worlds that mix them with the CPU's.

Each rank checks its own result bit by bit, so a mixed world shows that both targets give the same bits. One call of
`run_ranks` goes through many cases on one communicator: a launch under the interpreter takes milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import FORMS, REDUCTIONS, addend, payload, reduced, same_bits
from failure_cases import WAITS, Raised, raised_by

import epcomm
from epcomm import errors
from epcomm.errors import ConfigError, MismatchError, PeerFailedError
from epcomm.kernels.protocol.arithmetic import supported_ops
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import rank_outcomes, run_ranks

KIB = 1 << 10
TINY, ONE_SHOT, CHUNK, PIECE = 120, 32 * KIB, 512 * KIB, 64 * KIB  # bytes at which the way of sending changes

WORLDS = [("triton", 1), ("triton", 2), ("triton", 3), ("triton", 4), ("mixed", 2), ("mixed", 3), ("mixed", 4)]
worlds = pytest.mark.parametrize("kind, world", WORLDS, ids=[f"{kind}-{world}" for kind, world in WORLDS])

INTEGERS = [getattr(torch, f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u")]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, *INTEGERS, torch.bool, torch.complex64)
ALL_REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in supported_ops(dtype)]


def on_ranks(kind: str, world: int, body: Callable[..., Any], *args: Any, **init: Any) -> list[Any]:
    """What ``body(communicator, *args)`` returns on each rank of a world of this kind."""

    def run() -> Any:
        with kernels_of(kind), epcomm.init(timeout=30.0, **init) as comm:
            return body(comm, *args)

    return run_ranks(run, world)


def check(comm: epcomm.Communicator, case: Any, got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert same_bits(got, wanted), f"rank {comm.rank}: {case}: got {got}, wanted {wanted}"


def in_form(case: int, x: torch.Tensor) -> torch.Tensor:
    """The same values: contiguous, strided, or from an address that suits no wide access."""
    return list(FORMS.values())[case % len(FORMS)](x)


# ---- reductions


def check_reductions(comm: epcomm.Communicator) -> None:
    """allreduce by both algorithms, into `out` and in place, reduce, and reduce_scatter."""
    sizes = [5, 0, 1, TINY // 4 + 1, ONE_SHOT // 4 - 3]
    cases = [(dtype, size) for size in sizes for dtype in (torch.float32, torch.bfloat16, torch.int8)]
    cases.append((torch.float32, CHUNK // 4 + 37))
    for case, (dtype, size) in enumerate(cases):
        label, inputs = (dtype, size), [addend(r, (size,), dtype, "sum", case, comm.size) for r in range(comm.size)]
        own, wanted = inputs[comm.rank], reduced(inputs, "sum")
        x, root = in_form(case, own), case % comm.size
        check(comm, label, comm.allreduce(x), wanted)
        if size > ONE_SHOT:
            continue
        out = torch.empty_like(own)
        check(comm, (*label, "two_shot"), comm.allreduce(x, out=out, algorithm="two_shot"), wanted)
        check(comm, (*label, "x changed"), x, own)
        check(comm, (*label, "reduce"), comm.reduce(x, root), wanted if comm.rank == root else None)
        if size > TINY:
            continue
        place = FORMS["unaligned"](own)
        check(comm, (*label, "in place"), comm.allreduce(place, out=place), wanted)
        whole = [addend(r, (size * comm.size, 3), dtype, "max", case, comm.size) for r in range(comm.size)]
        part = reduced(whole, "max").chunk(comm.size)[comm.rank] if size else whole[0]
        check(comm, (*label, "reduce_scatter"), comm.reduce_scatter(in_form(case, whole[comm.rank]), "max"), part)
        own_part = whole[comm.rank].chunk(comm.size)[comm.rank] if size else whole[0]
        check(comm, (*label, "into x"), comm.reduce_scatter(whole[comm.rank], "max", out=own_part), part)


@worlds
def test_reductions(kind: str, world: int) -> None:
    on_ranks(kind, world, check_reductions)


def check_arithmetic(comm: epcomm.Communicator, cases: list[Any]) -> None:
    for case, (dtype, op) in enumerate(cases):
        inputs = [addend(rank, (19,), dtype, op, case, comm.size) for rank in range(comm.size)]
        x, wanted = in_form(case, inputs[comm.rank]), reduced(inputs, op)
        check(comm, (dtype, op), comm.allreduce(x, op), wanted)
        if op == "avg" or dtype is torch.bfloat16:  # the other kernels that reduce
            check(comm, (dtype, op, "two_shot"), comm.allreduce(x, op, algorithm="two_shot"), wanted)


def test_every_dtype_and_op() -> None:
    on_ranks("triton", 3, check_arithmetic, ALL_REDUCTIONS)


def test_dtypes_and_ops_of_both_targets() -> None:
    """Those whose CPU kernels other tests compile as well."""
    on_ranks("mixed", 2, check_arithmetic, REDUCTIONS)


def reduce_any_bits(comm: epcomm.Communicator) -> list[torch.Tensor]:
    """Results of inputs with rounding, special values and overflow. A NaN may be any NaN, so it comes back as 0."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        info, generator = torch.finfo(dtype), torch.Generator().manual_seed(comm.rank)
        special = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, info.max, info.min, info.tiny, -info.tiny / 4, 1.0]
        values = torch.tensor(special, dtype=torch.float64)[torch.randint(len(special), (600,), generator=generator)]
        random = torch.randn(600, generator=generator, dtype=torch.float64)
        x = torch.where(torch.rand(600, generator=generator) < 0.3, values, random).to(dtype)
        for op in supported_ops(dtype):
            result = comm.allreduce(x, op)
            found.append(torch.cat([result.isnan(), torch.where(result.isnan(), 0.0, result).view(torch.uint8)]))
    return found


def test_special_values_and_rounding_are_the_same_on_both_targets() -> None:
    """Of float operations the oracle covers exact ones; the others must agree with the CPU's, which have their own."""
    for results in zip(*on_ranks("mixed", 2, reduce_any_bits), strict=True):
        assert torch.equal(*results)


def reduce_at_odd_address(comm: epcomm.Communicator) -> None:
    """An address that isn't a multiple of the item size, which only foreign memory has."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        inputs = [addend(rank, (300,), dtype, "sum", 3, comm.size) for rank in range(comm.size)]
        memory = bytearray(1 + 300 * dtype.itemsize)
        x = torch.frombuffer(memory, dtype=dtype, offset=1).copy_(inputs[comm.rank])
        for algorithm in ("one_shot", "two_shot"):
            check(comm, (dtype, algorithm), comm.allreduce(x, algorithm=algorithm), reduced(inputs, "sum"))
        check(comm, (dtype, "in place"), comm.allreduce(x, out=x), reduced(inputs, "sum"))


def test_addresses_of_any_alignment() -> None:
    on_ranks("mixed", 2, reduce_at_odd_address)


# ---- data movement


def check_movement(comm: epcomm.Communicator) -> None:
    size, rank = comm.size, comm.rank
    everyone = range(size)
    cases = [(torch.float32, (3, 5)), (torch.uint8, (7,)), (torch.bfloat16, (0,)), (torch.complex128, (1, 2))]
    for case, (dtype, shape) in enumerate([*cases, (torch.uint8, (20_001,))]):
        label, root = (dtype, shape), case % size
        parts = [payload(source, shape, dtype, case) for source in everyone]
        x, whole = in_form(case, parts[rank]), torch.cat(parts)
        check(comm, (*label, "allgather"), comm.allgather(x), whole)
        check(comm, (*label, "gather"), comm.gather(x, root), whole if rank == root else None)
        check(comm, (*label, "broadcast"), comm.broadcast(x, root), parts[root])
        out = torch.empty_like(parts[rank])
        scattered = comm.scatter(in_form(case, whole) if rank == root else None, root, out=out)
        check(comm, (*label, "scatter"), scattered, parts[rank])
        comm.barrier()
        sent = [[payload(source * size + to, shape, dtype, case) for to in everyone] for source in everyone]
        own, wanted = torch.cat(sent[rank]), torch.cat([sent[source][rank] for source in everyone])
        check(comm, (*label, "alltoall"), comm.alltoall(in_form(case, own)), wanted)
        check(comm, (*label, "alltoall in place"), comm.alltoall(own, out=own), wanted)
    for case in range(3):
        counts = [[(source + 2 * to + case) % 4 for to in everyone] for source in everyone]
        rows = [payload(source, (sum(counts[source]), 3), torch.float32, case) for source in everyone]
        wanted = torch.cat([rows[source].split(counts[source])[rank] for source in everyone])
        check(comm, ("alltoallv", case), comm.alltoallv(rows[rank], counts[rank]), wanted)


@worlds
def test_data_movement(kind: str, world: int) -> None:
    on_ranks(kind, world, check_movement)


def move_several_chunks(comm: epcomm.Communicator) -> None:
    parts = [payload(rank, (5 * CHUNK + 48,), torch.uint8, 1) for rank in range(comm.size)]
    check(comm, "allgather", comm.allgather(parts[comm.rank]), torch.cat(parts))
    pieces = [part[: -(part.numel() % comm.size) or None] for part in parts]
    wanted = torch.cat([piece.chunk(comm.size)[comm.rank] for piece in pieces])
    check(comm, "alltoall", comm.alltoall(pieces[comm.rank]), wanted)
    total = [addend(rank, (2 * 5 * CHUNK // 4,), torch.float32, "sum", 1, 2) for rank in range(comm.size)]
    check(comm, "reduce_scatter", comm.reduce_scatter(total[comm.rank]), reduced(total, "sum").chunk(2)[comm.rank])
    check(comm, "allreduce", comm.allreduce(total[comm.rank]), reduced(total, "sum"))


def test_rings_are_used_again() -> None:
    """More chunks than slots, so that ranks wait for slots to be free."""
    on_ranks("mixed", 2, move_several_chunks)


def reduce_in_channels(comm: epcomm.Communicator) -> None:
    for case, size in enumerate((300, 20_000, 70_001)):
        inputs = [addend(rank, (size,), torch.float32, "sum", case, comm.size) for rank in range(comm.size)]
        check(comm, size, comm.allreduce(inputs[comm.rank], algorithm="two_shot"), reduced(inputs, "sum"))
        check(comm, size, comm.allgather(inputs[comm.rank]), torch.cat(inputs))


@pytest.mark.parametrize("num_threads", [2, 5])
def test_more_channels_than_programs(num_threads: int) -> None:
    """Ranks with 1, 2 and 3 programs, and with threads, share the same channels out."""
    budgets = {"num_threads": num_threads, "sm_budget": num_threads}
    on_ranks("triton", 3, reduce_in_channels, **budgets)
    on_ranks("mixed", 2, reduce_in_channels, **budgets)


# ---- messages


def exchange_messages(comm: epcomm.Communicator) -> None:
    """Around a ring, and between two ranks in more pieces than there are slots."""
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for case, shape in enumerate([(3,), (0,), (PIECE // 4 + 1,), (7,)]):
        mine, theirs = (payload(rank, shape, torch.float32, case) for rank in (comm.rank, previous))
        comm.send(mine, following, tag=case)
        check(comm, shape, comm.recv(torch.empty(shape), previous, tag=case), theirs)
    for sender in (0, 1):
        big = payload(sender, (7 * PIECE + 5,), torch.uint8, 9)
        if comm.rank == sender:
            comm.send(big, 1 - sender)
        elif comm.rank == 1 - sender:
            time.sleep(0.2)  # so that the sender runs out of slots
            check(comm, "more pieces than slots", comm.recv(torch.empty_like(big), sender), big)


@pytest.mark.parametrize("kind, world", [("triton", 2), ("mixed", 2), ("mixed", 3)])
def test_messages(kind: str, world: int) -> None:
    on_ranks(kind, world, exchange_messages)


def test_unexpected_message() -> None:
    def body(comm: epcomm.Communicator) -> Raised:
        if comm.rank == 1:
            return raised_by(lambda: comm.recv(torch.empty(5), 0))
        return raised_by(lambda: [comm.send(torch.ones(4), 1), comm.barrier()])

    for raised in on_ranks("mixed", 2, body):
        assert isinstance(raised.error, (MismatchError, PeerFailedError)), raised
        assert "16 bytes" in raised.text and "20 bytes" in raised.text, raised


# ---- failures


def fail_and_recover(comm: epcomm.Communicator) -> list[Raised]:
    """Mismatched calls, each on a communicator that was reset after the one before."""
    x, big = torch.ones(4), torch.ones(50_000)
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: comm.allreduce(x), lambda: comm.barrier()),
        (lambda: comm.allreduce(big), lambda: comm.allreduce(big, "max")),
        (lambda: comm.allgather(x), lambda: comm.broadcast(x, 0)),
    ]
    found = []
    for usual, other in calls:
        found.append(raised_by(other if comm.rank == 1 else usual))
        comm.reset()
        check(comm, "after reset", comm.allreduce(x), x * comm.size)
    return found


@pytest.mark.parametrize("kind, world", [("triton", 2), ("mixed", 3)])
def test_mismatched_calls(kind: str, world: int) -> None:
    texts = [("allreduce(", "barrier()"), ("op=sum", "op=max"), ("allgather(", "broadcast(")]
    for raised, wanted in zip(zip(*on_ranks(kind, world, fail_and_recover), strict=True), texts, strict=True):
        assert [type(each.error) for each in raised] == [MismatchError] * world, raised
        assert all(text in each.text for text in wanted for each in raised), raised


def test_peer_that_raises() -> None:
    def body() -> None:
        with kernels_of("triton"), epcomm.init(timeout=30.0) as comm:
            comm.barrier()
            if comm.rank == 0:
                raise ValueError("out of paper")
            comm.allreduce(torch.ones(900))

    outcomes = rank_outcomes(body, 3)
    assert [type(outcome) for outcome in outcomes] == [ValueError, PeerFailedError, PeerFailedError], outcomes
    assert all("out of paper" in str(outcome) for outcome in outcomes[1:]), outcomes


def test_argument_error_of_a_peer() -> None:
    def body(comm: epcomm.Communicator) -> Raised:
        return raised_by(lambda: comm.allreduce(torch.ones(4), "median" if comm.rank == 0 else "sum"))

    first, *others = on_ranks("triton", 2, body)
    assert isinstance(first.error, ConfigError) and all(isinstance(each.error, PeerFailedError) for each in others)


@pytest.mark.parametrize("call", ["barrier", "one_shot", "two_shot", "exchange", "recv"])
def test_deadline(call: str) -> None:
    """Rank 1, interpreted, waits for rank 0, which does not come until rank 1 has given up."""

    def body(comm: epcomm.Communicator) -> Raised:
        calls: dict[str, Callable[[], Any]] = {
            "barrier": lambda: comm.barrier(timeout=0.3),
            "one_shot": lambda: comm.allreduce(torch.ones(4), timeout=0.3),
            "two_shot": lambda: comm.allreduce(torch.ones(4), algorithm="two_shot", timeout=0.3),
            "exchange": lambda: comm.alltoall(torch.ones(4), timeout=0.3),
            "recv": lambda: comm.recv(torch.ones(4), 0, timeout=0.3),
        }
        comm.barrier()
        return raised_by(calls[call] if comm.rank == 1 else lambda: WAITS["check"](comm))

    _, raised = on_ranks("mixed", 2, body)
    assert isinstance(raised.error, errors.TimeoutError) and "rank 0" in raised.text, raised
