"""What algorithms are made of: sums and copies along paths of ranks and between all of a group; runs of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from epcomm.collectives.language import Chunk, chunk


def reduce_along(path: Sequence[int], index: int, to: int, *, source: str = "input", channel: int = 0) -> Chunk:
    """Sums chunk `index` of a buffer of the ranks of a path into the last one's output at `to`."""
    total = chunk(path[0], source, index)
    for rank in path[1:-1]:
        # a partial sum is on its way to the next rank: the compiler drops the store
        total = chunk(rank, source, index).reduce(total, "scratch", index, channel=channel)
    if len(path) == 1:
        return total.copy(path[0], "output", to)
    return chunk(path[-1], source, index).reduce(total, "output", to, channel=channel)


def copy_along(value: Chunk, path: Iterable[int], *, channel: int = 0) -> None:
    """Copies a chunk from rank to rank, to the same place on each."""
    for rank in path:
        value = value.copy(rank, channel=channel)


def copy_to_each(value: Chunk, ranks: Iterable[int], *, channel: int = 0) -> None:
    """Copies a chunk to the same place on each of the ranks."""
    for rank in ranks:
        value.copy(rank, channel=channel)


def reduce_in_order(owner: int, group: Sequence[int], index: int, to: int, *, buffer: str = "output") -> Chunk:
    """Sums chunk `index` of the inputs of a group on `owner`, one of them, in its order; each sends directly."""
    return reduce_each_in_order({owner: (index, to)}, group, buffer=buffer)[owner]


def reduce_each_in_order(
    sums: Mapping[int, tuple[int, int]], group: Sequence[int], *, buffer: str = "output"
) -> dict[int, Chunk]:
    """Sums on several owners, `sums[owner]` being (index, to). Each rank sends to the owner before it first, then to
    the one before that: so no two send to one owner at a time, and addends come about in the order of the sum.
    """
    totals: dict[int, Chunk] = {}
    for rank in group:
        place = buffer if rank == group[-1] else "scratch"
        itself = [rank] if rank in sums else []  # last: in place its sum may replace its input
        for owner in [*reversed(others_after(rank, sums)), *itself]:
            index, to = sums[owner]
            own, at = chunk(rank, "input", index), index if place == "scratch" else to
            total = totals.get(owner)
            if total is None:
                totals[owner] = own if rank == owner and rank != group[-1] else own.copy(owner, place, at)
            elif rank == owner:  # where the sum replaces this input in place, it has to be the first operand
                totals[owner] = own.reduce(total, place, at)
            else:
                totals[owner] = total.reduce(own, place, at)
    return totals


def others_after(rank: int, ranks: Iterable[int]) -> list[int]:
    """The other ranks around a ring, from the one after this rank on."""
    return sorted((other for other in ranks if other != rank), key=lambda other: (other < rank, other))


def rotated(order: Sequence[int], first: int) -> list[int]:
    """A ring of ranks from position `first` on."""
    return [*order[first:], *order[:first]]


def runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of the runs of neighbours in a set of numbers, ascending."""
    wanted = set(numbers)
    for first in sorted(number for number in wanted if number - 1 not in wanted):
        count = 1
        while first + count in wanted:
            count += 1
        yield first, count


def own_block(rank: int) -> Chunk:
    """Copies an allgather's input to where it belongs in the rank's own output."""
    return chunk(rank, "input").copy(rank, "output", rank)
