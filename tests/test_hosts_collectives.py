"""Every collective among ranks on several hosts: parts of this machine that share no memory, joined by TCP."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import addend, payload, reduced, same_bits
from collective_checks import (
    CHUNK,
    STREAMING,
    check,
    check_alltoall,
    check_gathers,
    check_messages,
    check_reduce_scatter,
    check_reductions,
    check_rooted,
    check_rounding,
    reduction_cases,
)
from failure_cases import Raised, raised_by, works
from host_cases import EVERY_WORLD, WORLDS, on_hosts

import epcomm
from epcomm.device.cpu import network
from epcomm.errors import MismatchError, PeerFailedError, UnsupportedError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.adversary import delay_operations


def disturbed(comm: epcomm.Communicator, body: Callable[..., Any], *args: Any) -> None:
    delay_operations(comm, seed=comm.size, longest=0.001)
    body(comm, *args)


@EVERY_WORLD
def test_allreduce_and_reduce(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, disturbed, check_reductions, list(reduction_cases()), "auto")


@EVERY_WORLD
def test_reduce_scatter(hosts: list[int], port: int) -> None:
    large = [(torch.float32, "sum", (CHUNK // 4 + 333,)), (torch.uint8, "max", (3, CHUNK // 16))]
    small = [case for case in reduction_cases() if torch.Size(case[2]).numel() < 10_000]
    on_hosts(hosts, port, disturbed, check_reduce_scatter, small + large)


@EVERY_WORLD
@pytest.mark.parametrize("body", [check_gathers, check_rooted, check_alltoall])
def test_data_movement(hosts: list[int], port: int, body: Callable[[epcomm.Communicator], None]) -> None:
    on_hosts(hosts, port, disturbed, body)


@EVERY_WORLD
def test_messages(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, check_messages)


def several_programs(comm: epcomm.Communicator) -> None:
    cases = [(torch.float32, "sum", (5,)), (torch.float32, "sum", (200_001,)), (torch.int8, "sum", (70_000, 3))]
    check_reductions(comm, [*cases, (torch.bfloat16, "avg", (STREAMING // 2 + 9,))], "auto")
    check_reduce_scatter(comm, cases)
    check_gathers(comm)


def test_two_programs_per_rank(port: int) -> None:
    on_hosts(WORLDS["1+2"], port, several_programs, num_threads=2)


def a_program_of_calls(comm: epcomm.Communicator) -> None:
    """Small and large operations of all kinds behind one another, asynchronous ones among them."""
    size, rank = comm.size, comm.rank
    for call in range(30):
        shape = ((3,), (CHUNK // 2 + 5,), (900,))[call % 3]
        inputs = [addend(peer, shape, torch.float32, "sum", call, size) for peer in range(size)]
        works = [comm.allreduce(inputs[rank], async_op=True), comm.allgather(inputs[rank], async_op=True)]
        splits = [[(source + to + call) % 4 * 1000 for to in range(size)] for source in range(size)]
        sent = [payload(peer, (sum(splits[peer]), 3), torch.float32, call) for peer in range(size)]
        received = comm.alltoallv(sent[rank], splits[rank])
        parts = [sent[peer].split(splits[peer])[rank] for peer in range(size)]
        check(comm, ("alltoallv", call), received, torch.cat(parts))
        check(comm, ("allreduce", call), works[0].result(), reduced(inputs, "sum"))
        check(comm, ("allgather", call), works[1].result(), torch.cat(inputs))
        comm.barrier()


@EVERY_WORLD
def test_calls_behind_one_another(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, a_program_of_calls)


# ---- rounding


@EVERY_WORLD
def test_rounding(hosts: list[int], port: int) -> None:
    results = on_hosts(hosts, port, check_rounding, hosts, 300_001)
    assert all(result == results[0] for result in results)  # each rank's part had the same inputs


# ---- what goes wrong


def refused_algorithms(comm: epcomm.Communicator) -> None:
    for algorithm in ("one_shot", "two_shot"):
        error = raised_by(comm.allreduce, torch.ones(3), algorithm=algorithm).error
        assert isinstance(error, UnsupportedError) and "on several hosts" in str(error), error
        comm.reset()
        works(comm)
        time.sleep(0.2)  # a failure may overtake the last words of the barrier


def test_algorithms_that_load_and_store_are_refused(port: int) -> None:
    on_hosts(WORLDS["1+1"], port, refused_algorithms)


MISMATCHES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[str]]] = {
    "operation": (lambda c: c.allreduce(torch.ones(4)), lambda c: c.barrier(), ["allreduce(", "barrier()"]),
    "shape": (
        lambda c: c.allreduce(torch.ones(600_000)),
        lambda c: c.allreduce(torch.ones(3)),
        ["(600000,)", "(3,)"],
    ),
    "movement": (
        lambda c: c.allgather(torch.ones(50_000)),
        lambda c: c.broadcast(torch.ones(50_000)),
        ["allgather(", "broadcast("],
    ),
    "root": (
        lambda c: [c.broadcast(torch.ones(9)), c.barrier()],  # a rank that gets its bytes learns in the next operation
        lambda c: [c.broadcast(torch.ones(9), 1), c.barrier()],
        ["broadcast(", "src=0", "src=1"],
    ),
}


def mismatched_calls(comm: epcomm.Communicator) -> list[Raised]:
    found = []
    for usual, other, _ in MISMATCHES.values():
        works(comm)
        time.sleep(0.2)  # a failure may overtake the last words of a barrier on their way to another host
        found.append(raised_by(other if comm.rank == 1 else usual, comm))
        comm.reset()
    works(comm)
    return found


@pytest.mark.parametrize("hosts", [WORLDS["1+1"], WORLDS["1+2"], WORLDS["interleaved"]], ids=str)
def test_mismatches(hosts: list[int], port: int) -> None:
    by_rank = on_hosts(hosts, port, mismatched_calls)
    for number, (name, (_, _, texts)) in enumerate(MISMATCHES.items()):
        for raised in (found[number] for found in by_rank):
            assert isinstance(raised.error, MismatchError), (name, raised)
            assert all(text in raised.text for text in texts), (name, raised)


def mismatched_messages(comm: epcomm.Communicator) -> str:
    if comm.rank == 0:
        comm.send(torch.ones(5), 1, tag=1)
        return raised_by(comm.barrier).text
    return raised_by(comm.recv, torch.ones(6), 0, tag=2).text


def test_mismatched_messages(port: int) -> None:
    for text in on_hosts(WORLDS["1+1"], port, mismatched_messages):
        assert "MismatchError" in text or "a message of 24 bytes" in text, text
        assert "a message of 20 bytes, torch.float32, tag=1" in text, text


WAITS: dict[str, Callable[[epcomm.Communicator], Any]] = {
    "barrier": lambda c: c.barrier(timeout=0.5),
    "allreduce": lambda c: c.allreduce(torch.ones(900_000), timeout=0.5),
    "allgather": lambda c: c.allgather(torch.ones(100), timeout=0.5),
    "allgather of chunks": lambda c: c.allgather(torch.ones(900_000), timeout=0.5),
    "reduce_scatter": lambda c: c.reduce_scatter(torch.ones(c.size, 200_000), timeout=0.5),
    "broadcast": lambda c: c.broadcast(torch.ones(900_000), timeout=0.5),
    "recv": lambda c: c.recv(torch.ones(4), c.size - 1, timeout=0.5),
    "send": lambda c: c.send(torch.ones(900_000), c.size - 1, timeout=0.5),
}


def late_rank(comm: epcomm.Communicator) -> list[BaseException | None]:
    """The last rank, alone on its host, doesn't come in time."""
    found: list[BaseException | None] = []
    for call in WAITS.values():
        works(comm)
        if comm.rank == comm.size - 1:
            time.sleep(0.7)
            found.append(None)
        else:
            found.append(raised_by(call, comm).error)
        comm.reset()
    works(comm)
    return found


