"""The algorithms as rounds (`epcomm.simulation.rounds`), for worlds too large for plans and to price without plans.

Each function gives the rounds of what the plan of the same name does; shares are of the collective's unit (see
`Collective`). Most algorithms are said once: an allgather is the mirror of a reduce_scatter, an allreduce is both, each
with a block per rank; a reduce is the mirror of a broadcast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from epcomm.collectives.algorithms.butterfly import Folded
from epcomm.collectives.algorithms.double_binary_tree import Tree, two_trees
from epcomm.collectives.algorithms.pat import tree_edges
from epcomm.collectives.algorithms.swing import swing_partner
from epcomm.collectives.cost.patterns import (
    all_pairs,
    butterfly,
    chain,
    levels,
    mirrored,
    phases,
    scaled,
    side_by_side,
    summed,
    to_each,
    turns,
)
from epcomm.collectives.cost.world import World
from epcomm.errors import ConfigError
from epcomm.simulation.rounds import Copy, Round

_Rounds = Callable[[World], list[Round]]
_Schedule = Callable[[World], Sequence[Round | Copy]]


def _by_blocks(reduce_scatter: _Rounds, allgather: _Rounds | None = None) -> dict[str, _Schedule]:
    """Three collectives by sums of blocks; `allgather` without each rank's copy of its own block."""

    def gather(world: World) -> list[Round]:
        return mirrored(reduce_scatter(world)) if allgather is None else allgather(world)

    return {
        "allreduce": lambda world: scaled(reduce_scatter(world) + gather(world), 1 / world.num_ranks),
        "reduce_scatter": reduce_scatter,
        "allgather": lambda world: [Copy(world.ranks, 1.0), *gather(world)],
    }


def _rooted(broadcast: _Rounds, reduce: _Rounds | None = None) -> dict[str, _Schedule]:
    """Two collectives by copies from the root; `broadcast` without the root's copy of its own input."""
    return {
        "broadcast": lambda world: [Copy(np.array([world.root]), 1.0), *broadcast(world)],
        "reduce": (lambda world: summed(mirrored(broadcast(world)))) if reduce is None else reduce,
    }


def _both_ways(of_ring: Mapping[str, _Schedule]) -> dict[str, _Schedule]:
    """A ring's collectives by two that turn in opposite directions."""

    def schedule(of_one: _Schedule, world: World) -> Sequence[Round | Copy]:
        ways = [of_one(each) for each in (world, replace(world, order=tuple(world.ring[::-1].tolist())))]
        copied = [replace(each, parts=2) for each in ways[0] if isinstance(each, Copy)]
        one, other = ([each for each in way if isinstance(each, Round)] for way in ways)
        return [*copied, *side_by_side(one, other)]

    return {kind: partial(schedule, of_one) for kind, of_one in of_ring.items()}


# Rings


def _ring_sums(world: World) -> list[Round]:
    # what is sent first is an input
    return turns(world.ring, 1, 1.0) + turns(world.ring, world.num_ranks - 2, 1.0, is_sum=True)


def _ring_copies(world: World) -> list[Round]:
    return turns(world.ring, world.num_ranks - 1, 1.0)


def _ring_from_root(world: World) -> np.ndarray:
    return np.roll(world.ring, -int(np.flatnonzero(world.ring == world.root)[0]))


def _ring_broadcast(world: World) -> list[Round]:
    return chain(_ring_from_root(world), 1.0)


def _ring_reduce(world: World) -> list[Round]:
    return summed(chain(np.roll(_ring_from_root(world), -1), 1.0))  # it turns as ever: the root comes last


# Butterflies


def _power_of_two(num_ranks: int) -> int:
    if num_ranks & (num_ranks - 1):
        raise ConfigError(f"wanted a power of two of ranks, got {num_ranks}")
    return num_ranks


def _halving(ranks: np.ndarray) -> list[Round]:
    return butterfly(ranks, lambda step: np.arange(len(ranks)) ^ len(ranks) >> (step + 1))


def _halving_sums(world: World) -> list[Round]:
    num_ranks = _power_of_two(world.num_ranks)
    return scaled(_halving(world.ranks), num_ranks)


