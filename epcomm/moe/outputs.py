"""Which output block a combine uses, and when a block may be written again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from epcomm.device.control import GENERATION_SHIFT
from epcomm.moe.blocks import BlockPool
from epcomm.moe.received import Tensors

if TYPE_CHECKING:
    from epcomm.moe.routing import Workspace


class Outputs:
    """Output blocks of one handle: those that `take` lends, and the one for staging.

    Combines are counted: one that a later dispatch has seen read by all peers frees its block.
    """

    def __init__(self, pool: BlockPool, staging: int, generation: int):
        self._pool, self._staging = pool, staging
        self.start_generation(generation)

    def start_generation(self, generation: int) -> None:
        self._combined = self._read_by_all = generation << GENERATION_SHIFT
        self._last_read: dict[int, int] = {}  # by block, the last combine that read it

    def all_read(self) -> None:
        """A dispatch has ended: every peer has read every earlier combine."""
        self._read_by_all = self._combined

    def combined(self, block: int) -> None:
        """A combine of `block` was launched."""
        self._combined += 1
        self._last_read[block] = self._combined

    def take(self) -> Any:
        """Memory of a block that all peers have read, or None if there is no free one."""
        still_read = []  # these go back when this returns
        while self._pool.free:
            lease = self._pool.take()
            if self._last_read.get(lease.index, 0) <= self._read_by_all:
                return self._pool.buffer(lease)
            still_read.append(lease)
        return None

    def staging(self) -> tuple[int, int]:
        """(block that y is copied to, the combine that must have been read by all before)."""
        return self._staging, self._last_read.get(self._staging, 0)

    def block_of(self, rows: Sequence[Any], tensors: Tensors) -> tuple[int, int]:
        """(block, STAGE_AFTER) for y: the block that it lies in, or the one for staging and when that is free."""
        place = self._pool.locate(rows[0].data_ptr())
        if place is None:
            return self.staging()
        block, inside = place
        start = rows[0].data_ptr() - inside
        for row, (_, _, offset) in zip(rows, tensors):
            if row.data_ptr() != start + offset or not row.is_contiguous():
                return self.staging()
        return block, -1


class Pools:
    """What a handle's operations take and give back: receive blocks, output blocks, memory of routings that ended."""

    def __init__(self, receive: BlockPool, outputs: Outputs):
        self.receive, self.outputs = receive, outputs
        self.workspaces: list[Workspace] = []
