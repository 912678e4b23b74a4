"""Asynchronous operations: a first-in first-out queue with its worker thread, and the handle of a call."""

from __future__ import annotations

import builtins
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from epcomm.errors import TimeoutError


class Work:
    """An operation in progress, with the methods of `torch.distributed.Work`."""

    def __init__(self, function: Callable[[], Any], text: str):
        self._text, self._function = text, function
        # whether tensors are tracked is a thread's affair: the worker does as the caller would have
        self._modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._result: Any = None
        self._done = threading.Event()
        self._exception: BaseException | None = None
        self._future: torch.futures.Future | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the operation is complete; raises its exception, or `TimeoutError` after `timeout` seconds."""
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self._text}: not complete after {timeout:g} s; it goes on")
        if self._exception is not None:
            raise self._exception
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def exception(self) -> BaseException | None:
        """What the operation raised, None while it runs or if it succeeded."""
        return self._exception

    def result(self) -> Any:
        """The operation's result, as the synchronous call would have returned it; waits for it."""
        self.wait()
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future of the result's tensors (a list, as torch has it)."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._complete_future()
            return self._future

    def _run(self) -> None:
        is_inference, has_grad = self._modes
        try:
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad and not is_inference):
                self._result = self._function()
        except BaseException as error:  # handed to whoever waits
            self._exception = error
        self._function = _nothing  # lets go of the tensors it holds
        with self._lock:
            self._done.set()
            has_future = self._future is not None
        if has_future:  # outside of the lock: its callbacks may ask for this future
            self._complete_future()

    def _complete_future(self) -> None:
        assert self._future is not None
        if self._exception is None:
            self._future.set_result(list(self._result) if isinstance(self._result, tuple) else [self._result])
        elif isinstance(self._exception, builtins.Exception):
            self._future.set_exception(self._exception)
        else:
            self._future.set_exception(RuntimeError(repr(self._exception)))


def _nothing() -> None:
    return None


class Fifo:
    """The queue of a communicator (or of one direction of a point-to-point channel). The thread starts on first use.

    `is_stream_ordered`: operations are launched on the current stream of a GPU, at once and without a thread.
    """

    def __init__(self, name: str, is_stream_ordered: bool = False):
        self._name, self._is_stream_ordered = name, is_stream_ordered
        self._start()
        _live.add(self)

    def _start(self) -> None:
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.pending = 0  # submitted operations that have not run: a synchronous call must queue behind them

    def call(self, function: Callable[[], Any], async_op: bool, text: str) -> Any:
        """Runs `function`, of which `text` tells, in its turn; returns what it returns, or a `Work` if asynchronous."""
        if not async_op and (not self.pending or threading.current_thread() is self._thread):
            return function()  # at once: nothing is before it, or it is called by a future's callback, on the worker
        work = Work(function, text)
        if self._is_stream_ordered:  # calls return before they are done, and the stream keeps their order
            work._run()
            return work
        with self._lock:
            self.pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(work)
        if async_op:
            return work
        return work.result()

    def drain(self) -> None:
        """Returns once everything submitted so far has run."""
        if self.pending and threading.current_thread() is not self._thread:
            self.call(_nothing, True, "drain").wait()

    def stop(self) -> None:
        """Ends the worker after what was submitted."""
        if self._thread is not None:
            self._queue.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None:
            work._run()
            del work
            with self._lock:
                self.pending -= 1


_live: weakref.WeakSet[Fifo] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The workers did not survive: a call starts a new one, which finds the communicator closed."""
    for fifo in list(_live):
        fifo._start()


os.register_at_fork(after_in_child=_after_fork_in_child)
