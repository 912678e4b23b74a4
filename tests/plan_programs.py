"""Programs in the language made at random that do a collective: by any trees, with detours, on any channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from epcomm.collectives.language import Chunk, Collective, Trace, chunk
from epcomm.collectives.plan import COLLECTIVES, Plan
from epcomm.collectives.plan.conditions import ROOTED


def random_plan(kind: str, num_ranks: int, seed: int, protocol: str = "simple") -> Plan:
    """A right plan that is hardly like another one; what happens to each chunk goes on beside the others'."""
    generator = np.random.default_rng([seed, COLLECTIVES.index(kind)])
    root = int(generator.integers(num_ranks)) if kind in ROOTED else 0
    collective = Collective(kind, num_ranks, int(generator.integers(1, 4)), root)
    with Trace(f"random {seed}", collective, in_place=kind != "alltoall") as trace:
        couriers = _Couriers(generator, num_ranks)
        under_way = [couriers.deliver(*task) for task in _tasks(collective)]
        while under_way:
            at = int(generator.integers(len(under_way)))
            if next(under_way[at], None) is None:
                del under_way[at]
    channels, pieces = (int(generator.integers(1, 3)) for _ in range(2))
    return trace.plan(channels=channels, pieces=pieces, protocol=protocol)


def _tasks(collective: Collective) -> Iterator[tuple[dict[int, int], dict[int, int]]]:
    """Of which ranks' inputs to sum which chunk, and in whose outputs to put it where: by rank."""
    wanted: dict[tuple[int, int], dict[int, int]] = {}
    for rank in range(collective.num_ranks):
        for to, (contributor, position) in enumerate(zip(*collective.wanted(rank))):
            wanted.setdefault((int(contributor), int(position)), {})[rank] = to
    for (contributor, position), places in wanted.items():
        ranks = range(collective.num_ranks) if collective.is_reduction else [contributor]
        yield dict.fromkeys(ranks, position), places


class _Couriers:
    """Sums and copies of chunks, one operation at a time, which use each rank's scratch in turn."""

    def __init__(self, generator: np.random.Generator, num_ranks: int):
        self._generator, self._num_ranks = generator, num_ranks
        self._taken: dict[int, set[int]] = defaultdict(set)  # chunks of each rank's scratch

    def deliver(self, sources: dict[int, int], places: dict[int, int]) -> Iterator[bool]:
        """Does one of `_tasks`; yields after each operation."""
        values = [chunk(rank, "input", index) for rank, index in sources.items()]
        while len(values) > 1:
            first, second = (values.pop(self._below(len(values))) for _ in range(2))
            if self._below(3) == 0:
                second = self._moved(second)
                yield True
            total = first.reduce(second, "scratch", self._slot(first.place.rank), channel=self._below(2))
            values.append(self._kept(total, first, second))
            yield True
        value = self._moved(values[0]) if self._below(3) == 0 else values[0]
        yield True
        holders = [value]
        for rank in self._generator.permutation(list(places)).tolist():
            holder = holders[self._below(len(holders))]
            holders.append(holder.copy(rank, "output", places[rank], channel=self._below(2)))
            yield True
        self._kept(holders[-1], value)

    def _moved(self, value: Chunk) -> Chunk:
        """To some rank's scratch."""
        rank = self._below(self._num_ranks)
        return self._kept(value.copy(rank, "scratch", self._slot(rank), channel=self._below(2)), value)

    def _slot(self, rank: int) -> int:
        """A chunk of a rank's scratch that nothing needs any more."""
        slot = next(number for number in range(1000) if number not in self._taken[rank])
        self._taken[rank].add(slot)
        return slot

    def _kept(self, value: Chunk, *used: Chunk) -> Chunk:
        """The value, once what it was made of isn't needed any more."""
        for each in used:
            if each.place.location.buffer == "scratch":
                self._taken[each.place.rank].discard(each.place.location.offset)
        return value

    def _below(self, number: int) -> int:
        return int(self._generator.integers(number))
