"""Every collective against its definition: dtypes, ops, sizes, in and out of place, on worlds of 1 to 7 ranks.

One call of `run_ranks` goes through all cases of one collective on one communicator, with random pauses around every
operation, so each kernel runs hundreds of times on one handle with new data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from collective_cases import FORMS, MOVED, REDUCTIONS, addend, payload, reduced, same_bits

import epcomm
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import run_ranks

WORLDS = (1, 2, 3, 5, 7)
KIB = 1 << 10
TINY, ONE_SHOT, CHUNK, STREAMING = 120, 32 * KIB, 512 * KIB, 4096 * KIB  # bytes at which the way of sending changes


def around(num_bytes: int, item_bytes: int) -> list[int]:
    """Item counts just under, at and over a limit in bytes."""
    return [num_bytes // item_bytes + more for more in (-1, 0, 1)]


def check(comm: epcomm.Communicator, case: Any, got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    """Fails with the first elements that differ."""
    if same_bits(got, wanted):
        return
    if got is None or wanted is None or got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise AssertionError(f"rank {comm.rank}: {case}: got {got}, wanted {wanted}")
    index = (got != wanted).flatten().nonzero().flatten()[:5]
    raise AssertionError(
        f"rank {comm.rank}: {case}: elements {index.tolist()} are {got.flatten()[index]}, not {wanted.flatten()[index]}"
    )


def on_ranks(world: int, body: Callable[..., None], *args: Any, ranks: str = "processes", **init: Any) -> None:
    """Runs ``body(communicator, *args)`` on all ranks."""

    def run() -> None:
        with epcomm.init(timeout=30.0, **init) as comm:
            delay_operations(comm, seed=world, longest=0.001)
            body(comm, *args)

    run_ranks(run, world, ranks=ranks)


def reduction_cases() -> Iterator[tuple[torch.dtype, str, tuple[int, ...]]]:
    for dtype, op in REDUCTIONS:
        yield from ((dtype, op, shape) for shape in ((0,), (), (1,), (7, 9)))
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        sizes = itertools.chain.from_iterable(around(limit, dtype.itemsize) for limit in (TINY, ONE_SHOT, CHUNK))
        yield from ((dtype, "sum", (size,)) for size in sizes)
    yield torch.float32, "sum", (3 * CHUNK // 4 + 333,)
    yield torch.int64, "max", (2 * CHUNK // 8, 3)
    yield torch.float32, "sum", (STREAMING // 4 + 17,)


def in_form(case: int, x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous or not, depending on the number of the case."""
    return list(FORMS.values())[case % len(FORMS)](x)


def check_reductions(comm: epcomm.Communicator, cases: list[Any]) -> None:
    """allreduce and reduce: every case new, into `out`, in place, and by each algorithm that takes its size."""
    for case, (dtype, op, shape) in enumerate(cases):
        inputs = [addend(rank, shape, dtype, op, case, comm.size) for rank in range(comm.size)]
        own, wanted, label = inputs[comm.rank], reduced(inputs, op), (dtype, op, shape)
        x = in_form(case, own)
        check(comm, label, comm.allreduce(x, op), wanted)
        check(comm, (*label, "x changed"), x, own)
        out = torch.empty_like(own)
        assert comm.allreduce(x, op, out=out, algorithm="two_shot") is out
        check(comm, (*label, "two_shot"), out, wanted)
        if own.numel() * own.element_size() <= ONE_SHOT:
            check(comm, (*label, "one_shot"), comm.allreduce(x, op, algorithm="one_shot"), wanted)
        root = case % comm.size
        result = comm.reduce(x, root, op)
        check(comm, (*label, "reduce"), result, wanted if comm.rank == root else None)
        own = FORMS["unaligned"](own)
        assert comm.allreduce(own, op, out=own) is own
        check(comm, (*label, "in place"), own, wanted)


def check_reduce_scatter(comm: epcomm.Communicator, cases: list[Any]) -> None:
    for case, (dtype, op, shape) in enumerate(cases):
        shape = (comm.size * shape[0], *shape[1:]) if shape else (2 * comm.size,)
        inputs = [addend(rank, shape, dtype, op, case, comm.size) for rank in range(comm.size)]
        wanted, x = reduced(inputs, op).chunk(comm.size)[comm.rank], in_form(case, inputs[comm.rank])
        check(comm, (dtype, op, shape), comm.reduce_scatter(x, op), wanted)
        out = torch.empty_like(wanted)
        assert comm.reduce_scatter(x, op, out=out) is out
        check(comm, (dtype, op, shape, "out"), out, wanted)
        x = inputs[comm.rank].clone()
        part = x.chunk(comm.size)[comm.rank]
        check(comm, (dtype, op, shape, "into its own part of x"), comm.reduce_scatter(x, op, out=part), wanted)


