"""A barrier with little exit skew, so that all ranks start a timed call at the same moment.

The barriers of gloo and MPI release ranks many microseconds apart, which would be charged to whatever is timed next.
This one polls one counter per rank in a shared file. It orders nothing but time, and passes in two stages:

* gather: wait, asleep, until every rank has left the library that was timed before. A rank that spins here could take
  the core that another rank's library threads need to finish;
* align: spin for the few microseconds until all have seen that.

Ranks are not bound to cores, but they leave the barrier spread evenly over them: a library that sleeps in the kernel,
as gloo does, often leaves most ranks on one core, and the next contestant would pay for it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

_STRIDE = 128  # bytes between two counters: no shared cache line, no adjacent-line prefetch
_WORDS = _STRIDE // 8
_GATHER_POLLS = 200
_GATHER_SLEEP = 20e-6
_ALIGN_POLLS = 2000


class Gate:
    """Barrier of `size` ranks over the file `path`, which every rank opens."""

    def __init__(self, path: Path, rank: int, size: int, timeout: float = 300.0):
        length = 2 * size * _STRIDE
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.ftruncate(descriptor, length)
            self._map = mmap.mmap(descriptor, length)
        finally:
            os.close(descriptor)
        self._words = memoryview(self._map).cast("q")
        self._rank, self._size = rank, size
        self._cores = os.sched_getaffinity(0)
        self._home = {sorted(self._cores)[rank % len(self._cores)]}
        self._roomy = size <= len(self._cores)
        self._epoch = 0
        self._timeout = timeout

    def wait(self) -> None:
        """Return once every rank has entered; raise `TimeoutError` if one does not come."""
        self._epoch += 1
        self._pass(0, _GATHER_POLLS, lambda: time.sleep(_GATHER_SLEEP))
        os.sched_setaffinity(0, self._home)  # moves this thread
        os.sched_setaffinity(0, self._cores)  # and leaves it free to move
        self._pass(1, _ALIGN_POLLS if self._roomy else 0, os.sched_yield)

    def _pass(self, stage: int, polls: int, relax: Callable[[], object]) -> None:
        words, epoch, first = self._words, self._epoch, stage * self._size
        words[(first + self._rank) * _WORDS] = epoch
        deadline = None
        for peer in range(self._size):
            place, polled = (first + peer) * _WORDS, 0
            while words[place] < epoch:
                polled += 1
                if polled > polls:
                    relax()
                    deadline = deadline or time.monotonic() + self._timeout
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"gate: rank {peer} did not reach barrier {epoch} in {self._timeout:.0f} s")

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()
