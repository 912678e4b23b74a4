"""Ranks that call different operations, or one with different arguments: all of them learn both texts, soon."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from failure_cases import BIG, SOON, Call, Raised, X, raised_by, works

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.errors import MismatchError
from epcomm.testing.ranks import run_ranks

MISMATCHES: dict[str, tuple[Call, Call, list[str]]] = {
    "operation": (lambda c: c.allreduce(X), lambda c: c.barrier(), ["allreduce(", "barrier()", "the same order"]),
    "shape": (lambda c: c.allreduce(X), lambda c: c.allreduce(X[:3]), ["(4,)", "(3,)", "same arguments"]),
    "number of bytes": (lambda c: c.allreduce(X), lambda c: c.allreduce(BIG), ["(4,)", "(50000,)"]),
    "dtype": (lambda c: c.allreduce(X), lambda c: c.allreduce(X.int()), ["float32", "int32"]),
    "op": (lambda c: c.allreduce(BIG), lambda c: c.allreduce(BIG, "max"), ["op=sum", "op=max"]),
    "algorithm": (lambda c: c.allreduce(X), lambda c: c.allreduce(X, algorithm="two_shot"), ["auto", "two_shot"]),
    "kernel or plan": (lambda c: c.allreduce(X), lambda c: c.allreduce(X, algorithm="ring"), ["auto", "plan ring"]),
    "plan": (
        lambda c: c.allreduce(BIG, algorithm="ring"),
        lambda c: c.allreduce(BIG, algorithm=ALGORITHMS["ring"].plan("allreduce", c.size, fifo_depth=4)),
        ["plan ring allreduce"],
    ),
    "root": (lambda c: c.broadcast(X, 0), lambda c: c.broadcast(X, 1), ["src=0", "src=1"]),
    "root of reduce": (lambda c: c.reduce(X, 0), lambda c: c.reduce(X, 2), ["root=0", "root=2"]),
    "movement": (lambda c: c.allgather(BIG), lambda c: c.reduce_scatter(BIG[:3]), ["allgather(", "reduce_scatter("]),
    "row": (
        lambda c: c.alltoallv(torch.ones(3, 2), [1, 1, 1]),
        lambda c: c.alltoallv(torch.ones(3, 5), [1, 1, 1]),
        ["(2,)", "(5,)"],
    ),
    "asynchronous": (
        lambda c: c.allreduce(X, async_op=True).wait(),
        lambda c: c.alltoall(BIG[:3], async_op=True).wait(),
        ["allreduce(", "alltoall("],
    ),
}


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_mismatched_calls(ranks: str) -> None:
    def body() -> list[tuple[float, Raised]]:
        found = []
        with epcomm.init(timeout=20.0) as comm:
            for usual, other, _ in MISMATCHES.values():
                works(comm)
                if comm.rank == 1:
                    time.sleep(0.05)  # the others are in it already
                entered = time.monotonic()
                found.append((entered, raised_by(other if comm.rank == 1 else usual, comm)))
                comm.reset()
            works(comm)
        return found

    by_rank = run_ranks(body, 3, ranks=ranks)
    for number, (name, (_, _, texts)) in enumerate(MISMATCHES.items()):
        entered, raised = zip(*(found[number] for found in by_rank), strict=True)
        assert [type(each.error) for each in raised] == [MismatchError] * 3, (name, raised)
        assert all(text in each.text for text in texts for each in raised), (name, raised)
        assert all("rank 1" in each.text for each in raised), (name, raised)
        assert all(each.when < max(entered) + SOON / 2 for each in raised), (name, entered, raised)


def test_text_of_a_mismatch_names_the_arguments() -> None:
    """Of a call with many: not for the reader to compare."""
    sizes = dict(num_experts=6, topk=2, hidden=16, max_tokens=8)

    def body() -> list[str]:
        with epcomm.init(timeout=20.0) as comm:
            found = []
            for other in (dict(hidden=32), dict(placement=[1, 0, 0, 1, 1, 0]), dict(mode="latency")):
                found.append(raised_by(comm.expert_parallel, **{**sizes, **(other if comm.rank else {})}).text)
                comm.reset()
            return found

    for here, there, texts in zip((16, 32), (32, 16), run_ranks(body, 2)):
        hidden, placement, mode = (text.rpartition("; ")[2] for text in texts)
        # the second to find it may quote the first
        pairs = [f"got here and there hidden={a} and hidden={b}" for a, b in ((here, there), (there, here))]
        assert any(hidden.endswith(pair) for pair in pairs), hidden
        assert "nothing" in placement and "placement=(1, 0, 0, 1, 1, 0)" in placement and "hidden" not in placement
        assert "mode=throughput" in mode and "layout=padded" in mode and "hidden" not in mode


def test_calls_in_another_order() -> None:
    """Both ranks make the same two calls, so only their order can tell."""

    def body() -> Raised:
        comm = epcomm.init(timeout=20.0)
        calls = [lambda: comm.allreduce(X), lambda: comm.allgather(X)]
        if comm.rank == 1:
            calls.reverse()
        return raised_by(lambda: [call() for call in calls])

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, MismatchError) and "allreduce(" in raised.text and "allgather(" in raised.text


def test_closing_while_a_peer_calls_something_else() -> None:
    def body() -> Raised:
        comm = epcomm.init(timeout=20.0)
        raised = raised_by(comm.close if comm.rank == 1 else lambda: comm.allreduce(X))
        assert comm.closed == (comm.rank == 1)
        comm.close()
        assert comm.closed
        return raised

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, MismatchError) and "close()" in raised.text and "allreduce(" in raised.text


@pytest.mark.parametrize(
    "sent, wanted, texts",
    [
        ((torch.ones(3), 0), (torch.ones(4), 0), ["12 bytes", "16 bytes"]),
        ((torch.ones(3), 0), (torch.ones(3, dtype=torch.int32), 0), ["float32", "int32"]),
        ((torch.ones(3), 4), (torch.ones(3), 5), ["tag=4", "tag=5"]),
        ((torch.ones(90_000), 0), (torch.ones(3), 0), ["360000 bytes", "12 bytes"]),
    ],
)
def test_message_that_was_not_the_expected_one(sent: Any, wanted: Any, texts: list[str]) -> None:
    def body() -> Raised:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 0:
            comm.send(sent[0], 1, tag=sent[1], async_op=True)
            raised = raised_by(comm.barrier)
        else:
            raised = raised_by(comm.recv, wanted[0], 0, tag=wanted[1])
        comm.reset()
        works(comm)
        return raised

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, MismatchError) and all(text in raised.text for text in texts), raised


def test_texts_are_found_after_many_operations() -> None:
    """The readable text of a call is there however many other calls were made since it was first used."""

    def body() -> Raised:
        comm = epcomm.init(timeout=20.0)
        comm.allreduce(X)
        comm.allgather(X)
        for size in range(600):
            out, peer = torch.empty(size % 7), 1 - comm.rank
            comm.send(torch.ones(size % 7), peer, tag=size)
            comm.recv(out, peer, tag=size)
            comm.allreduce(torch.ones(size))
        return raised_by(comm.allgather if comm.rank else comm.allreduce, X)

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, MismatchError) and "allreduce(" in raised.text and "allgather(" in raised.text