@pytest.mark.parametrize("world", WORLDS)
def test_allreduce_and_reduce(world: int) -> None:
    on_ranks(world, check_reductions, list(reduction_cases()))


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter(world: int) -> None:
    large = [(torch.float32, "sum", (CHUNK // 4 + 333,)), (torch.uint8, "max", (3, CHUNK // 16))]
    small = [case for case in reduction_cases() if torch.Size(case[2]).numel() < 10_000]
    on_ranks(world, check_reduce_scatter, small + large)


# ---- data movement: `shape` is what each rank holds of one part


def moved_shapes(dtype: torch.dtype) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(0,), (1,), (3, 5), (0, 4), (2, 0), (1, 2, 3)]
    if dtype in (torch.float32, torch.bool):
        shapes += [(size,) for size in around(CHUNK // 8, dtype.itemsize)]
        shapes += [(CHUNK // dtype.itemsize + 1,), (3, CHUNK // dtype.itemsize)]
    return shapes


def movement_cases() -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(dtype, shape) for dtype in MOVED for shape in moved_shapes(dtype)]


def check_gathers(comm: epcomm.Communicator) -> None:
    for case, (dtype, shape) in enumerate([*movement_cases(), (torch.float32, ())]):
        parts = [payload(rank, shape, dtype, case) for rank in range(comm.size)]
        x, wanted = in_form(case, parts[comm.rank]), torch.cat(parts) if shape else torch.stack(parts)
        check(comm, ("allgather", dtype, shape), comm.allgather(x), wanted)
        out, root = torch.empty_like(wanted), case % comm.size
        assert comm.allgather(x, out=out) is out
        check(comm, ("allgather", dtype, shape, "out"), out, wanted)
        result = comm.gather(x, root)
        check(comm, ("gather", dtype, shape, root), result, wanted if comm.rank == root else None)
        if shape:
            out = torch.zeros_like(wanted)
            own = out[comm.rank * shape[0] : (comm.rank + 1) * shape[0]].copy_(parts[comm.rank])
            check(comm, ("allgather", dtype, shape, "x in its place in out"), comm.allgather(own, out=out), wanted)


def check_rooted(comm: epcomm.Communicator) -> None:
    for case, (dtype, shape) in enumerate([*movement_cases(), (torch.int64, ())]):
        root = case % comm.size
        sent, own = payload(root, shape, dtype, case), payload(comm.rank, shape, dtype, case)
        x = in_form(case, own)
        check(comm, ("broadcast", dtype, shape, root), comm.broadcast(x, root), sent)
        check(comm, ("broadcast", dtype, shape, "x changed"), x, own)
        assert comm.broadcast(own, root, out=own) is own
        check(comm, ("broadcast", dtype, shape, "in place"), own, sent)
        if not shape:
            continue
        whole = torch.cat([payload(rank, shape, dtype, case) for rank in range(comm.size)])
        part = whole.chunk(comm.size)[comm.rank] if shape[0] else whole
        out = torch.empty_like(part)
        if comm.rank == root:
            check(comm, ("scatter", dtype, shape, root), comm.scatter(in_form(case, whole), root), part)
        else:
            assert comm.scatter(None, root, out=out) is out
            check(comm, ("scatter", dtype, shape, root), out, part)


def check_alltoall(comm: epcomm.Communicator) -> None:
    for case, (dtype, shape) in enumerate(movement_cases()):
        # part `to` of rank r's input is payload(r * size + to)
        def part(source: int, to: int, shape: Any = shape, dtype: Any = dtype, case: int = case) -> torch.Tensor:
            return payload(source * comm.size + to, shape, dtype, case)

        everyone = range(comm.size)
        own = torch.cat([part(comm.rank, to) for to in everyone])
        wanted = torch.cat([part(source, comm.rank) for source in everyone])
        check(comm, ("alltoall", dtype, shape), comm.alltoall(in_form(case, own)), wanted)
        assert comm.alltoall(own, out=own) is own
        check(comm, ("alltoall", dtype, shape, "in place"), own, wanted)


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
        rank = epcomm.rendezvous.launched_rank.get().rank
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