def _fold(folded: Folded) -> list[Round]:
    """The inputs of those left over, to those who act for them."""
    acting, others = (np.array(list(each), np.int64) for each in (folded.partner.keys(), folded.partner.values()))
    return [Round(others, acting, 1.0)] if len(others) else []


def _halving_doubling(world: World) -> list[Round]:
    folded = Folded(world.num_ranks)
    sums, fold = _halving(np.array(folded.ranks)), _fold(folded)
    return fold + sums + mirrored(sums) + mirrored(fold)


def _recursive_doubling(world: World) -> list[Round]:
    folded = Folded(world.num_ranks)
    ranks, fold = np.array(folded.ranks), _fold(folded)
    positions, steps = np.arange(len(ranks)), len(ranks).bit_length() - 1
    exchanges = [
        Round(ranks, ranks[positions ^ 1 << step], 1.0, forwards=True, is_sum=step > 0 or bool(fold))
        for step in range(steps)
    ]
    return fold + exchanges + mirrored(fold)


def _swing_sums(world: World) -> list[Round]:
    num_ranks = _power_of_two(world.num_ranks)

    def partner(step: int) -> np.ndarray:
        return np.array([swing_partner(rank, step, num_ranks) for rank in range(num_ranks)])

    return scaled(butterfly(world.ranks, partner), num_ranks)


# All pairs


def _pairs(world: World) -> list[Round]:
    return all_pairs(world.ranks[None], 1.0)


def _from_root(world: World) -> list[Round]:
    return to_each(np.array([world.root]), world.ranks[None], 1.0)


def _two_shot_broadcast(world: World) -> list[Round]:
    """The root gives each rank a block, who gives it to all but the root."""
    others = world.ranks[world.ranks != world.root]
    groups = np.broadcast_to(others, (world.num_ranks, len(others)))  # a view: `to_each` refuses too many
    return scaled(_from_root(world) + to_each(world.ranks, groups, 1.0), 1 / world.num_ranks)


def _two_shot_reduce(world: World) -> list[Round]:
    """Each rank sums a block of all inputs, and gives it to the root."""
    return scaled(_pairs(world) + mirrored(_from_root(world)), 1 / world.num_ranks)


def _direct(world: World) -> list[Round | Copy]:
    return [Copy(world.ranks, 1.0), *_pairs(world)]


# Nodes


def _node_sums(world: World) -> list[Round]:
    """All pairs in each node, then rings between nodes, one for each rank of a node."""
    return phases(_in_nodes(world), turns(world.nodes, len(world.nodes) - 1, 1.0, is_sum=True))


def _node_copies(world: World) -> list[Round]:
    """The other way round."""
    return phases(turns(world.nodes, len(world.nodes) - 1, 1.0), _in_nodes(world))


def _in_nodes(world: World) -> list[Round]:
    return all_pairs(world.nodes, len(world.nodes), len(world.nodes))


def _rail_and_nodes(world: World) -> tuple[list[Round], list[Round]]:
    """Along the root's rail, and from each of its ranks to all of its node."""
    node, local = divmod(world.root, world.ranks_per_node)
    rail = world.nodes[:, local]
    return chain(np.roll(rail, -node), 1.0), to_each(rail, world.nodes, 1.0)


def _node_broadcast(world: World) -> list[Round]:
    return phases(*_rail_and_nodes(world))


def _node_reduce(world: World) -> list[Round]:
    rail, inside = _rail_and_nodes(world)
    return summed(phases(mirrored(inside), mirrored(rail)))


def _two_level(world: World) -> list[Round | Copy]:
    """In each node to who has the receiver's number, a block for each node; then a node's blocks along each rail."""
    nodes = world.nodes
    number, size = nodes.shape
    own = Copy(world.ranks, number, number)
    return [own, *phases(all_pairs(nodes, number, number), all_pairs(nodes.T, size))]


# Trees


def _merged(trees: tuple[Tree, ...]) -> list[Round]:
    """Copies down two trees, each with half of the data in programs of its own."""
    one, two = ([Round(parents, children, 1.0, forwards=True) for children, parents in levels(tree)] for tree in trees)
    return side_by_side(one, two)


