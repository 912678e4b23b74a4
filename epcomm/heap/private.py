"""Private memory of a rank: blocks of words that host code and this rank's kernels share, wherever the kernels run."""

from __future__ import annotations

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

    def refresh(self) -> None:
        """The host sees what the kernels that were launched so far have written."""


class HostMemory:
    """Kernels run on the host: there is one memory."""

    __slots__ = ("address", "array", "handle")

    def __init__(self, num_bytes: int):
        self.array = np.zeros(num_bytes, dtype=np.uint8)
        self.handle = self.address = self.array.ctypes.data

    def publish(self, start: int = 0, stop: int | None = None) -> None:
        pass

    def refresh(self) -> None:
        pass


class MirroredMemory:
    """Kernels run on a device, on a copy. Each side sees the other's writes when it is told to.

    What the host publishes is taken before `publish` returns, in stream order: the host may write again at once.
    """

    __slots__ = ("_copy", "_published", "address", "array", "handle")

    def __init__(self, num_bytes: int, device: torch.device):
        self.array = np.zeros(num_bytes, dtype=np.uint8)
        self._published = self.array.copy()
        self._copy = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.address, self.handle = self._copy.data_ptr(), self

    def publish(self, start: int = 0, stop: int | None = None) -> None:
        part, published = self.array[start:stop], self._published[start:stop]
        if not np.array_equal(part, published):  # steady loops publish the same words again and again
            published[:] = part
            # pageable memory, which CUDA stages before it returns; from pinned memory it would read later
            self._copy[start:stop].copy_(torch.from_numpy(published), non_blocking=True)

    def refresh(self) -> None:
        self.array[:] = self._copy.cpu().numpy()
        self._published[:] = self.array
