"""CPU segments: anonymous memory files that peers map from a passed descriptor. They have no name, so none can leak."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from epcomm.heap.layout import PAGE, align_up

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_POPULATE_WRITE = 23  # Linux 5.14; an older kernel faults pages in on first use instead


def create_memory_file(size: int) -> int:
    """A descriptor of `size` bytes of zeroed shared memory; pages are taken on first use."""
    descriptor = os.memfd_create("epcomm", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return descriptor


#: sends a payload and file descriptors to all ranks; everyone's by rank, descriptors opened here
Allgather = Callable[[bytes, Sequence[int]], list[tuple[bytes, list[int]]]]


class LentArray(np.ndarray):
    """Bytes of a segment, lent: torch keeps this object while a storage on it lives, and it keeps the lease."""

    lease: Any

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor on these bytes at an offset; it keeps them alive."""
        count = 1
        for extent in shape:
            count *= extent
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self, dtype=dtype, count=count, offset=offset).view(shape)


def owned_array(num_bytes: int) -> LentArray:
    """Memory that is nobody else's, with the interface of what is lent. Pages that are never written take none."""
    return np.empty(num_bytes, dtype=np.uint8).view(LentArray)


class _Part:
    """A range of a mapping, as `BlockPool` lends it."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray):
        self._array = array

    def lend(self, lease: Any) -> LentArray:
        buffer = self._array.view(LentArray)
        buffer.lease = lease
        return buffer


class Mapping:
    """A shared mapping of a memory file. It is unmapped when the last array made from it is gone."""

    def __init__(self, descriptor: int, size: int):
        self.size = align_up(size, PAGE)
        # mmap by libc: Python's keeps a duplicate of the descriptor open for as long as the mapping lives
        address = _libc.mmap(None, self.size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot map {self.size} bytes of shared memory: {os.strerror(code)}")
        self.address: int = address
        weakref.finalize(self, _libc.munmap, address, self.size).atexit = False

    def prefault(self, offset: int, num_bytes: int) -> None:
        """Takes the pages of a range now rather than in the first operation that touches them."""
        start = offset // PAGE * PAGE
        if num_bytes > 0:
            _libc.madvise(self.address + start, align_up(offset + num_bytes - start, PAGE), _MADV_POPULATE_WRITE)

    def array(self, offset: int, num_bytes: int) -> np.ndarray:
        """The bytes of a range; the array keeps the mapping alive."""
        if not 0 <= offset <= offset + num_bytes <= self.size:
            raise ValueError(f"range [{offset}, {offset + num_bytes}) is outside of a segment of {self.size} bytes")
        buffer = (ctypes.c_uint8 * num_bytes).from_address(self.address + offset)
        buffer.mapping = self  # type: ignore[attr-defined]
        return np.frombuffer(buffer, dtype=np.uint8)  # type: ignore[call-overload]

    def part(self, offset: int, num_bytes: int) -> _Part:
        """A range that can be lent."""
        return _Part(self.array(offset, num_bytes))


class SymmetricSegment:
    """One segment of a heap: every rank's mapping of the memory of every rank of its host.

    ``bases`` holds the addresses, by rank; for ranks of other hosts it holds 0, and ``mappings`` None.

    ``network`` is what a network needs to put bytes into it: the last words of its window, see `device.control`.

    Collective to make: `allgather` sends a payload and file descriptors to all ranks and returns everyone's, by rank.
    `prefault` lists ranges (offset, bytes) whose pages are taken in advance.
    """

    network = (0, 0, 0)

    def __init__(
        self,
        rank: int,
        num_bytes: int,
        prefault: Sequence[tuple[int, int]],
        allgather: Allgather,
    ):
        descriptor = create_memory_file(num_bytes)
        try:
            self.own = Mapping(descriptor, num_bytes)
            for offset, length in prefault:  # before any peer touches them: the pages are this rank's, on its node
                self.own.prefault(offset, length)
            descriptors = [received[0] if received else None for _, received in allgather(b"", [descriptor])]
        finally:
            os.close(descriptor)
        try:
            self.mappings = [
                self.own if peer == rank else None if peer_descriptor is None else Mapping(peer_descriptor, num_bytes)
                for peer, peer_descriptor in enumerate(descriptors)
            ]
        finally:
            for peer_descriptor in descriptors:
                if peer_descriptor is not None:
                    os.close(peer_descriptor)
        self.mapped = [mapping for mapping in self.mappings if mapping is not None]
        for mapping in self.mapped:
            for offset, length in prefault:
                mapping.prefault(offset, length)
        self.bases = np.array([mapping.address if mapping else 0 for mapping in self.mappings], dtype=np.int64)
