"""`epcomm.launch`: starts ranks on this machine from a script or notebook, and brings back results or the first error.

Process ranks are fresh interpreters that get the function by cloudpickle over a pipe; nothing re-imports the caller's
main module. They end with their parent, however it ends.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from epcomm.errors import ConfigError, EpcommError, PeerFailedError, PeerLostError
from epcomm.world.rendezvous import LaunchedRank, launched_rank

_GRACE = 5.0  # seconds that the other ranks get to end by themselves after the first failure
_PR_SET_PDEATHSIG = 1


def launch(fn: Callable[..., Any], num_ranks: int, *args: Any, ranks: str = "processes") -> list[Any]:
    """Runs ``fn(*args)`` on `num_ranks` new ranks of this machine and returns their results by rank.

    In `fn`, `epcomm.init()` joins the others. Args:
        fn: any picklable function, also one defined in a script's main module or a notebook.
        num_ranks: at least 1. Each rank gets its share of this machine's cores as torch threads.
        ranks: "processes", or "threads" of this process (which share its GIL; kernels run without it).

    Raises the exception of the first rank that failed; the others are failed or stopped first. A rank whose process
    was killed counts as failed with `PeerLostError`.
    """
    if not callable(fn):
        raise ConfigError(f"launch: argument `fn`: wanted a function, got {fn!r}")
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ConfigError(f"launch: argument `num_ranks`: wanted an integer of at least 1, got {num_ranks!r}")
    if ranks == "threads":
        return _launch_threads(fn, num_ranks, args)
    if ranks == "processes":
        return _launch_processes(fn, num_ranks, args)
    raise ConfigError(f"launch: argument `ranks`: wanted 'processes' or 'threads', got {ranks!r}")


def fail_communicators(launched: LaunchedRank, error: BaseException) -> None:
    """Tells the peers of a rank that is about to end with an exception."""
    for reference in launched.runtimes:
        runtime = reference()
        if runtime is not None and runtime.failure is None and not runtime.closed:
            runtime.fail(PeerFailedError(f"{type(error).__name__}: {error} (rank {runtime.rank})"))


def first_failure(errors: list[tuple[float, int, BaseException]]) -> BaseException:
    """The cause rather than its echoes: the earliest error that isn't a report of a peer's failure."""
    echoes = (PeerFailedError, PeerLostError)
    return min(errors, key=lambda item: (isinstance(item[2], echoes), item[0]))[2]


# ---- thread ranks


def _launch_threads(fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
    name = f"epcomm-{uuid.uuid4().hex}"
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[float, int, BaseException]] = []
    abandoned = threading.Event()
    launched = [LaunchedRank(rank, num_ranks, name, True, abandoned) for rank in range(num_ranks)]

    def run(rank: int) -> None:
        launched_rank.set(launched[rank])
        try:
            results[rank] = fn(*args)
        except BaseException as error:  # re-raised in the caller's thread
            errors.append((time.monotonic(), rank, error))
            abandoned.set()
            fail_communicators(launched[rank], error)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), name=f"epcomm-rank-{rank}")
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # Ctrl-C: no rank is left waiting for its deadline
        abandoned.set()
        for rank in launched:
            fail_communicators(rank, error)
        raise
    if errors:
        raise first_failure(errors)
    return results


# ---- process ranks


class RankProcess:
    """A started rank: its process, and the pipe its answers come through."""

    def __init__(self, rank: int, size: int, name: str, num_threads: int, prefix: Sequence[str] = ()):
        self.rank = rank
        task_read, self._task_write = os.pipe()
        self.answers, answer_write = os.pipe()
        environment = dict(os.environ, OMP_NUM_THREADS=str(num_threads))
        command = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from epcomm.launcher import _serve; _serve({task_read}, {answer_write}, {os.getpid()})"
        )
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", command],
            pass_fds=(task_read, answer_write),
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        os.close(task_read)
        os.close(answer_write)
        self.send((rank, size, name, num_threads))

    def send(self, message: Any) -> None:
        """Sends a task (or the greeting) to the rank."""
        payload = cloudpickle.dumps(message)
        try:
            with os.fdopen(os.dup(self._task_write), "wb") as pipe:
                pipe.write(struct.pack("<q", len(payload)) + payload)
        except BrokenPipeError:
            return  # it died: its answer pipe says so

    def receive(self) -> tuple[bool, Any] | None:
        """The next answer, (ok, result or exception); None if the process ended without one."""
        header = _read_exactly(self.answers, 8)
        payload = _read_exactly(self.answers, struct.unpack("<q", header)[0]) if header else None
        return pickle.loads(payload) if payload else None

    def stop(self, kill: bool = False) -> None:
        """Ends the process, by itself or at once, and waits for that."""
        self.dismiss()
        if kill:
            self.process.kill()
        self.process.wait()
        os.close(self.answers)

    def dismiss(self) -> None:
        """Lets the process end when it has done its tasks; doesn't wait."""
        if self._task_write >= 0:
            os.close(self._task_write)
            self._task_write = -1


