"""Butterflies: in each of log2(ranks) steps every rank exchanges with one partner. What differs is who that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from epcomm.collectives.algorithms.algorithm import Form, require_power_of_two
from epcomm.collectives.algorithms.paths import own_block, runs
from epcomm.collectives.language import Collective, chunk

#: The partner of a position in a step, which has it as its partner in that step. Positions count from 0.
Partner = Callable[[int, int], int]


def halving(num_ranks: int) -> Partner:
    """Partners at half of the ranks' distance first, so that the blocks a rank is left with lie side by side."""
    num_steps = num_ranks.bit_length() - 1
    return lambda position, step: position ^ 1 << (num_steps - 1 - step)


class Butterfly:
    """A power of two of ranks that exchange blocks, one for each position among them.

    When steps are taken in order, each rank is left with sums of fewer and fewer blocks, at last of its own; when they
    are taken in reverse, it gathers more and more.
    """

    def __init__(self, ranks: Sequence[int], partner: Partner):
        self.ranks, self.partner = ranks, partner
        self.num_steps = len(ranks).bit_length() - 1

        @cache
        def blocks(position: int, step: int) -> frozenset[int]:
            if step == self.num_steps:
                return frozenset([position])
            return blocks(position, step + 1) | blocks(partner(position, step), step + 1)

        #: of which blocks a position has sums before a step
        self._blocks = blocks

    def reduce_scatter(self, start: Callable[[int], str], to: Callable[[int], int]) -> None:
        """Sums each block onto the rank of its position.

        A block is a chunk at its number: in the buffer `start(rank)` at first, at last in the output at `to(block)`.
        """
        buffers = {rank: start(rank) for rank in self.ranks}
        for step in range(self.num_steps):
            is_last = step == self.num_steps - 1
            for position, rank in enumerate(self.ranks):
                sender = self.ranks[self.partner(position, step)]
                for block, count in runs(self._blocks(position, step + 1)):
                    own, other = (chunk(r, buffers[r], block, count) for r in (rank, sender))
                    own.reduce(other, *(("output", to(block)) if is_last else ("scratch", block)))
            buffers = dict.fromkeys(self.ranks, "scratch")
        if self.num_steps == 0:
            chunk(self.ranks[0], buffers[self.ranks[0]]).copy(self.ranks[0], "output", 0)

    def allgather(self) -> None:
        """Copies each block from its rank's output to all others', where it is the chunk at its number."""
        for step in reversed(range(self.num_steps)):
            for position, rank in enumerate(self.ranks):
                partner = self.partner(position, step)
                for block, count in runs(self._blocks(partner, step + 1)):
                    chunk(self.ranks[partner], "output", block, count).copy(rank)


def scatter_gather_forms(name: str, partner_of: Callable[[int], Partner]) -> dict[str, Form]:
    """reduce_scatter and allgather of a power of two of ranks; `partner_of(num_ranks)` is the butterfly's."""

    def butterfly(collective: Collective) -> Butterfly:
        num_ranks = collective.num_ranks
        require_power_of_two(f"{name} {collective.kind}", num_ranks)
        return Butterfly(range(num_ranks), partner_of(num_ranks))

    def reduce_scatter(collective: Collective) -> None:
        butterfly(collective).reduce_scatter(lambda rank: "input", lambda block: 0)

    def allgather(collective: Collective) -> None:
        exchange = butterfly(collective)
        for rank in exchange.ranks:
            own_block(rank)
        exchange.allgather()

    return {"reduce_scatter": Form(reduce_scatter), "allgather": Form(allgather)}


class Folded:
    """The largest power of two of the ranks, some of which act for one that is left over.

    `ranks` are those who act, `partner` maps some of them to whom they act for.
    """

    def __init__(self, num_ranks: int):
        size = largest_power_of_two(num_ranks)
        self.partner = {2 * i: 2 * i + 1 for i in range(num_ranks - size)}
        acted_for = set(self.partner.values())
        self.ranks = [rank for rank in range(num_ranks) if rank not in acted_for]

    def start(self, rank: int) -> str:
        """The buffer that has what a rank starts with: its input, or the sum with that of whom it acts for."""
        return "scratch" if rank in self.partner else "input"

    def fold(self, count: int) -> None:
        """Sums inputs of `count` chunks onto those who act, into scratch."""
        for rank, other in self.partner.items():
            chunk(rank, "input", 0, count).reduce(chunk(other, "input", 0, count), "scratch", 0)

    def unfold(self, count: int) -> None:
        """Copies outputs of `count` chunks to those who were acted for."""
        for rank, other in self.partner.items():
            chunk(rank, "output", 0, count).copy(other)


def largest_power_of_two(number: int) -> int:
    """The largest one that is no larger."""
    return 1 << (number.bit_length() - 1)
