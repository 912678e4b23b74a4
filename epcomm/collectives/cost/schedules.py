"""The algorithms as rounds (`epcomm.simulation.rounds`), for worlds too large for plans and to price without plans.

Each function gives the rounds of what the plan of the same name does; shares are of the collective's unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from epcomm.collectives.algorithms.butterfly import Folded
from epcomm.collectives.algorithms.double_binary_tree import Tree, two_trees
from epcomm.collectives.algorithms.pat import tree_edges
from epcomm.collectives.algorithms.swing import swing_partner
from epcomm.errors import ConfigError
from epcomm.simulation.rounds import Round

#: All pairs of more ranks than that are not priced: their messages are too many to look at.
MOST_PAIRED = 300


@dataclass(frozen=True)
class World:
    """Ranks, how many each node has, and their order in a ring (ascending if None)."""

    num_ranks: int
    ranks_per_node: int
    order: tuple[int, ...] | None = None


_Schedule = Callable[[World], list[Round]]


def _ring(world: World) -> list[Round]:
    """Once around to sum, once to copy."""
    num_ranks = world.num_ranks
    src = np.arange(num_ranks) if world.order is None else np.array(world.order)
    turns = ((False, 1), (True, num_ranks - 2), (False, num_ranks - 1))  # what is sent first is an input
    return [
        Round(src, np.roll(src, -1), 1 / num_ranks, forwards=True, is_sum=is_sum, repeat=repeat)
        for is_sum, repeat in turns if repeat > 0 and num_ranks > 1
    ]  # fmt: skip


def _reversed(rounds: list[Round]) -> list[Round]:
    """The allgather that mirrors a reduce_scatter's rounds."""
    return [Round(each.dst, each.src, each.share, each.parts, each.forwards) for each in reversed(rounds)]


def _butterfly(ranks: np.ndarray, partner: Callable[[int], np.ndarray]) -> list[Round]:
    """The reduce_scatter of a butterfly among a power of two of ranks; `partner(step)` are positions."""
    steps = len(ranks).bit_length() - 1
    return [Round(ranks, ranks[partner(step)], 0.5 ** (step + 1), is_sum=step > 0) for step in range(steps)]


def _halving(size: int) -> Callable[[int], np.ndarray]:
    return lambda step: np.arange(size) ^ size >> (step + 1)


def _fold(folded: Folded) -> list[Round]:
    """The inputs of those left over, to those who act for them."""
    acting, others = (np.array(list(each), np.int64) for each in (folded.partner.keys(), folded.partner.values()))
    return [Round(others, acting, 1.0)] if len(others) else []


def _halving_doubling(world: World) -> list[Round]:
    folded = Folded(world.num_ranks)
    ranks, fold = np.array(folded.ranks), _fold(folded)
    half = _butterfly(ranks, _halving(len(ranks)))
    return fold + half + _reversed(half) + _reversed(fold)


def _recursive_doubling(world: World) -> list[Round]:
    folded = Folded(world.num_ranks)
    ranks, fold = np.array(folded.ranks), _fold(folded)
    positions, steps = np.arange(len(ranks)), len(ranks).bit_length() - 1
    exchanges = [
        Round(ranks, ranks[positions ^ 1 << step], 1.0, forwards=True, is_sum=step > 0 or bool(fold))
        for step in range(steps)
    ]
    return fold + exchanges + _reversed(fold)


def _swing(world: World) -> list[Round]:
    num_ranks = world.num_ranks
    if num_ranks & (num_ranks - 1):
        raise ConfigError(f"wanted a power of two of ranks, got {num_ranks}")

    def partner(step: int) -> np.ndarray:
        return np.array([swing_partner(rank, step, num_ranks) for rank in range(num_ranks)])

    half = _butterfly(np.arange(num_ranks), partner)
    return half + _reversed(half)


def _all_pairs(groups: np.ndarray, share: float) -> list[Round]:
    """Everybody to everybody else of the group, groups [number, size]."""
    size = groups.shape[1]
    if size > MOST_PAIRED:
        raise ConfigError(f"all pairs are priced among up to {MOST_PAIRED} ranks, got {size}")
    if size == 1:
        return []
    shifted = [np.roll(groups, -distance, axis=1).ravel() for distance in range(1, size)]
    src = np.tile(groups.ravel(), size - 1)
    return [Round(src, np.concatenate(shifted), share)]


def _one_shot(world: World) -> list[Round]:
    return _all_pairs(np.arange(world.num_ranks)[None], 1.0)


def _two_shot(world: World) -> list[Round]:
    return 2 * _all_pairs(np.arange(world.num_ranks)[None], 1 / world.num_ranks)


def _hierarchical(world: World) -> list[Round]:
    num_ranks, ranks_per_node = world.num_ranks, world.ranks_per_node
    if num_ranks % ranks_per_node:
        raise ConfigError(f"wanted nodes of {ranks_per_node} ranks, got {num_ranks} ranks")
    if num_ranks == ranks_per_node:
        raise ConfigError("in one node it is two_shot")
    nodes = np.arange(num_ranks).reshape(-1, ranks_per_node)
    inside = _all_pairs(nodes, 1 / ranks_per_node)
    src, dst, turns = nodes.ravel(), np.roll(nodes, -1, axis=0).ravel(), len(nodes) - 1
    rails = [Round(src, dst, 1 / num_ranks, forwards=True, is_sum=is_sum, repeat=turns) for is_sum in (True, False)]
    return inside + rails + inside


def _levels(tree: Tree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(children, their parents) level by level from the tree's root down."""
    level = [tree]
    while level:
        pairs = [(child.rank, parent.rank) for parent in level for child in parent.children]
        if pairs:
            children, parents = np.array(pairs).T
            yield children, parents
        level = [child for parent in level for child in parent.children]


def _double_binary_tree(world: World) -> list[Round]:
    levels = [list(_levels(tree)) for tree in two_trees(range(world.num_ranks))]
    up: list[Round] = []
    for pairs in zip(*(reversed(each) for each in levels)):
        children, parents = (np.concatenate(ends) for ends in zip(*pairs))
        up.append(Round(children, parents, 0.5, forwards=True, is_sum=bool(up)))
    return up + _reversed(up)


def _pat(world: World) -> list[Round]:
    num_ranks = world.num_ranks
    ranks, up = np.arange(num_ranks), list[Round]()
    distances = [taker - giver for giver, taker in tree_edges(num_ranks)]
    for distance in dict.fromkeys(reversed(distances)):
        blocks = distances.count(distance)
        share = blocks / num_ranks
        up.append(Round(ranks, (ranks - distance) % num_ranks, share, parts=blocks, is_sum=bool(up)))
    return up + _reversed(up)


#: rounds of an allreduce, by algorithm
ALLREDUCE: dict[str, _Schedule] = {
    "ring": _ring,
    "double_binary_tree": _double_binary_tree,
    "recursive_doubling": _recursive_doubling,
    "halving_doubling": _halving_doubling,
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "hierarchical": _hierarchical,
    "pat": _pat,
    "swing": _swing,
}
