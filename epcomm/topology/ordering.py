"""In which order ranks stand in a ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from epcomm.topology.machine import Topology

#: Up to so many ranks of a machine the best order is found by trying all.
_MAX_EXACT = 10

#: cost of a hop between two ranks
_Cost = Callable[[int, int], float]


def crossings(order: Sequence[int], node_of: Callable[[int], int]) -> int:
    """How many hops of a ring in this order go from one node to another: of a send to the next rank by each."""
    return sum(node_of(a) != node_of(b) for a, b in zip(order, [*order[1:], *order[:1]]))


def ring_order(topology: Topology) -> list[int]:
    """All ranks, in an order for a ring: machine by machine, so that it enters and leaves each once.

    Inside a machine the slowest hop is as fast as can be, and then the sum of 1 / bandwidth the least. That is exact
    for up to 10 ranks in a machine; more are joined by nearest neighbours, then improved by reversing parts.
    """
    def cost(a: int, b: int) -> float:
        bandwidth = topology.bandwidth(a, b)
        return 1 / bandwidth if bandwidth else math.inf

    is_ring = len(topology.nodes) == 1
    order: list[int] = []
    for ranks in topology.nodes:
        order += _node_order(list(ranks), cache(cost), is_ring)
    return order


def _node_order(ranks: list[int], cost: _Cost, is_ring: bool) -> list[int]:
    """The ranks of one machine; `is_ring`: the last one is followed by the first."""
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    costs = sorted({cost(a, b) for a, b in pairs})
    if len(ranks) <= 2 or len(costs) == 1:
        return ranks
    if len(ranks) > _MAX_EXACT:
        return _improved(_nearest_neighbours(ranks, cost), cost, is_ring)
    orders = (_best_order(ranks, cost, is_ring, slowest) for slowest in costs)
    return next(order for order in orders if order is not None)


def _best_order(ranks: list[int], cost: _Cost, is_ring: bool, slowest: float) -> list[int] | None:
    """The order of the least total cost without hops that cost more than `slowest`, from the first rank if it is a
    ring.

    Held and Karp's: the best way through each set of ranks to each last one of it.
    """
    starts = ranks[:1] if is_ring else ranks
    best: dict[tuple[frozenset[int], int], tuple[float, list[int]]] = {
        (frozenset([rank]), rank): (0.0, [rank]) for rank in starts
    }
    for _ in ranks[1:]:
        longer: dict[tuple[frozenset[int], int], tuple[float, list[int]]] = {}
        for (visited, last), (total, path) in best.items():
            for rank in ranks:
                if rank in visited or cost(last, rank) > slowest:
                    continue
                key, found = (visited | {rank}, rank), (total + cost(last, rank), [*path, rank])
                if key not in longer or found < longer[key]:
                    longer[key] = found
        best = longer
    closing = {last: cost(last, ranks[0]) if is_ring else 0.0 for last in ranks}
    complete = [
        (total + closing[last], path) for (_, last), (total, path) in best.items() if closing[last] <= slowest
    ]
    return min(complete)[1] if complete else None


def _nearest_neighbours(ranks: list[int], cost: _Cost) -> list[int]:
    order, left = ranks[:1], set(ranks[1:])
    while left:
        last = order[-1]
        order.append(min(left, key=lambda rank: (cost(last, rank), rank)))
        left.remove(order[-1])
    return order


def _improved(order: list[int], cost: _Cost, is_ring: bool) -> list[int]:
    """Reverses parts of an order while that lowers its cost: its slowest hop, then its total."""
    def rated(candidate: list[int]) -> tuple[float, float]:
        hops = [cost(a, b) for a, b in zip(candidate, candidate[1:] + candidate[: int(is_ring)])]
        return max(hops), sum(hops)

    best, is_better = rated(order), True
    while is_better:
        is_better = False
        for first in range(1, len(order) - 1):
            for end in range(first + 2, len(order) + 1):
                candidate = order[:first] + order[first:end][::-1] + order[end:]
                rating = rated(candidate)
                if rating < best:
                    order, best, is_better = candidate, rating, True
    return order
