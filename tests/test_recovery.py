"""After a failure: `reset` revives the communicator, or it is closed and made anew in the same processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failure_cases import WAITS, X, raised_by, works

import epcomm
from epcomm.errors import ClosedError, MismatchError, PeerFailedError, PeerLostError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import rank_outcomes, run_ranks


@pytest.mark.parametrize(
    "world, ranks, num_threads",
    [(2, "processes", None), (3, "processes", 2), (5, "processes", None), (3, "threads", None)],
)
def test_reset_after_every_kind_of_wait(world: int, ranks: str, num_threads: int | None) -> None:
    """Ranks are caught in the middle of each operation, at different points of it; then all of them work again."""

    def body() -> None:
        with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
            delay_operations(comm, seed=5, longest=0.001)
            for name, call in WAITS.items():
                if name in ("entering later", "close") or (name == "alltoallv" and world != 3):
                    continue
                works(comm)
                if comm.rank == 1:
                    comm.abort("on purpose")
                    assert isinstance(raised_by(comm.barrier).error, PeerFailedError)
                else:
                    error = raised_by(call, comm).error
                    assert isinstance(error, PeerFailedError) and "on purpose" in str(error), error
                comm.reset()
                works(comm)

    run_ranks(body, world, ranks=ranks)


def test_reset_with_operations_in_flight() -> None:
    """Queued works end with the failure before the reset, and nothing of theirs arrives after it."""

    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            bound = comm.bind_allreduce(x := torch.full((3,), float(comm.rank)))
            for number in range(5):
                peer = (comm.rank + 1) % comm.size
                submitted: list[Any] = [comm.send(torch.full((500_000,), -1.0), peer, async_op=True)]
                if comm.rank != 1:
                    submitted += [comm.allreduce(torch.full((300_000,), -1.0), async_op=True) for _ in range(3)]
                else:
                    time.sleep(0.01 * number)
                    comm.abort("on purpose")
                comm.reset()
                assert all(isinstance(work.exception(), PeerFailedError) for work in submitted)
                works(comm)
                x.fill_(comm.rank)
                assert bound().tolist() == [3.0] * 3

    run_ranks(body, 3)


def test_reset_of_a_healthy_communicator() -> None:
    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            for _ in range(3):
                comm.reset()
                works(comm)
            work = comm.allreduce(X, async_op=True)
            comm.reset()  # drains first
            assert work.wait() and work.result().tolist() == [3.0] * 4

    run_ranks(body, 3, disturb=1)


def test_failures_and_resets_in_turns() -> None:
    """Each rank fails in turn, right after the last reset, while others may still be on their way out of it."""

    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            for number in range(30):
                if number % comm.size == comm.rank:
                    assert raised_by(comm.allreduce, X, "mean")
                else:
                    error = raised_by(comm.allreduce, X).error
                    assert isinstance(error, PeerFailedError) and f"rank {number % comm.size}" in str(error), error
                comm.reset()
                if number % 3 == 0:
                    works(comm)

    run_ranks(body, 3, disturb=2)


def test_reset_that_a_rank_does_not_come_to() -> None:
    def body() -> None:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 0:
            comm.abort()
            assert isinstance(raised_by(comm.reset, timeout=0.5).error, EpcommTimeoutError)
            assert isinstance(raised_by(comm.barrier).error, PeerFailedError)
        else:
            assert isinstance(raised_by(comm.barrier).error, PeerFailedError)
            time.sleep(0.8)
        comm.reset()
        works(comm)
        comm.close()

    run_ranks(body, 2)


def test_reset_cannot_revive_a_killed_rank() -> None:
    """The survivors are told, and make a communicator of their own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def body(port: int) -> Any:
        comm = epcomm.init(timeout=20.0)
        works(comm)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        first = raised_by(comm.barrier)
        second = raised_by(comm.reset)
        comm.close()
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        with epcomm.init(store=client, rank=comm.rank // 2, world_size=2, timeout=20.0) as survivors:
            works(survivors)
        assert survivors.closed
        return first, second

    outcomes = rank_outcomes(body, 3, store.port, expendable=[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome, tuple), outcome
        assert all(isinstance(raised.error, PeerLostError) and raised.error.rank == 1 for raised in outcome), outcome


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_closed_and_made_anew(ranks: str) -> None:
    def body() -> None:
        for number in range(4):
            comm = epcomm.init(timeout=20.0)
            assert epcomm.default_communicator() is comm
            works(comm)
            if number % 2:
                error = raised_by(comm.allgather if comm.rank else comm.allreduce, X).error
                assert isinstance(error, MismatchError)
            comm.close()
            with pytest.raises(ClosedError):
                epcomm.allreduce(X)

    run_ranks(body, 3, ranks=ranks)


def test_error_in_a_with_statement_closes_without_waiting() -> None:
    def body() -> None:
        before = set(threading.enumerate())
        with pytest.raises(ValueError, match="mine"), epcomm.init(timeout=20.0) as comm:
            works(comm)
            pending = [comm.allreduce(X, async_op=True), comm.recv(torch.ones(3), 1 - comm.rank, async_op=True)]
            if comm.rank == 0:
                raise ValueError("mine")
            error = raised_by(pending[1].wait).error
            assert isinstance(error, PeerFailedError) and "mine" in str(error)
            raise ValueError("mine too")
        assert comm.closed
        assert set(threading.enumerate()) <= before

    run_ranks(body, 2)
