"""All pairs: every rank sends directly to every other one.

One-shot: each rank gets everything and sums alone; one step, and the most bytes. Two-shot: each rank sums its block,
then hands it out; two steps, and as few bytes as a ring. Where all send to all, each begins with a neighbour of its
own, so that no rank gets everybody's messages at once; sums are in the order of ranks all the same.
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.paths import (
    copy_to_each,
    others_after,
    own_block,
    reduce_each_in_order,
    reduce_in_order,
)
from epcomm.collectives.language import Collective, chunk


def _one_shot_allreduce(collective: Collective) -> None:
    ranks = range(collective.num_ranks)
    reduce_each_in_order({rank: (0, 0) for rank in ranks}, ranks)


def _allgather(collective: Collective) -> None:
    ranks = range(collective.num_ranks)
    for rank in ranks:
        copy_to_each(own_block(rank), others_after(rank, ranks))


def _reduce_scatter(collective: Collective) -> None:
    ranks = range(collective.num_ranks)
    reduce_each_in_order({rank: (rank, 0) for rank in ranks}, ranks)


def _one_shot_broadcast(collective: Collective) -> None:
    copy_to_each(chunk(collective.root, "input").copy(collective.root, "output"), range(collective.num_ranks))


def _one_shot_reduce(collective: Collective) -> None:
    reduce_in_order(collective.root, range(collective.num_ranks), 0, 0)


def _two_shot_allreduce(collective: Collective) -> None:
    ranks = range(collective.num_ranks)
    totals = reduce_each_in_order({rank: (rank, rank) for rank in ranks}, ranks)
    for rank in reversed(ranks):  # results are received in the order in which they come, from the rank before first
        copy_to_each(totals[rank], others_after(rank, ranks))


def _two_shot_broadcast(collective: Collective) -> None:
    ranks, root = range(collective.num_ranks), collective.root
    chunk(root, "input", 0, len(ranks)).copy(root, "output")
    for block in [chunk(root, "output", rank).copy(rank) for rank in ranks]:
        copy_to_each(block, [rank for rank in ranks if rank != root])


def _two_shot_reduce(collective: Collective) -> None:
    ranks, root = range(collective.num_ranks), collective.root
    for block in ranks:
        if block == root:
            reduce_in_order(root, ranks, block, block)
        else:
            reduce_in_order(block, ranks, block, block, buffer="scratch").copy(root, "output")


ONE_SHOT = Algorithm(
    "one_shot",
    {
        "allreduce": Form(_one_shot_allreduce),
        "allgather": Form(_allgather),
        "reduce_scatter": Form(_reduce_scatter),
        "broadcast": Form(_one_shot_broadcast),
        "reduce": Form(_one_shot_reduce),
    },
)

TWO_SHOT = Algorithm(
    "two_shot",
    {
        "allreduce": Form(_two_shot_allreduce, lambda num_ranks: num_ranks),
        "broadcast": Form(_two_shot_broadcast, lambda num_ranks: num_ranks),
        "reduce": Form(_two_shot_reduce, lambda num_ranks: num_ranks),
    },
)
