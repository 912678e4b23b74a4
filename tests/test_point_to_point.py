"""send and recv: numbered per ordered pair, beside the collectives, and never in each other's way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from collective_cases import payload, same_bits
from collective_checks import check_messages

import epcomm
from epcomm.errors import PeerFailedError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.ranks import run_ranks


def messages() -> None:
    with epcomm.init(timeout=30.0) as comm:
        check_messages(comm)


@pytest.mark.parametrize("world, ranks", [(2, "processes"), (3, "processes"), (5, "processes"), (3, "threads")])
def test_messages_around_a_ring(world: int, ranks: str) -> None:
    run_ranks(messages, world, ranks=ranks)


def both_ways() -> None:
    """Directions don't block one another: both ranks send more than fits before either receives."""
    with epcomm.init(timeout=30.0) as comm:
        peer = 1 - comm.rank
        messages = [payload(comm.rank, (200_000,), torch.float32, call) for call in range(3)]
        sends = [comm.send(message, peer, async_op=True) for message in messages]
        outs = [torch.empty(200_000) for _ in range(3)]
        receives = [comm.recv(out, peer, async_op=True) for out in outs]
        assert comm.allreduce(torch.ones(100)).eq(2.0).all()
        for call, work in enumerate(receives):
            assert same_bits(work.result(), payload(peer, (200_000,), torch.float32, call))
        assert all(work.wait() for work in sends if work is not None)


def test_messages_in_both_directions() -> None:
    run_ranks(both_ways, 2)


def of_any_rank() -> None:
    """Rank 0 takes what comes, large and empty messages, while others that it names are on their way."""
    with epcomm.init(timeout=30.0) as comm:
        for call, shape in enumerate([(3,), (0,), (70_000,)] * 2):
            if comm.rank:
                comm.send(payload(comm.rank, shape, torch.float32, call), 0, tag=call)
                comm.send(payload(comm.rank, (7,), torch.int64, call), 0)
            else:
                sources = []
                for _ in range(1, comm.size):
                    out = torch.empty(shape)
                    found = comm.recv_any(out, call, async_op=bool(call % 2))
                    result, source = found.result() if call % 2 else found
                    assert result is out and same_bits(out, payload(source, shape, torch.float32, call))
                    named = torch.empty(7, dtype=torch.int64)
                    assert same_bits(comm.recv(named, source), payload(source, (7,), torch.int64, call))
                    sources.append(source)
                assert sorted(sources) == list(range(1, comm.size))


@pytest.mark.parametrize("world, ranks", [(2, "processes"), (4, "threads")])
def test_messages_of_any_rank(world: int, ranks: str) -> None:
    run_ranks(of_any_rank, world, ranks=ranks)


def of_nobody() -> BaseException:
    comm = epcomm.init(timeout=30.0)
    with pytest.raises((EpcommTimeoutError, PeerFailedError)) as caught:
        comm.recv_any(torch.empty(3), timeout=0.2 if comm.rank == 0 else None)
    return caught.value


def test_no_message_of_any_rank() -> None:
    """The deadline of one rank ends the wait of the other."""
    first, second = run_ranks(of_nobody, 2)
    assert type(first) is EpcommTimeoutError and "recv_any" in str(first) and "0.2 s" in str(first)
    assert type(second) is PeerFailedError and "TimeoutError" in str(second)


def test_messages_and_collectives_of_several_threads() -> None:
    """One thread per direction and one for collectives, on one communicator."""

    def body() -> None:
        with epcomm.init(timeout=30.0) as comm:
            peer, failures = 1 - comm.rank, []

            def guarded(loop: Callable[[], None]) -> threading.Thread:
                def run() -> None:
                    try:
                        loop()
                    except BaseException as error:
                        failures.append(error)

                thread = threading.Thread(target=run)
                thread.start()
                return thread

            def send() -> None:
                for call in range(100):
                    comm.send(payload(comm.rank, (call * 300,), torch.uint8, call), peer, tag=call)

            def receive() -> None:
                for call in range(100):
                    out = comm.recv(torch.empty(call * 300, dtype=torch.uint8), peer, tag=call)
                    assert same_bits(out, payload(peer, (call * 300,), torch.uint8, call)), call

            def reduce() -> None:
                for call in range(100):
                    assert comm.allreduce(torch.full((call,), 1.0 + comm.rank)).eq(3.0).all(), call

            for thread in [guarded(loop) for loop in (send, receive, reduce)]:
                thread.join()
            assert not failures, failures

    run_ranks(body, 2, disturb=6)
