"""Offsets of named regions in a segment. The same arithmetic on every rank gives the same offsets."""

from __future__ import annotations

PAGE = 4096


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is >= `value`."""
    return -(-value // alignment) * alignment


class Layout:
    """Places regions one after another. ``layout.add("counts", 4096)`` returns the region's byte offset."""

    def __init__(self) -> None:
        self.size = 0
        self.regions: dict[str, tuple[int, int]] = {}

    def add(self, name: str, num_bytes: int, alignment: int = PAGE) -> int:
        """Reserves `num_bytes` at the next multiple of `alignment` and returns the offset in bytes."""
        offset = align_up(self.size, alignment)
        self.regions[name] = (offset, num_bytes)
        self.size = offset + num_bytes
        return offset
