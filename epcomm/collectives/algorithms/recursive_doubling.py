"""Recursive doubling: in each of log2(ranks) steps every rank exchanges all it has with the rank at twice the distance.
Fewest steps, each of which sends everything. (Its allgather is the second half of halving and doubling.)

Where the ranks are no power of two, those left over first hand their input to a neighbour and get the result from it.
Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.butterfly import Folded
from epcomm.collectives.language import Collective, chunk


def _allreduce(collective: Collective) -> None:
    folded = Folded(collective.num_ranks)
    folded.fold(1)
    ranks = folded.ranks
    num_steps = len(ranks).bit_length() - 1
    have = {rank: chunk(rank, folded.start(rank)) for rank in ranks}
    if num_steps <= 1:
        # the last step may not replace, in place, an input that is yet to be sent
        have = {rank: value.copy(rank, *_kept(0)) for rank, value in have.items()}
    for step in range(num_steps):
        to = ("output", 0) if step == num_steps - 1 else _kept(step + 1)
        partner = {rank: ranks[position ^ 1 << step] for position, rank in enumerate(ranks)}
        have = {rank: have[rank].reduce(have[partner[rank]], *to) for rank in ranks}
    if num_steps == 0:
        have[0].copy(0, "output", 0)
    folded.unfold(1)


def _kept(step: int) -> tuple[str, int]:
    """Where sums are while a step sends them: not where that step puts its own."""
    return "scratch", 1 + step % 2


RECURSIVE_DOUBLING = Algorithm("recursive_doubling", {"allreduce": Form(_allreduce)})
