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

    def behind(self, count: int) -> Place:
        """The place that many chunks further on."""
        return Place(self.rank, Location(self.location.buffer, self.location.offset + count))


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

    A block is one unit of the collective (see `Collective`); so what is contiguous within a block stays so. Instances
    share no chunk, and are alike: what holds for one program holds for each of them.
    """

    collective: Collective
    scratch_chunks: int
    number: int

    @property
    def scaled(self) -> Collective:
        """The collective with all instances' chunks."""
        given = self.collective
        return Collective(given.kind, given.num_ranks, given.num_chunks * self.number, given.root)

    def cut(self, operation: Operation) -> Iterator[Operation]:
        """The operation's parts: where blocks meet, other instances' chunks come between them, if there are others."""
        for first, count in self._runs(operation):
            src, dst, local = (
                None if place is None else place.behind(first)
                for place in (operation.src, operation.dst, operation.local)
            )  # fmt: skip
            assert src is not None and dst is not None
            yield Operation(src, dst, local, count, operation.channel)

    def placed(self, location: Location, instance: int) -> Location:
        """Where an instance has what the program has at a location."""
        buffer, offset = location
        if buffer == "scratch":
            return Location(buffer, instance * self.scratch_chunks + offset)
        block, within = divmod(offset, self.collective.num_chunks)
        return Location(buffer, (block * self.number + instance) * self.collective.num_chunks + within)

    def _runs(self, operation: Operation) -> list[tuple[int, int]]:
        """(first, count) of the parts."""
        if self.number == 1:
            return [(0, operation.count)]
        width, cuts = self.collective.num_chunks, {0, operation.count}
        for place in (operation.src, operation.dst, operation.local):
            if place is not None and place.location.buffer != "scratch":
                cuts |= set(range(-place.location.offset % width, operation.count, width))
        bounds = sorted(cuts)
        return [(first, end - first) for first, end in zip(bounds, bounds[1:])]
