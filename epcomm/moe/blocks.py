"""Blocks of a handle's symmetric memory that are lent to results; they return when the last tensor on them is gone."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any


class Lease:
    """A block on loan. It returns to its pool when nothing refers to it any more."""

    __slots__ = ("_pool", "index")

    def __init__(self, pool: BlockPool, index: int):
        self._pool: BlockPool | None = pool
        self.index = index

    def release(self) -> None:
        """Returns the block now, for a result that no one will see."""
        pool, self._pool = self._pool, None
        if pool is not None:
            heappush(pool.free, self.index)  # in C, under the GIL: safe from any thread that drops the last reference

    def __del__(self) -> None:
        self.release()


class BlockPool:
    """Blocks of one kind in this rank's part of a segment: those with these numbers, of which the first are lent.

    `offset` is where block 0 would start.
    """

    def __init__(self, mapping: Any, offset: int, block_bytes: int, numbers: range, num_lent: int):
        self._first, self._size = numbers.start, block_bytes * len(numbers)
        offset += block_bytes * self._first
        self._address, self._block_bytes = mapping.address + offset, block_bytes
        self.free = list(numbers[:num_lent])  # a heap: the lowest block is the most likely to be in cache
        self._lend = [mapping.part(offset + i * block_bytes, block_bytes).lend for i in range(len(numbers))]

    def take(self) -> Lease:
        """The free block with the lowest number; there must be one."""
        return Lease(self, heappop(self.free))

    def buffer(self, lease: Lease) -> Any:
        """The block's bytes, as an object that keeps the lease and gives tensors on them (``tensor``)."""
        return self._lend[lease.index - self._first](lease)

    def free_arrays(self) -> None:
        """Lets go of the memory. Buffers that were made keep their part of it."""
        self._lend.clear()

    def locate(self, address: int) -> tuple[int, int] | None:
        """Block number and offset of an address in this pool, or None."""
        offset = address - self._address
        if 0 <= offset < self._size:
            number, offset = divmod(offset, self._block_bytes)
            return self._first + number, offset
        return None
