"""Checks of every collective against its definition, on one communicator: what tests run on worlds of all kinds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from collective_cases import FLOATS, FORMS, MOVED, REDUCTIONS, addend, payload, reduced, same_bits

import epcomm
from epcomm.testing.adversary import Pauses

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


def check_reductions(comm: epcomm.Communicator, cases: list[Any], largest: str = "two_shot") -> None:
    """allreduce and reduce: every case new, into `out`, in place, and by each algorithm that takes its size.

    `largest` is the algorithm for all sizes; "auto" where there is no choice.
    """
    for case, (dtype, op, shape) in enumerate(cases):
        inputs = [addend(rank, shape, dtype, op, case, comm.size) for rank in range(comm.size)]
        own, wanted, label = inputs[comm.rank], reduced(inputs, op), (dtype, op, shape)
        x = in_form(case, own)
        check(comm, label, comm.allreduce(x, op), wanted)
        check(comm, (*label, "x changed"), x, own)
        out = torch.empty_like(own)
        assert comm.allreduce(x, op, out=out, algorithm=largest) is out
        check(comm, (*label, largest), out, wanted)
        if largest != "auto" and own.numel() * own.element_size() <= ONE_SHOT:
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


# ---- data movement: `shape` is what each rank holds of one part


def moved_shapes(dtype: torch.dtype) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(0,), (1,), (3, 5), (0, 4), (2, 0), (1, 2, 3)]
    if dtype in (torch.float32, torch.bool):
        shapes += [(size,) for size in around(CHUNK // 8, dtype.itemsize)]
        shapes += [(CHUNK // dtype.itemsize + 1,), (3, CHUNK // dtype.itemsize)]
    return shapes


def movement_cases() -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(dtype, shape) for dtype in MOVED for shape in moved_shapes(dtype)]


def check_gathers(comm: epcomm.Communicator, cases: list[Any] | None = None) -> None:
    for case, (dtype, shape) in enumerate([*(cases or movement_cases()), (torch.float32, ())]):
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


def check_rooted(comm: epcomm.Communicator, cases: list[Any] | None = None) -> None:
    for case, (dtype, shape) in enumerate([*(cases or movement_cases()), (torch.int64, ())]):
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


def check_alltoall(comm: epcomm.Communicator, cases: list[Any] | None = None) -> None:
    for case, (dtype, shape) in enumerate(cases or movement_cases()):
        # part `to` of rank r's input is payload(r * size + to)
        def part(source: int, to: int, shape: Any = shape, dtype: Any = dtype, case: int = case) -> torch.Tensor:
            return payload(source * comm.size + to, shape, dtype, case)

        everyone = range(comm.size)
        own = torch.cat([part(comm.rank, to) for to in everyone])
        wanted = torch.cat([part(source, comm.rank) for source in everyone])
        check(comm, ("alltoall", dtype, shape), comm.alltoall(in_form(case, own)), wanted)
        assert comm.alltoall(own, out=own) is own
        check(comm, ("alltoall", dtype, shape, "in place"), own, wanted)


# ---- rounding


def check_rounding(comm: epcomm.Communicator, nodes: list[int], num_items: int) -> list[bytes]:
    """Sums are made on each node in rank order, then of the nodes' sums in their order, and rounded once.

    Returns this rank's parts of reduce_scatters whose parts are all the same.
    """
    found = []
    for dtype in FLOATS:
        inputs = [
            torch.randn(num_items, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(comm.size)
        ]
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        partial = []
        for node in dict.fromkeys(nodes):
            partial.append(sum(x.to(wide) for x, of in zip(inputs, nodes, strict=True) if of == node))
        total = sum(partial)
        assert isinstance(total, torch.Tensor)
        check(comm, dtype, comm.allreduce(inputs[comm.rank]), total.to(dtype))
        check(comm, (dtype, "avg"), comm.allreduce(inputs[comm.rank], "avg"), (total / comm.size).to(dtype))
        found.append(bytes(comm.reduce_scatter(torch.stack([inputs[comm.rank]] * comm.size)).view(torch.uint8).numpy()))
    return found


# ---- messages


def check_messages(comm: epcomm.Communicator) -> None:
    """A ring in which every pair has its own numbering, whatever the order of other calls."""
    pause, size = Pauses(5, comm.rank), comm.size
    following, previous = (comm.rank + 1) % size, (comm.rank - 1) % size
    shapes = [(0,), (1,), (), (33,), (16_384,), (16_385,), (500_000,), (2, 3)]
    for call, shape in enumerate(shapes * 2):
        dtype = (torch.float32, torch.bool, torch.int64)[call % 3]
        work = comm.send(payload(comm.rank, shape, dtype, call), following, tag=call, async_op=True)
        pause()
        if call % 3 == 0:
            comm.barrier()  # messages stay outside of the sequence of collectives
        out = torch.empty(shape, dtype=dtype)
        assert comm.recv(out, previous, tag=call) is out
        assert same_bits(out, payload(previous, shape, dtype, call)), (call, shape)
        assert work is not None and work.wait()
