"""A rank that raises, dies, stops or is interrupted: what the other ranks see of it, soon, and never a hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from failure_cases import SOON, WAITS, Call, Raised, X, raised_by, works

import epcomm
from epcomm.errors import ClosedError, ConfigError, PeerFailedError, PeerLostError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.ranks import RankDied, rank_outcomes, run_ranks


def watch(call: Call, cause: Call, num_threads: int | None = None, timeout: float = 20.0) -> Any:
    """Rank 1 makes something happen once the others wait in `call`; returns what each rank saw."""
    with epcomm.init(timeout=20.0, num_threads=num_threads) as first:
        works(first)  # so that nothing is left to load or to compile when time counts
    comm = epcomm.init(timeout=timeout, num_threads=num_threads)
    comm.barrier(timeout=20.0)
    if comm.rank != 1:
        return raised_by(call, comm)
    time.sleep(0.2)
    return raised_by(cause, comm)


def waits_of(comm: epcomm.Communicator) -> list[Call]:
    """All waits that raise on this rank: closing never does twice, and rank 1 sends itself no messages."""
    left_out = {"close", "send", "recv"} if comm.rank == 1 else {"close"}
    return [call for name, call in WAITS.items() if name not in left_out]


def die(comm: epcomm.Communicator) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_unclosed(comm: epcomm.Communicator) -> None:
    os._exit(0)


def stop(comm: epcomm.Communicator) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave_with_an_error(comm: epcomm.Communicator) -> None:
    with comm:
        raise ValueError("no more tokens")


# ---- raising


@pytest.mark.parametrize("ranks, name", [*(("processes", name) for name in WAITS), ("threads", "one-shot")])
def test_rank_that_raises(ranks: str, name: str) -> None:
    outcomes = run_ranks(watch, 3, WAITS[name], leave_with_an_error, ranks=ranks)
    assert isinstance(outcomes[1].error, ValueError)
    for raised in (outcomes[0], outcomes[2]):
        assert isinstance(raised.error, PeerFailedError), raised
        assert "ValueError: no more tokens" in raised.text and "rank 1" in raised.text, raised
        assert raised.when < outcomes[1].when + SOON, (raised, outcomes)


def test_launched_rank_that_raises_without_a_with_statement() -> None:
    """`launch` tells the peers of a function that ends with an exception, and raises the cause."""

    def body() -> None:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 1:
            raise ValueError("no more tokens")
        comm.barrier()

    for ranks in ("threads", "processes"):
        started = time.monotonic()
        with pytest.raises(ValueError, match="no more tokens"):
            epcomm.launch(body, 2, ranks=ranks)
        assert time.monotonic() < started + 15.0


def test_error_is_raised_again_by_every_later_call() -> None:
    def body() -> list[Raised]:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 1:
            comm.abort("gave up")
        first = raised_by(comm.barrier)
        again = [raised_by(call, comm) for call in waits_of(comm)]
        assert len({id(each.error) for each in again}) == len(again), "each raise has an exception of its own"
        entered = time.monotonic()
        comm.close()  # local: it waits for nobody
        comm.close()
        assert comm.closed and time.monotonic() < entered + SOON
        return [first, *again]

    for found in run_ranks(body, 3):
        assert all(isinstance(each.error, PeerFailedError) and "gave up" in each.text for each in found), found


def test_abort_from_another_thread_releases_the_rank() -> None:
    def body() -> Raised:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 0:
            threading.Timer(0.2, comm.abort, ["changed my mind"]).start()
            return raised_by(comm.barrier)
        return raised_by(comm.recv, torch.ones(3), 0)

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, PeerFailedError) and "changed my mind" in raised.text, raised


# ---- dying


@pytest.mark.parametrize("name, num_threads", [*((name, None) for name in WAITS), ("two-shot", 2)])
def test_killed_rank(name: str, num_threads: int | None) -> None:
    outcomes = rank_outcomes(watch, 3, WAITS[name], die, num_threads, expendable=[1])
    assert isinstance(outcomes[1], RankDied)
    for raised in (outcomes[0], outcomes[2]):
        assert isinstance(raised, Raised) and isinstance(raised.error, PeerLostError), raised
        assert raised.error.rank == 1 and "rank 1" in raised.text, raised
    assert abs(outcomes[0].when - outcomes[2].when) < SOON, outcomes


def test_killed_ranks_are_reported_soon() -> None:
    def body(pids: Any) -> Any:
        comm = epcomm.init(timeout=20.0)
        all_pids = comm.allgather(torch.tensor(os.getpid()))
        if comm.rank == 0:
            time.sleep(0.2)
            for victim in (1, 3):
                os.kill(int(all_pids[victim]), signal.SIGKILL)
            return time.monotonic()
        return raised_by(comm.barrier)

    outcomes = rank_outcomes(body, 5, None, expendable=[1, 3])
    for raised in (outcomes[2], outcomes[4]):
        assert isinstance(raised, Raised) and isinstance(raised.error, PeerLostError), raised
        assert raised.error.rank in (1, 3) and raised.when < outcomes[0] + SOON, outcomes


def test_rank_that_exits_without_closing() -> None:
    outcomes = rank_outcomes(watch, 2, WAITS["barrier"], exit_unclosed, expendable=[1])
    assert isinstance(outcomes[0], Raised) and isinstance(outcomes[0].error, PeerLostError), outcomes


# ---- stopping: nothing is known of a stopped peer before the deadline


@pytest.mark.parametrize("name", ["barrier", "two-shot", "exchange", "bound", "asynchronous", "recv", "send", "close"])
def test_stopped_rank(name: str) -> None:
    outcomes = rank_outcomes(watch, 3, WAITS[name], stop, None, 1.5, expendable=[1])
    assert isinstance(outcomes[1], RankDied)
    kinds = [type(raised.error) for raised in (outcomes[0], outcomes[2])]
    assert EpcommTimeoutError in kinds and set(kinds) <= {EpcommTimeoutError, PeerFailedError}, outcomes
    for raised in (outcomes[0], outcomes[2]):
        assert "rank 1" in raised.text and "1.5 s" in raised.text, raised


def test_stopped_rank_that_goes_on_learns_that_it_was_late() -> None:
    def body() -> Any:
        comm = epcomm.init(timeout=20.0)
        pids = comm.allgather(torch.tensor(os.getpid())).tolist()
        if comm.rank == 1:
            stop(comm)
            raised = raised_by(comm.barrier)
        else:
            entered = time.monotonic()
            raised = raised_by(comm.barrier, timeout=1.0)
            waited = raised.when - entered
            assert 0.9 < waited < 1.0 + SOON, waited
            os.kill(pids[1], signal.SIGCONT)
        comm.reset()
        works(comm)
        return raised

    outcomes = run_ranks(body, 2)
    assert isinstance(outcomes[0].error, EpcommTimeoutError) and isinstance(outcomes[0].error, TimeoutError)
    assert "barrier()" in outcomes[0].text and "rank 1, to enter the barrier" in outcomes[0].text
    assert isinstance(outcomes[1].error, PeerFailedError) and "waited 1 s for rank 1" in outcomes[1].text


def test_deadline_of_a_call_is_its_own() -> None:
    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            for number in range(3):
                if comm.rank == 0:
                    call = [comm.barrier, lambda timeout: comm.allreduce(X, timeout=timeout),
                            lambda timeout: comm.recv(torch.ones(1), 1, timeout=timeout)][number]  # fmt: skip
                    assert isinstance(raised_by(call, timeout=0.2).error, EpcommTimeoutError)
                comm.reset()
                if comm.rank == 1:
                    time.sleep(0.5)  # longer than the deadline of the call that failed
                works(comm)
            if comm.rank == 1:
                time.sleep(0.5)
            assert comm.allreduce(X, timeout=5.0).tolist() == [2.0] * 4
            if comm.rank == 1:
                time.sleep(0.5)
            works(comm)

    run_ranks(body, 2)


# ---- interrupts and threads


@pytest.mark.parametrize("name", ["barrier", "two-shot", "bound", "asynchronous", "behind asynchronous", "recv"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_interrupt_leaves_a_wait(name: str, num_threads: int) -> None:
    def body() -> Any:
        comm = epcomm.init(timeout=20.0, num_threads=num_threads)
        pids = comm.allgather(torch.tensor(os.getpid())).tolist()
        if comm.rank == 0:

            def run() -> None:
                with comm:
                    WAITS[name](comm)

            return raised_by(run)
        time.sleep(0.3)
        os.kill(pids[0], signal.SIGINT)
        sent = time.monotonic()
        return sent, raised_by(lambda: [(time.sleep(0.01), comm.check()) for _ in range(500)])

    interrupted, (sent, peer) = run_ranks(body, 2)
    assert isinstance(interrupted.error, KeyboardInterrupt) and interrupted.when < sent + 1.0, (interrupted, sent)
    assert isinstance(peer.error, PeerFailedError) and peer.when < sent + SOON, (peer, sent)
    assert "interrupted" in peer.text or "KeyboardInterrupt" in peer.text, peer


def test_two_threads_at_once() -> None:
    def body() -> Any:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 1:
            time.sleep(1.0)
            return raised_by(comm.barrier)
        found: list[Raised] = []
        waiting = threading.Thread(target=lambda: found.append(raised_by(comm.barrier)))
        waiting.start()
        time.sleep(0.3)
        own = raised_by(comm.allreduce, X)
        waiting.join()
        return own, found[0]

    (second, first), peer = run_ranks(body, 2)
    assert isinstance(second.error, ConfigError) and "another thread" in second.text, second
    assert isinstance(peer.error, PeerFailedError) and "another thread" in peer.text, peer
    assert first.when < second.when + 1.0, (first, second)


def test_threads_in_turns() -> None:
    """Any thread may call, as long as only one does at a time."""

    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            for _ in range(3):
                errors: list[BaseException] = []

                def use(errors: list[BaseException] = errors) -> None:
                    try:
                        works(comm)
                    except BaseException as error:
                        errors.append(error)

                thread = threading.Thread(target=use)
                thread.start()
                thread.join()
                assert not errors, errors
                works(comm)

    run_ranks(body, 2)


def test_calls_after_closing() -> None:
    def body() -> None:
        comm = epcomm.init(timeout=20.0)
        bound = comm.bind_allreduce(X.clone())
        works(comm)
        comm.close()
        for call in [*waits_of(comm), lambda c: bound(), lambda c: c.reset()]:
            assert isinstance(raised_by(call, comm).error, ClosedError)
        comm.abort()
        comm.close()

    run_ranks(body, 3)
