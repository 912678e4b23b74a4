"""Swing: a butterfly on a ring whose partners swing from side to side, at distances 1, 1, 3, 5, 11, ...: on a torus its
messages travel less far than those of halving and doubling. A power of two of ranks.

Source: De Sensi, Bonato, Saam and Hoefler, "Swing: short-cutting rings for higher bandwidth allreduce" (NSDI 2024).
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form, require_power_of_two
from epcomm.collectives.algorithms.butterfly import Butterfly, Partner, scatter_gather_forms
from epcomm.collectives.language import Collective


def swing_partner(rank: int, step: int, num_ranks: int) -> int:
    """Whom a rank exchanges with: to one side if it is even, to the other if it is odd."""
    distance = (1 - (-2) ** (step + 1)) // 3
    return (rank + (-distance if rank % 2 else distance)) % num_ranks


def _partner_of(num_ranks: int) -> Partner:
    return lambda rank, step: swing_partner(rank, step, num_ranks)


def _allreduce(collective: Collective) -> None:
    num_ranks = collective.num_ranks
    require_power_of_two("swing allreduce", num_ranks)
    butterfly = Butterfly(range(num_ranks), _partner_of(num_ranks))
    butterfly.reduce_scatter(lambda rank: "input", lambda block: block)
    butterfly.allgather()


SWING = Algorithm(
    "swing",
    {"allreduce": Form(_allreduce, lambda num_ranks: num_ranks), **scatter_gather_forms("swing", _partner_of)},
)
