"""Collectives whose parts lie in lists of tensors, one per rank, instead of side by side in one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collective_cases import addend, payload, reduced, same_bits
from collective_checks import check, in_form

import epcomm
from epcomm.errors import ConfigError, PeerFailedError
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import rank_outcomes, run_ranks

SHAPES = [(0,), (), (1,), (3, 5), (2, 0), (70_000,), (3, 200_000)]
LIST, SIDE_BY_SIDE, MIXED = range(3)


def room(shape: tuple[int, ...], dtype: torch.dtype, size: int, how: int) -> list[torch.Tensor]:
    """Tensors to receive into: of their own, views of one, or views of one in another order."""
    if how == LIST:
        return [torch.empty(shape, dtype=dtype) for _ in range(size)]
    views = list(torch.empty(size, *shape, dtype=dtype).unbind(0))
    return views if how == SIDE_BY_SIDE else views[::-1]


def even_lists() -> None:
    """Every operation with equal parts, three times each with lists that lie differently."""
    with epcomm.init(timeout=30.0) as comm:
        size, rank = comm.size, comm.rank
        for case, shape in enumerate(SHAPES):
            for how in (LIST, SIDE_BY_SIDE, MIXED):
                dtype, root = (torch.float32, torch.int64, torch.bfloat16)[how], (case + how) % size
                label: Any = shape, dtype, how
                parts = [payload(source, shape, dtype, case) for source in range(size)]
                x, out = in_form(case, parts[rank]), room(shape, dtype, size, how)
                assert comm.allgather(x, out=out) is out
                for got, wanted in zip(out, parts):
                    check(comm, ("allgather", *label), got, wanted)
                out = room(shape, dtype, size, how) if rank == root else None
                assert comm.gather(x, root, out=out) is out
                for got, wanted in zip(out or [], parts):
                    check(comm, ("gather", *label), got, wanted)
                own = torch.empty(shape, dtype=dtype)
                comm.scatter([in_form(how, part) for part in parts] if rank == root else None, root, out=own)
                check(comm, ("scatter", *label), own, parts[rank])
                addends = [
                    [addend(source, shape, torch.float32, "sum", case + to, size) for to in range(size)]
                    for source in range(size)
                ]
                wanted = reduced([sent[rank] for sent in addends], "sum")
                listed = [in_form(case + how, part) for part in addends[rank]]
                check(comm, ("reduce_scatter", *label), comm.reduce_scatter(listed), wanted)
                own = torch.empty(shape)
                assert comm.reduce_scatter(listed, out=own, async_op=True).result() is own
                check(comm, ("reduce_scatter, out", *label), own, wanted)


@pytest.mark.parametrize("world", [1, 3])
def test_lists_of_equal_parts(world: int) -> None:
    run_ranks(even_lists, world)


def uneven_lists() -> None:
    """Part `to` of rank `source` has a shape of its own, which both know."""
    with epcomm.init(timeout=30.0) as comm:
        delay_operations(comm, seed=1, longest=0.0005)
        size, rank, works = comm.size, comm.rank, []
        for call, rows in enumerate((1, 0, 7, 30_000)):
            dtype = (torch.float32, torch.complex128, torch.bool)[call % 3]

            def part(source: int, to: int, rows: int = rows, dtype: torch.dtype = dtype) -> torch.Tensor:
                return payload(8 * source + to, (rows * (source + to) % 11 * rows, 1 + to), dtype, 0)

            x = [in_form(call + to, part(rank, to)) for to in range(size)]
            wanted = [part(source, rank) for source in range(size)]
            for async_op in (False, True, True):
                out = [torch.empty_like(each) for each in wanted]
                result = comm.alltoall(x, out=out, async_op=async_op)
                works.append((result if async_op else None, out, wanted))
                assert async_op or result is out
        for work, out, wanted in works:
            assert work is None or work.result() is out
            assert all(same_bits(got, want) for got, want in zip(out, wanted))


@pytest.mark.parametrize("world", [1, 3])
def test_lists_of_any_parts(world: int) -> None:
    run_ranks(uneven_lists, world)


def start_before_the_peer() -> None:
    """An asynchronous exchange of uneven parts returns before the peers call it: what follows may let them come."""
    with epcomm.init(timeout=30.0) as comm:
        x, note = torch.full((3,), float(comm.rank)), torch.ones(1)
        for _ in range(3):
            if comm.rank == 0:
                work = comm.alltoallv(x, [1, 2], async_op=True)
                comm.send(note, 1)
                barrier = comm.barrier(async_op=True)
            else:
                comm.recv(note, 0)
                work = comm.alltoallv(x, [2, 1], async_op=True)
                barrier = comm.barrier(async_op=True)
            assert barrier.wait() and work.is_completed()
            assert work.result().tolist() == ([0.0, 1.0, 1.0] if comm.rank == 0 else [0.0, 0.0, 1.0])


def test_asynchronous_alltoallv_waits_for_nobody() -> None:
    run_ranks(start_before_the_peer, 2)


def tensors(*counts: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=dtype) for count in counts]


X = torch.zeros(2)
#: what one rank gets wrong, and texts that its error shows
BAD = {
    "number of tensors": (lambda c: c.allgather(X, out=tensors(2)), ["`out`", "list of 2", "1 tensors"]),
    "shape of one": (lambda c: c.allgather(X, out=tensors(2, 3)), ["from rank 1", "`out`", "(2,)", "(3,)"]),
    "dtype of one": (lambda c: c.alltoall(tensors(1, 1), out=[X, X.int()]), ["`out`", "one dtype", "int32"]),
    "unequal parts": (lambda c: c.reduce_scatter(tensors(1, 2)), ["`x`", "one dtype and shape", "(2,)"]),
    "no tensor": (lambda c: c.scatter([X, 3], c.rank), ["`x[1]`", "wanted a tensor", "int"]),
    "list into a tensor": (lambda c: c.alltoall(tensors(1, 1), out=X), ["two lists"]),
    "what peers send": (lambda c: c.alltoall(tensors(1, 1), out=tensors(1, 5)), ["`out`", "[1, 1]", "[1, 5]"]),
    "overlap": (lambda c: c.alltoall([X[:1], X[1:]], out=[X[:1], X[1:]]), ["shares memory"]),
}


def wrong_lists(name: str) -> None:
    comm = epcomm.init(timeout=20.0)
    if comm.rank == 1:
        BAD[name][0](comm)
    else:
        comm.alltoall(tensors(1, 1), out=tensors(1, 1))


@pytest.mark.parametrize("name", BAD)
def test_wrong_lists(name: str) -> None:
    other, error = rank_outcomes(wrong_lists, 2, name)
    assert type(error) is ConfigError and all(text in str(error) for text in ["rank 1", *BAD[name][1]]), error
    assert type(other) is PeerFailedError and "ConfigError" in str(other)
