"""The operations of a traced program, and their instances: the same program on parts of every chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from epcomm.collectives.plan import Collective, Location


class Place(NamedTuple):
    """Where chunks begin."""

    rank: int
    location: Location

    def __str__(self) -> str:
        return f"chunk {self.location.offset} of rank {self.rank}'s {self.location.buffer}"


@dataclass(frozen=True)
class Operation:
    """dst = src, or with a local operand, which is on dst's rank: dst = local + src. All of `count` chunks."""

    src: Place
    dst: Place
    local: Place | None
    count: int
    channel: int


@dataclass(frozen=True)
class Instances:
    """`number` instances of a program on `collective`, with `number` times its chunks: each has a run of each block.

    A block is one unit of the collective (see `Collective`); so what is contiguous within a block stays so.
    """

    collective: Collective
    scratch_chunks: int
    number: int

    @property
    def scaled(self) -> Collective:
        """The collective with all instances' chunks."""
        given = self.collective
        return Collective(given.kind, given.num_ranks, given.num_chunks * self.number, given.root)

    def operations(self, instance: int, operations: list[Operation]) -> Iterator[Operation]:
        """The operations of one instance. What spans blocks is cut where they meet, if there are more instances."""
        for operation in operations:
            for first, count in self._runs(operation):
                places = (operation.src, operation.dst, operation.local)
                src, dst, local = (None if p is None else self._placed(p, first, instance) for p in places)
                assert src is not None and dst is not None
                yield Operation(src, dst, local, count, operation.channel)

    def _runs(self, operation: Operation) -> list[tuple[int, int]]:
        """(first, count) of an operation's parts, none of which spans two blocks."""
        if self.number == 1:
            return [(0, operation.count)]
        width, cuts = self.collective.num_chunks, {0, operation.count}
        for place in (operation.src, operation.dst, operation.local):
            if place is not None and place.location.buffer != "scratch":
                cuts |= set(range(-place.location.offset % width, operation.count, width))
        bounds = sorted(cuts)
        return [(first, end - first) for first, end in zip(bounds, bounds[1:])]

    def _placed(self, place: Place, first: int, instance: int) -> Place:
        buffer, offset = place.location.buffer, place.location.offset + first
        if buffer == "scratch":
            offset += instance * self.scratch_chunks
        else:
            block, within = divmod(offset, self.collective.num_chunks)
            offset = (block * self.number + instance) * self.collective.num_chunks + within
        return Place(place.rank, Location(buffer, offset))
