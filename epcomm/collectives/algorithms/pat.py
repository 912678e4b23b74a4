"""PAT, parallel aggregated trees: every rank's block goes down a binomial tree of its own, shifted by its rank, the
farthest rank first; so far ranks get few blocks at a time and near ones many. Any number of ranks.

A rank's offset from the block's is a sum of powers of two; it gets the block from the rank without the lowest of them.
Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale" (arXiv 2506.20252).
"""

from __future__ import annotations

from collections.abc import Iterator

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.paths import own_block
from epcomm.collectives.language import Collective, chunk


def tree_edges(num_ranks: int) -> Iterator[tuple[int, int]]:
    """(from, to) as offsets from a tree's root: every other offset once as `to`, after it as `from`."""
    for distance in (1 << bit for bit in reversed(range((num_ranks - 1).bit_length()))):
        for offset in range(0, num_ranks - distance, 2 * distance):
            yield offset, offset + distance


def _copy_down(root: int, num_ranks: int, index: int) -> None:
    """Copies chunk `index` of the root's output to all others'."""
    for giver, taker in tree_edges(num_ranks):
        chunk((root + giver) % num_ranks, "output", index).copy((root + taker) % num_ranks)


def _reduce_up(root: int, num_ranks: int, index: int, to: int) -> None:
    """Sums chunk `index` of all inputs into the root's output."""
    sums = {offset: chunk((root + offset) % num_ranks, "input", index) for offset in range(num_ranks)}
    edges = list(tree_edges(num_ranks))
    for taker, giver in reversed(edges):
        is_last = (taker, giver) == edges[0]
        sums[taker] = sums[taker].reduce(sums[giver], *(("output", to) if is_last else ("scratch", index)))
    if not edges:
        sums[0].copy(root, "output", to)


def _allreduce(collective: Collective) -> None:
    for block in range(collective.num_ranks):
        _reduce_up(block, collective.num_ranks, block, block)
        _copy_down(block, collective.num_ranks, block)


def _reduce_scatter(collective: Collective) -> None:
    for block in range(collective.num_ranks):
        _reduce_up(block, collective.num_ranks, block, 0)


def _allgather(collective: Collective) -> None:
    for rank in range(collective.num_ranks):
        own_block(rank)
        _copy_down(rank, collective.num_ranks, rank)


def _broadcast(collective: Collective) -> None:
    chunk(collective.root, "input").copy(collective.root, "output")
    _copy_down(collective.root, collective.num_ranks, 0)


def _reduce(collective: Collective) -> None:
    _reduce_up(collective.root, collective.num_ranks, 0, 0)


PAT = Algorithm(
    "pat",
    {
        "allreduce": Form(_allreduce, lambda num_ranks: num_ranks),
        "reduce_scatter": Form(_reduce_scatter),
        "allgather": Form(_allgather),
        "broadcast": Form(_broadcast),
        "reduce": Form(_reduce),
    },
)
