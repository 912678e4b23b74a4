"""Private memory of a rank: blocks of words that host code and this rank's kernels share, wherever the kernels run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch


class PrivateMemory(Protocol):
    """``array`` (uint8) is what the host sees, ``address`` where kernels see it, ``handle`` what a launch takes."""

    array: np.ndarray
    address: int
    handle: Any

    def publish(self, start: int = 0, stop: int | None = None) -> None:
        """Kernels launched from now on see the bytes [start, stop) that the host wrote."""

    def refresh(self, start: int = 0, stop: int | None = None) -> None:
        """The host sees what the kernels that were launched so far have written to the bytes [start, stop)."""

    def device_view(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """int32 of `shape`, from byte `start` on, as kernels leave them."""


class Stream(Protocol):
    """Where a device's work is enqueued; perhaps to be captured, and replayed many times."""

    can_capture: bool

    def is_capturing(self) -> bool: ...

    def enqueue(self, work: Callable[[], object]) -> None:
        """Runs `work`, which enqueues something on the device, or records it."""

    def kept(self, part: np.ndarray) -> torch.Tensor:
        """A copy of bytes for captured work to read whenever it is replayed."""


class HostStream:
    """Kernels run when they are called."""

    can_capture = False

    def is_capturing(self) -> bool:
        return False

    def enqueue(self, work: Callable[[], object]) -> None:
        work()

    def kept(self, part: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(part.copy())


class HostMemory:
    """Kernels run on the host: there is one memory."""

    __slots__ = ("address", "array", "handle")

    def __init__(self, num_bytes: int):
        self.array = np.zeros(num_bytes, dtype=np.uint8)
        self.handle = self.address = self.array.ctypes.data

    def publish(self, start: int = 0, stop: int | None = None) -> None:
        pass

    def refresh(self, start: int = 0, stop: int | None = None) -> None:
        pass

    def device_view(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.array[start:].view(np.int32)[: math.prod(shape)].reshape(shape))


class MirroredMemory:
    """Kernels run on a device, on a copy. Each side sees the other's writes when it is told to.

    What the host publishes is taken before `publish` returns, in stream order: the host may write again at once. What
    it publishes during a capture is published again by every replay, before the captured kernels that follow.
    """

    __slots__ = ("_copy", "_is_captured", "_published", "_stream", "address", "array", "handle")

    def __init__(self, num_bytes: int, device: torch.device, stream: Stream):
        self.array = np.zeros(num_bytes, dtype=np.uint8)
        self._published = self.array.copy()
        self._copy = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._stream, self._is_captured = stream, False  # captured: replays publish, too, unseen by the host
        self.address, self.handle = self._copy.data_ptr(), self

    def publish(self, start: int = 0, stop: int | None = None) -> None:
        part, published = self.array[start:stop], self._published[start:stop]
        if self._stream.is_capturing():
            self._is_captured = True
            to, kept = self._copy[start:stop], self._stream.kept(part)
            self._stream.enqueue(lambda: to.copy_(kept, non_blocking=True))
        elif self._is_captured or not np.array_equal(part, published):  # steady loops publish the same again and again
            published[:] = part
            # pageable memory, which CUDA stages before it returns; from pinned memory it would read later
            self._copy[start:stop].copy_(torch.from_numpy(published), non_blocking=True)

    def publish_once(self) -> None:
        """`publish` for what the host hardly ever changes: a replay needn't repeat it."""
        if not np.array_equal(self.array, self._published):
            self.publish()

    def refresh(self, start: int = 0, stop: int | None = None) -> None:
        self.array[start:stop] = self._copy[start:stop].cpu().numpy()
        self._published[start:stop] = self.array[start:stop]

    def device_view(self, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        """int32 of `shape`, from byte `start` on, as kernels leave them."""
        return self._copy[start:].view(torch.int32)[: math.prod(shape)].view(shape)