def _read_exactly(descriptor: int, num_bytes: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < num_bytes:
        chunk = os.read(descriptor, min(num_bytes - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def torch_threads(num_ranks: int) -> int:
    """A rank's share of this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _launch_processes(fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...]) -> list[Any]:
    name = f"epcomm-{uuid.uuid4().hex}"
    processes: list[RankProcess] = []
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[float, int, BaseException]] = []
    waiting: dict[int, RankProcess] = {}
    try:
        for rank in range(num_ranks):
            process = RankProcess(rank, num_ranks, name, torch_threads(num_ranks))
            processes.append(process)
            waiting[process.answers] = process
            process.send((fn, args))
        while waiting:
            limit = None if not errors else max(0.0, errors[0][0] + _GRACE - time.monotonic())
            ready, _, _ = select.select(list(waiting), [], [], limit)
            if not ready:
                break  # the failure didn't reach them: they hang outside of epcomm
            for answers in ready:
                process = waiting.pop(answers)
                answer = process.receive()
                if answer is None:
                    code = process.process.wait()
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
                    answer = False, PeerLostError(f"launch: rank {process.rank} {how}", process.rank)
                ok, value = answer
                if ok:
                    results[process.rank] = value
                else:
                    errors.append((time.monotonic(), process.rank, value))
    finally:
        for process in processes:
            process.dismiss()  # all of them first: they end side by side
        for process in processes:
            process.stop(kill=process.answers in waiting)
    if errors:
        raise first_failure(errors)
    return results


def _serve(task_read: int, answer_write: int, parent: int) -> None:
    """A rank's life: greeting, then tasks until the pipe closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before the line above
    greeting = _read_exactly(task_read, 8)
    if greeting is None:
        return
    rank, size, name, num_threads = pickle.loads(
        _read_exactly(task_read, struct.unpack("<q", greeting)[0]) or b""
    )
    import torch

    torch.set_num_threads(num_threads)
    task = 0
    while (header := _read_exactly(task_read, 8)) is not None:
        launched = LaunchedRank(rank, size, f"{name}-{task}")
        launched_rank.set(launched)
        payload = _read_exactly(task_read, struct.unpack("<q", header)[0]) or b""
        try:
            fn, args = pickle.loads(payload)
            answer: tuple[bool, Any] = True, fn(*args)
        except BaseException as error:  # sent to the parent, which raises it
            answer = False, with_traceback(error, rank)
            fail_communicators(launched, error)
        del payload
        encoded = _encode(answer, rank)
        with os.fdopen(os.dup(answer_write), "wb") as pipe:
            pipe.write(struct.pack("<q", len(encoded)) + encoded)
        task += 1
    # what is registered for the exit still runs; taking LLVM and torch apart, half a second of it, does not
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def with_traceback(error: BaseException, rank: int) -> BaseException:
    """Pickling loses the traceback, so its text becomes a note (an attribute before Python 3.11)."""
    text = f"\nThis was raised on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    error.__notes__ = [*getattr(error, "__notes__", []), text]  # type: ignore[attr-defined]
    return error


def _encode(answer: tuple[bool, Any], rank: int) -> bytes:
    try:
        encoded = cloudpickle.dumps(answer)
        pickle.loads(encoded)
        return encoded
    except Exception as error:
        kind = "result" if answer[0] else "exception"
        message = f"launch: rank {rank}: its {kind} can't be pickled ({error}): {answer[1]!r}"
        return cloudpickle.dumps((False, EpcommError(message)))
