"""Captures and replays of the interpreted target: what CUDA graphs do with launches, in small.

A captured launch is recorded, not run; a replay runs all of them again, with the very same numbers. So whatever would
have to change from replay to replay on the host is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


class ReplayStream:
    """See `heap.private.Stream`."""

    can_capture = True

    def __init__(self) -> None:
        self._recording: Recording | None = None

    def is_capturing(self) -> bool:
        return self._recording is not None

    def enqueue(self, work: Callable[[], object]) -> None:
        if self._recording is None:
            work()
        else:
            self._recording.works.append(work)

    def kept(self, part: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(part.copy())

    @contextmanager
    def capture(self) -> Iterator[Recording]:
        """What is enqueued inside is recorded."""
        self._recording = Recording()
        try:
            yield self._recording
        finally:
            self._recording = None


class Recording:
    """Captured work, in order. As in a CUDA graph, what torch does on the CPU meanwhile is not part of it."""

    def __init__(self) -> None:
        self.works: list[Callable[[], object]] = []

    def replay(self) -> None:
        for work in self.works:
            work()
