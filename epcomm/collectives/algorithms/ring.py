"""Ring: every chunk travels from neighbour to neighbour. Fewest bytes per link, a step for every rank.

`order` is the order of ranks around the ring (default: ascending); `epcomm.topology.ring_order` finds a good one.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.paths import copy_along, reduce_along, rotated
from epcomm.collectives.language import Chunk, Collective, chunk
from epcomm.errors import ConfigError


@dataclass(frozen=True)
class Ring:
    """Ranks in an order, and which of the `parts` chunks of every block goes around here, on a channel of its own."""

    order: Sequence[int]
    part: int
    parts: int

    def allreduce(self, collective: Collective) -> None:
        for block in range(len(self.order)):
            index = block * self.parts + self.part
            path = self._path_to((block + 1) % len(self.order))
            self._copy(reduce_along(path, index, index, channel=self.part), path[:-1])

    def reduce_scatter(self, collective: Collective) -> None:
        for position, rank in enumerate(self.order):
            index = rank * self.parts + self.part
            reduce_along(self._path_to(position), index, self.part, channel=self.part)

    def allgather(self, collective: Collective) -> None:
        for position, rank in enumerate(self.order):
            own = chunk(rank, "input", self.part).copy(rank, "output", rank * self.parts + self.part)
            self._copy(own, rotated(self.order, position)[1:])

    def broadcast(self, collective: Collective) -> None:
        root = collective.root
        own = chunk(root, "input", self.part).copy(root, "output")
        self._copy(own, rotated(self.order, self.order.index(root))[1:])

    def reduce(self, collective: Collective) -> None:
        reduce_along(self._path_to(self.order.index(collective.root)), self.part, self.part, channel=self.part)

    def _path_to(self, position: int) -> list[int]:
        """Once around, ending there."""
        return rotated(self.order, (position + 1) % len(self.order))

    def _copy(self, own: Chunk, ranks: Sequence[int]) -> None:
        copy_along(own, ranks, channel=self.part)


def ring_forms(parts: int) -> dict[str, Form]:
    """Collectives by one ring, or by two that turn in opposite directions, each with its part of the data."""

    def program(move: Callable[[Ring, Collective], None]) -> Callable[..., None]:
        def run(collective: Collective, order: Sequence[int] | None = None) -> None:
            ranks = list(range(collective.num_ranks))
            if order is not None and sorted(order) != ranks:
                raise ConfigError(f"ring: order: wanted all ranks below {len(ranks)}, once each, got {order}")
            ranks = ranks if order is None else list(order)
            for part in range(parts):
                move(Ring(ranks[::-1] if part else ranks, part, parts), collective)

        return run

    return {
        "allreduce": Form(program(Ring.allreduce), lambda num_ranks: num_ranks * parts),
        "allgather": Form(program(Ring.allgather), lambda num_ranks: parts),
        "reduce_scatter": Form(program(Ring.reduce_scatter), lambda num_ranks: parts),
        "broadcast": Form(program(Ring.broadcast), lambda num_ranks: parts),
        "reduce": Form(program(Ring.reduce), lambda num_ranks: parts),
    }


RING = Algorithm("ring", ring_forms(1), options=("order",))
