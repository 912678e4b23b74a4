"""Ranks by node: nodes of one size, whose ranks follow one another."""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.collectives.language import Collective
from epcomm.errors import ConfigError

#: Channel of a phase along the rails; the phase in nodes before it has the default, 0.
RAIL = 1


@dataclass(frozen=True)
class Nodes:
    """`number` nodes of `ranks_per_node` ranks each."""

    number: int
    ranks_per_node: int

    @classmethod
    def of(cls, collective: Collective, ranks_per_node: int | None) -> Nodes:
        """The nodes of a collective's ranks, one node unless told otherwise; ConfigError if they aren't of one size."""
        num_ranks = collective.num_ranks
        size = num_ranks if ranks_per_node is None else ranks_per_node
        if type(size) is not int or size < 1 or num_ranks % size:
            raise ConfigError(f"{collective.kind}: ranks_per_node: wanted a divisor of {num_ranks}, got {size!r}")
        return cls(num_ranks // size, size)

    def rank(self, node: int, local: int) -> int:
        """A node's rank by its number in the node."""
        return node * self.ranks_per_node + local

    def node(self, number: int) -> range:
        """The ranks of a node."""
        return range(self.rank(number, 0), self.rank(number + 1, 0))

    def rail(self, local: int) -> list[int]:
        """The ranks that have this number in their node, node by node."""
        return [self.rank(node, local) for node in range(self.number)]
