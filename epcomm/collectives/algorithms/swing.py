"""Swing: a butterfly on a ring whose partners swing from side to side, at distances 1, 1, 3, 5, 11, ...: on a torus its
messages travel less far than those of halving and doubling. A power of two of ranks.

Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth allreduce" (NSDI 2024).
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form, require_power_of_two
from epcomm.collectives.algorithms.butterfly import Butterfly
from epcomm.collectives.algorithms.paths import own_block
from epcomm.collectives.language import Collective


def swing_partner(rank: int, step: int, num_ranks: int) -> int:
    """Whom a rank exchanges with: to one side if it is even, to the other if it is odd."""
    distance = (1 - (-2) ** (step + 1)) // 3
    return (rank + (-distance if rank % 2 else distance)) % num_ranks


def _butterfly(collective: Collective) -> Butterfly:
    num_ranks = collective.num_ranks
    require_power_of_two(f"swing {collective.kind}", num_ranks)
    return Butterfly(range(num_ranks), lambda rank, step: swing_partner(rank, step, num_ranks))


def _allreduce(collective: Collective) -> None:
    butterfly = _butterfly(collective)
    butterfly.reduce_scatter(lambda rank: "input", lambda block: block)
    butterfly.allgather()


def _reduce_scatter(collective: Collective) -> None:
    _butterfly(collective).reduce_scatter(lambda rank: "input", lambda block: 0)


def _allgather(collective: Collective) -> None:
    butterfly = _butterfly(collective)
    for rank in butterfly.ranks:
        own_block(rank)
    butterfly.allgather()


SWING = Algorithm(
    "swing",
    {
        "allreduce": Form(_allreduce, lambda num_ranks: num_ranks),
        "reduce_scatter": Form(_reduce_scatter),
        "allgather": Form(_allgather),
    },
)
