"""How many ranks and nodes a token is sent to: closed forms for a balanced router."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from epcomm.errors import ConfigError


@dataclass(frozen=True)
class Routing:
    """A token chooses `topk_groups` of `groups` groups of experts, then `topk` different experts in them, uniformly.

    One group is plain top-k. Several are the group-limited gate of DeepSeek-V3 (8 groups, 4 of them), which bounds the
    nodes that a token visits when groups lie on nodes.
    """

    experts: int = 256
    topk: int = 8
    groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        for name in ("experts", "topk", "groups", "topk_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.experts % self.groups:
            raise ConfigError(f"experts is {self.experts}; it must be a multiple of groups, {self.groups}")
        if self.topk_groups > self.groups:
            raise ConfigError(f"topk_groups is {self.topk_groups}; it must be at most groups, {self.groups}")
        if self.topk > self.eligible:
            raise ConfigError(f"topk is {self.topk}; it must be at most {self.eligible}, a token's choice of experts")

    @property
    def eligible(self) -> int:
        """The experts among which a token chooses once its groups are chosen."""
        return self.experts // self.groups * self.topk_groups

    def hit_probability(self, block: range) -> float:
        """The probability that a token chooses an expert of a contiguous block.

        Of each choice of groups that holds `inside` experts of the block, C(eligible - inside, topk) out of
        C(eligible, topk) choices of experts miss it; for one group 1 - C(experts - len(block), topk)/C(experts, topk).
        """
        size = self.experts // self.groups
        choices = {(0, 0): 1}  # (groups chosen, experts of the block in them): number of ways
        for first in range(0, self.experts, size):
            overlap = max(0, min(block.stop, first + size) - max(block.start, first))
            extended = dict(choices)
            for (chosen, inside), ways in choices.items():
                key = (chosen + 1, inside + overlap)
                extended[key] = extended.get(key, 0) + ways
            choices = extended
        missed = sum(
            ways * comb(self.eligible - inside, self.topk)
            for (chosen, inside), ways in choices.items()
            if chosen == self.topk_groups
        )
        return 1 - missed / (comb(self.groups, self.topk_groups) * comb(self.eligible, self.topk))

    def expected_blocks(self, blocks: list[range]) -> float:
        """The expected number of different blocks that a token chooses experts of."""
        return sum(self.hit_probability(block) for block in blocks)


def rank_blocks(experts: int, ranks: int) -> list[range]:
    """The experts of each rank: contiguous, sizes that differ by at most 1, as `placement` does by default."""
    bounds = [rank * (experts // ranks) + min(rank, experts % ranks) for rank in range(ranks + 1)]
    return [range(*pair) for pair in zip(bounds, bounds[1:])]


def node_blocks(experts: int, ranks: int, ranks_per_node: int) -> list[range]:
    """The experts of each node of consecutive ranks."""
    blocks = rank_blocks(experts, ranks)
    nodes = [blocks[first : first + ranks_per_node] for first in range(0, ranks, ranks_per_node)]
    return [range(node[0].start, node[-1].stop) for node in nodes]