def _tree_allreduce(world: World) -> list[Round]:
    down = _merged(two_trees(range(world.num_ranks)))
    return summed(mirrored(down)) + down


def _tree_copies(world: World) -> list[Round]:
    others = [rank for rank in range(world.num_ranks) if rank != world.root]
    return _merged(tuple(Tree(world.root, (tree,)) for tree in two_trees(others))) if others else []


def _pat_sums(world: World) -> list[Round]:
    num_ranks, ranks, up = world.num_ranks, world.ranks, list[Round]()
    distances = [taker - giver for giver, taker in tree_edges(num_ranks)]
    for distance in dict.fromkeys(reversed(distances)):
        blocks = distances.count(distance)
        up.append(Round(ranks, (ranks - distance) % num_ranks, blocks, parts=blocks, is_sum=bool(up)))
    return up


def _pat_copies(world: World) -> list[Round]:
    edges = np.array(list(tree_edges(world.num_ranks)), np.int64).reshape(-1, 2)
    distances = edges[:, 1] - edges[:, 0]
    down = []
    for distance in dict.fromkeys(distances.tolist()):
        givers, takers = (edges[distances == distance].T + world.root) % world.num_ranks
        down.append(Round(givers, takers, 1.0, forwards=True))
    return down


# Bruck


def _powers(num_ranks: int) -> list[int]:
    return [1 << bit for bit in range((num_ranks - 1).bit_length())]


def _bruck_copies(world: World) -> list[Round]:
    ranks, num_ranks, moves = world.ranks, world.num_ranks, list[Round]()
    for distance in _powers(num_ranks):
        blocks = min(distance, num_ranks - distance)
        moves.append(Round((ranks + distance) % num_ranks, ranks, blocks, parts=min(blocks, 2)))  # they may wrap around
    return moves


def _bruck_alltoall(world: World) -> list[Round | Copy]:
    ranks, num_ranks, moves = world.ranks, world.num_ranks, list[Round | Copy]()
    for distance in _powers(num_ranks):
        ways = [way for way in range(num_ranks) if way & distance]
        kept = {way: _kept(way, distance) for way in ways}
        parts = sum(kept[way] != kept.get(way - 1) for way in ways)
        moves.append(Round(ranks, (ranks + distance) % num_ranks, len(ways), parts))
    return [*moves, Copy(ranks, num_ranks, num_ranks)]


def _kept(way: int, distance: int) -> int:
    """Which of three buffers has a block with this way to go before it moves by this distance."""
    moved = (way & distance - 1).bit_count()
    return min(moved, 2 - moved % 2)


_RING = _by_blocks(_ring_sums, _ring_copies) | _rooted(_ring_broadcast, _ring_reduce)

#: rounds by algorithm and collective
SCHEDULES: dict[str, Mapping[str, _Schedule]] = {
    "ring": _RING,
    "bidirectional_ring": _both_ways(_RING),
    "double_binary_tree": {"allreduce": _tree_allreduce} | _rooted(_tree_copies),
    "recursive_doubling": {"allreduce": _recursive_doubling},
    "halving_doubling": _by_blocks(_halving_sums) | {"allreduce": _halving_doubling},
    "bruck": {"allgather": _by_blocks(_bruck_copies, _bruck_copies)["allgather"], "alltoall": _bruck_alltoall},
    "one_shot": _by_blocks(_pairs) | _rooted(_from_root) | {"allreduce": _pairs},
    "two_shot": {"allreduce": _by_blocks(_pairs)["allreduce"]} | _rooted(_two_shot_broadcast, _two_shot_reduce),
    "hierarchical": _by_blocks(_node_sums, _node_copies) | _rooted(_node_broadcast, _node_reduce),
    "pat": _by_blocks(_pat_sums) | _rooted(_pat_copies),
    "swing": _by_blocks(_swing_sums),
    "direct": {"alltoall": _direct},
    "two_level": {"alltoall": _two_level},
}


def algorithms_of(kind: str) -> tuple[str, ...]:
    """The algorithms that do a collective."""
    return tuple(name for name, schedules in SCHEDULES.items() if kind in schedules)
