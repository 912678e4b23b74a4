"""The ranks of a collective as schedules see them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epcomm.errors import ConfigError


@dataclass(frozen=True)
class World:
    """Ranks, how many each node has, their order in a ring (ascending if None), and a rooted collective's root."""

    num_ranks: int
    ranks_per_node: int
    order: tuple[int, ...] | None = None
    root: int = 0

    @property
    def ranks(self) -> np.ndarray:
        return np.arange(self.num_ranks)

    @property
    def ring(self) -> np.ndarray:
        """The ranks in the ring's order."""
        return self.ranks if self.order is None else np.array(self.order)

    @property
    def nodes(self) -> np.ndarray:
        """Ranks, [nodes, ranks per node]; ConfigError unless there are several nodes of one size."""
        if self.num_ranks % self.ranks_per_node:
            raise ConfigError(f"wanted nodes of {self.ranks_per_node} ranks, got {self.num_ranks} ranks")
        if self.num_ranks == self.ranks_per_node:
            raise ConfigError("wanted several nodes, got one")
        return self.ranks.reshape(-1, self.ranks_per_node)
