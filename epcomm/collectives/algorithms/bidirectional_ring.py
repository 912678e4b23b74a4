"""Bidirectional ring: two rings that turn in opposite directions, each with half of the data, so both directions of a
link carry it.
"""

from __future__ import annotations

from collections.abc import Sequence

from epcomm.collectives.algorithms import ring
from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.language import Collective


def _rings(collective: Collective, order: Sequence[int] | None) -> list[tuple[int, list[int]]]:
    """(part, order) of both."""
    ranks = ring.checked_order(collective, order)
    return list(enumerate((ranks, ranks[::-1])))


def _allreduce(collective: Collective, order: Sequence[int] | None = None) -> None:
    for part, ranks in _rings(collective, order):
        ring.allreduce(ranks, part, 2)


def _allgather(collective: Collective, order: Sequence[int] | None = None) -> None:
    for part, ranks in _rings(collective, order):
        ring.allgather(ranks, part, 2)


def _reduce_scatter(collective: Collective, order: Sequence[int] | None = None) -> None:
    for part, ranks in _rings(collective, order):
        ring.reduce_scatter(ranks, part, 2)


def _broadcast(collective: Collective, order: Sequence[int] | None = None) -> None:
    for part, ranks in _rings(collective, order):
        ring.broadcast(ranks, collective.root, part)


def _reduce(collective: Collective, order: Sequence[int] | None = None) -> None:
    for part, ranks in _rings(collective, order):
        ring.reduce(ranks, collective.root, part)


BIDIRECTIONAL_RING = Algorithm(
    "bidirectional_ring",
    {
        "allreduce": Form(_allreduce, lambda num_ranks: 2 * num_ranks),
        "allgather": Form(_allgather, lambda num_ranks: 2),
        "reduce_scatter": Form(_reduce_scatter, lambda num_ranks: 2),
        "broadcast": Form(_broadcast, lambda num_ranks: 2),
        "reduce": Form(_reduce, lambda num_ranks: 2),
    },
    options=("order",),
)
