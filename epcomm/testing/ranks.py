"""Runs a test's function on several ranks, under a watchdog: a hang is a failure that shows every rank's stack.

Ranks are processes from a pool, which later calls use again, or threads of one such process; so a rank that hangs, is
stopped or is killed does no harm to the caller. Whatever communicators a function leaves open are closed after it.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import pickle
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from epcomm.errors import ConfigError
from epcomm.launcher import RankProcess, fail_communicators, first_failure, with_traceback
from epcomm.testing.adversary import random_stops
from epcomm.world.rendezvous import LaunchedRank, launched_rank

_GRACE = 15.0  # seconds that the other ranks get to end by themselves after the first failure
_START_LIMIT = 120.0  # seconds for new processes to load torch
_STACK_SIGNAL = signal.SIGUSR1


class RanksHung(AssertionError):
    """Some ranks did not return in time; the message holds every rank's stack."""


class RankDied(RuntimeError):
    """A rank's process ended, or was ended, before the function returned."""


def run_ranks(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    ranks: str = "processes",
    timeout: float = 60.0,
    disturb: int | None = None,
) -> list[Any]:
    """Runs ``fn(*args)`` on `num_ranks` ranks, where `epcomm.init()` joins the others; returns the results by rank.

    Raises what the first rank to fail raised, or `RanksHung`. With `disturb` (a seed) processes are stopped for a few
    milliseconds at random, wherever they are.
    """
    outcomes = _pool.outcomes(fn, num_ranks, args, ranks, timeout, (), disturb)
    failures = [(failure.when, failure.rank, failure.error) for failure in outcomes if isinstance(failure, _Failure)]
    if failures:
        raise first_failure(failures)
    return outcomes


def rank_outcomes(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    ranks: str = "processes",
    timeout: float = 60.0,
    expendable: Collection[int] = (),
) -> list[Any]:
    """Like `run_ranks`, but returns, for each rank, its result or the exception that it raised.

    `expendable` ranks may kill or stop themselves: they are killed once all others have returned. Their outcome is
    `RankDied`, unless they returned first.
    """
    return outcomes_or_errors(_pool, fn, num_ranks, args, ranks=ranks, timeout=timeout, expendable=expendable)


def outcomes_or_errors(
    pool: Pool,
    fn: Callable[..., Any],
    num_ranks: int,
    args: tuple[Any, ...],
    *,
    ranks: str = "processes",
    timeout: float,
    expendable: Collection[int],
) -> list[Any]:
    """`rank_outcomes` on the processes of a pool."""
    outcomes = pool.outcomes(fn, num_ranks, args, ranks, timeout, expendable, None)
    return [outcome.error if isinstance(outcome, _Failure) else outcome for outcome in outcomes]


def close_pool() -> None:
    """Ends all pooled processes; a later call starts new ones."""
    _pool.close()


@dataclass
class _Failure:
    """An exception, and when (on the clock that all processes share) and where it was raised."""

    when: float
    rank: int
    error: BaseException


# ---- the caller's side


class _PooledProcess(RankProcess):
    """A process that waits for tasks, and writes its stacks to a memory file when it gets a signal."""

    def __init__(self, prefix: Sequence[str]):
        super().__init__(0, 1, "epcomm-pooled", num_threads=1, prefix=prefix)
        self.is_loaded = False
        self._stacks = os.memfd_create("epcomm-stacks", os.MFD_CLOEXEC)
        self.send((_prepare, (f"/proc/{os.getpid()}/fd/{self._stacks}",)))

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, kill: bool = False) -> None:
        super().stop(kill)
        os.close(self._stacks)

    def death(self) -> str:
        """How it ended; waits for it to end."""
        code = self.process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def stacks(self) -> str:
        """The Python stacks of all its threads, now; native code is seen as the call that entered it."""
        if not self.alive:
            return f"  it {self.death()}"
        before = os.fstat(self._stacks).st_size
        self.process.send_signal(_STACK_SIGNAL)
        self.process.send_signal(signal.SIGCONT)  # it may have been stopped
        size, deadline = before, time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            previous, size = size, os.fstat(self._stacks).st_size
            if before < size == previous:
                break
        return os.pread(self._stacks, size - before, before).decode(errors="replace") or "  it gave no stack"


