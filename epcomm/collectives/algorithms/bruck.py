"""Bruck: logarithmically many steps for any number of ranks. An allgather doubles what each rank has; an alltoall moves
each block by the powers of two that its way is the sum of, so blocks travel several times.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in multiport
message-passing systems" (1997).
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.paths import own_block, runs
from epcomm.collectives.language import Collective, chunk


def _powers(num_ranks: int) -> list[int]:
    return [1 << bit for bit in range((num_ranks - 1).bit_length())]


def _allgather(collective: Collective) -> None:
    num_ranks = collective.num_ranks
    for rank in range(num_ranks):
        own_block(rank)
    for distance in _powers(num_ranks):
        # each rank has the blocks of `distance` ranks from its own on, and gets those that follow
        count = min(distance, num_ranks - distance)
        for rank in range(num_ranks):
            giver = (rank + distance) % num_ranks
            for first, length in runs((giver + offset) % num_ranks for offset in range(count)):
                chunk(giver, "output", first, length).copy(rank)


def _alltoall(collective: Collective) -> None:
    num_ranks = collective.num_ranks
    num_moves = [0] * num_ranks  # of the blocks whose way is the index

    def place(rank: int, way: int) -> tuple[str, int]:
        """Where a rank has a block with this way to go in all. Each move lands beside where the one before began."""
        if num_moves[way] == 0:
            return "input", (rank + way) % num_ranks
        return "scratch", way + num_ranks * (num_moves[way] % 2)

    for distance in _powers(num_ranks):
        ways = [way for way in range(num_ranks) if way & distance]
        for rank in range(num_ranks):
            for first, count in _contiguous(ways, [place(rank, way) for way in ways]):
                landing = first + num_ranks * ((num_moves[first] + 1) % 2)
                moved = chunk(rank, *place(rank, first), count)
                moved.copy((rank + distance) % num_ranks, "scratch", landing)
        for way in ways:
            num_moves[way] += 1
    for rank in range(num_ranks):
        for way in range(num_ranks):
            chunk(rank, *place(rank, way)).copy(rank, "output", (rank - way) % num_ranks)


def _contiguous(ways: list[int], places: list[tuple[str, int]]) -> list[tuple[int, int]]:
    """(first, count) of runs of ways whose places follow one another, too."""
    found: list[tuple[int, int]] = []
    for way, (buffer, index), before in zip(ways, places, [None, *places]):
        if found and before == (buffer, index - 1) and found[-1][0] + found[-1][1] == way:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((way, 1))
    return found


BRUCK = Algorithm(
    "bruck", {"allgather": Form(_allgather), "alltoall": Form(_alltoall)}
)
