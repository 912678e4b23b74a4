"""Halving and doubling: a reduce_scatter whose messages halve with each of log2(ranks) steps, then an allgather whose
messages double. As few bytes as a ring, in logarithmically many steps.

Where the ranks are no power of two, an allreduce first folds those left over onto their neighbours.
Source: Rabenseifner, "Optimization of collective reduction operations" (2004).
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.butterfly import (
    Butterfly,
    Folded,
    halving,
    largest_power_of_two,
    scatter_gather_forms,
)
from epcomm.collectives.language import Collective


def _allreduce(collective: Collective) -> None:
    folded = Folded(collective.num_ranks)
    folded.fold(collective.num_chunks)
    butterfly = Butterfly(folded.ranks, halving(len(folded.ranks)))
    butterfly.reduce_scatter(folded.start, lambda block: block)
    butterfly.allgather()
    folded.unfold(collective.num_chunks)


HALVING_DOUBLING = Algorithm(
    "halving_doubling",
    {"allreduce": Form(_allreduce, largest_power_of_two), **scatter_gather_forms("halving_doubling", halving)},
)