class Pool:
    """Processes that were started once and serve every call. Made for one calling thread.

    With `prefixes`, of commands, there are so many processes, each started behind its prefix.
    """

    def __init__(self, prefixes: Sequence[Sequence[str]] = ()):
        self._prefixes = prefixes
        self._processes: list[_PooledProcess] = []
        self._num_spares = 0  # 1 once a process was lost: tests that lose one come in series, and loading takes seconds

    def outcomes(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        args: tuple[Any, ...],
        ranks: str,
        timeout: float,
        expendable: Collection[int],
        disturb: int | None,
    ) -> list[Any]:
        """Each rank's result or `_Failure`."""
        if ranks not in ("processes", "threads"):
            raise ConfigError(f"run_ranks: argument `ranks`: wanted 'processes' or 'threads', got {ranks!r}")
        task, name = cloudpickle.dumps((fn, args)), f"epcomm-{uuid.uuid4().hex}"
        members = self._take(num_ranks if ranks == "processes" else 1)
        processes = [member.process for member in members]
        try:
            for index, member in enumerate(members):
                own = [index] if ranks == "processes" else list(range(num_ranks))
                launched = [LaunchedRank(rank, num_ranks, name, is_thread=ranks == "threads") for rank in own]
                member.send((_run_task, (sys.path, task, launched)))
            with contextlib.nullcontext() if disturb is None else random_stops(processes, disturb):
                return self._collect(members, timeout, expendable)
        except BaseException:
            self._discard(members)
            raise

    def _take(self, count: int) -> list[_PooledProcess]:
        self._discard([process for process in self._processes if not process.alive])
        while len(self._processes) < count + self._num_spares:
            index = len(self._processes)
            self._processes.append(_PooledProcess(self._prefixes[index] if self._prefixes else ()))
        loading = [process for process in self._processes[:count] if not process.is_loaded]
        for failure in self._collect(loading, _START_LIMIT, ()):  # so that a test's deadlines don't count it
            raise RankDied("a process for ranks could not be started; its own output says why") from failure.error
        for process in loading:
            process.is_loaded = True
        return self._processes[:count]

    def _discard(self, processes: list[_PooledProcess]) -> None:
        for process in processes:
            self._processes.remove(process)
            process.stop(kill=True)
            self._num_spares = 1

    def close(self) -> None:
        self._discard(list(self._processes))
        self._num_spares = 0

    def _collect(self, members: list[_PooledProcess], timeout: float, expendable: Collection[int]) -> list[Any]:
        outcomes: dict[int, list[Any]] = {}
        deadline = time.monotonic() + timeout
        while set(range(len(members))) - set(outcomes) - set(expendable):
            waiting = {members[index].answers: index for index in range(len(members)) if index not in outcomes}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _hang(members, outcomes, timeout)
            for index in (waiting[answers] for answers in ready):
                outcomes[index] = self._outcomes_of(index, members[index])
                if not expendable and any(isinstance(outcome, _Failure) for outcome in outcomes[index]):
                    deadline = min(deadline, time.monotonic() + _GRACE)
        for index in set(expendable) - set(outcomes):
            members[index].process.kill()
            outcomes[index] = self._outcomes_of(index, members[index])
        return [outcome for index in range(len(members)) for outcome in outcomes[index]]

    def _outcomes_of(self, index: int, member: _PooledProcess) -> list[Any]:
        answer = member.receive()
        if answer is None:
            return [_Failure(time.monotonic(), index, RankDied(f"rank {index} {member.death()}"))]
        ok, value = answer
        return value if ok else [_Failure(time.monotonic(), index, value)]


def _hang(members: list[_PooledProcess], outcomes: dict[int, list[Any]], timeout: float) -> RanksHung:
    """The error for a hang, caused by the first failure if there was one."""
    reports = []
    for index, member in enumerate(members):
        who = f"rank {index}" if len(members) > 1 else "the ranks' process"
        if index not in outcomes:
            reports.append(f"---- {who} is at\n{member.stacks()}")
        elif failed := [outcome for outcome in outcomes[index] if isinstance(outcome, _Failure)]:
            reports.append(f"---- {who} raised {type(failed[0].error).__name__}: {failed[0].error}")
        else:
            reports.append(f"---- {who} has returned")
    hang = RanksHung(f"not all ranks returned within {timeout:g} s\n" + "\n".join(reports))
    failures = [failure for each in outcomes.values() for failure in each if isinstance(failure, _Failure)]
    hang.__cause__ = min(failures, key=lambda failure: failure.when).error if failures else None
    return hang


_pool = Pool()
atexit.register(close_pool)


# ---- the rank's side


_stack_file: Any = None


def _prepare(stack_path: str) -> list[Any]:
    """Writes all stacks to a file at every signal, and loads what every test needs."""
    global _stack_file
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which a task before one that interprets may do
    import epcomm.initialize  # noqa: F401

    _stack_file = open(stack_path, "a")
    faulthandler.register(_STACK_SIGNAL, _stack_file, all_threads=True)
    return []


def _run_task(path: list[str], task: bytes, launched: list[LaunchedRank]) -> list[Any]:
    """Runs the task as one rank in this thread, or as several in threads of their own; returns their outcomes."""
    sys.path[:] = path
    if not launched[0].is_thread:
        return [_run_rank(task, launched[0])]
    outcomes: list[Any] = [None] * len(launched)

    def run(index: int) -> None:
        outcomes[index] = _run_rank(task, launched[index])

    threads = [threading.Thread(target=run, args=(index,), name=f"rank-{index}") for index in range(len(launched))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _run_rank(task: bytes, launched: LaunchedRank) -> Any:
    launched_rank.set(launched)
    try:
        fn, args = pickle.loads(task)
        return fn(*args)
    except BaseException as error:  # the caller raises it
        failure = _Failure(time.monotonic(), launched.rank, with_traceback(error, launched.rank))
        fail_communicators(launched, error)
        return failure
    finally:
        _leave_communicators(launched)


def _leave_communicators(launched: LaunchedRank) -> None:
    """Closes, without waiting for anyone, what the function has left open."""
    from epcomm import initialize

    default = initialize._thread_default.get() if launched.is_thread else initialize._process_default
    if default is not None:
        default._close(None)
    if not launched.is_thread:
        initialize._process_default = None
    for reference in launched.runtimes:
        runtime = reference()
        if runtime is not None:
            runtime.close(None)