def test_timeouts(port: int) -> None:
    *others, _ = on_hosts(WORLDS["1+2+1"], port, late_rank)
    for number, name in enumerate(WAITS):
        errors = [found[number] for found in others]
        assert all(isinstance(error, (EpcommTimeoutError, PeerFailedError)) for error in errors), (name, errors)
        # of an allreduce one that is no rail waits for the rail of its host, which waits for the late rank; of a
        # broadcast the root for the host below, which waits for the one below it; where blocks have several chunks,
        # whose deadline comes first may wait for the next chunk of one that waits for the late rank
        is_direct = name not in ("allreduce", "broadcast", "allgather of chunks")
        awaited = "waited 0.5 s for rank 3" if is_direct else "waited 0.5 s for rank"
        assert any(awaited in str(error) for error in errors), (name, errors)


def failing_rank(comm: epcomm.Communicator) -> str:
    works(comm)
    if comm.rank == comm.size - 1:
        time.sleep(0.1)
        comm.abort("no more")
        return ""
    return raised_by(comm.allreduce, torch.ones(900_000)).text


@EVERY_WORLD
def test_a_failure_ends_waits_on_other_hosts(hosts: list[int], port: int) -> None:
    *others, _ = on_hosts(hosts, port, failing_rank)
    assert all("no more" in text for text in others), others


def test_results_do_not_depend_on_who_runs_ahead(port: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        for call in range(40):  # far more pieces than a ring has slots, with one rank behind
            if call % comm.size == comm.rank:
                time.sleep(0.003)
            root = call % comm.size
            x = payload(comm.rank, (CHUNK // 2 + call,), torch.uint8, call)
            assert same_bits(comm.broadcast(x, root), payload(root, x.shape, torch.uint8, call))

    on_hosts(WORLDS["2+2"], port, body)


def full_outbox(comm: epcomm.Communicator) -> Raised:
    """Rank 0's proxy seems to take nothing any more: what it would send has no place to wait in."""
    works(comm)
    if comm.rank == 0:
        outbox = comm._runtime._proxy.outboxes.of_rank[1]
        while outbox[network.TAKEN] < outbox[network.WRITTEN]:
            time.sleep(0.001)
        outbox[network.TAKEN] -= network.NUM_RECORDS
    raised = raised_by(comm.barrier, timeout=1.0 if comm.rank == 0 else 20.0)
    comm._close(None)
    return raised


def test_deadline_of_the_outbox(port: int) -> None:
    first, second = on_hosts(WORLDS["1+1"], port, full_outbox)
    assert type(first.error) is EpcommTimeoutError, first
    assert "rank 1" in first.text and "to take what was sent to it before" in first.text, first
    assert type(second.error) is PeerFailedError and "rank 0" in second.text, second
