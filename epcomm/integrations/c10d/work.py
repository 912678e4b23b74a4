"""An operation of a group in progress: with its results, and a future that C++ can read."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_NO_GRAPH_TASK = -1  # outside of a backward pass


class Work(dist._Work):
    """`work` is a communicator's, or None: it is complete; `tensors` are the results; `source` sends them, if known."""

    def __init__(self, work: Any, tensors: list[torch.Tensor], source: int | None = None):
        super().__init__()
        self.work, self._tensors, self._source = work, tensors, source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: B008
        """Returns True once it is complete, or raises what it raised; `TimeoutError` after a `timeout` that isn't 0."""
        return self.work is None or self.work.wait(seconds_of(timeout))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None if self.work is None else self.work.exception()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """The rank that a message came from."""
        return self.work.result()[1] if self._source is None else self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the results. In a backward pass the end of the pass waits for it as well, and raises.

        DistributedDataParallel reads futures in C++. There one that Python has failed looks complete, with the
        exception as its value, which crashes; one whose callback raised is an error, but of no particular kind.
        What is raised at the end of the pass, before it reads them, is what has happened.
        """
        if self.work is None:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(self._tensors)
            return future
        if torch._C._current_graph_task_id() != _NO_GRAPH_TASK:
            torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        return self.work.get_future().then(self._results_of)

    def _results_of(self, future: torch.futures.Future) -> list[torch.Tensor]:
        future.value()  # raises if the operation did
        return self._tensors


def seconds_of(timeout: timedelta) -> float | None:
    """None for the values with which torch says that nothing was asked for, which are not positive."""
    return timeout.total_seconds() if timeout > timedelta(0) else None
