"""Ring: every chunk travels from neighbour to neighbour. Fewest bytes per link, a step for every rank.

`order` is the order of ranks around the ring (default: ascending); `epcomm.topology.ring_order` finds a good one.
Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.paths import copy_along, reduce_along, rotated
from epcomm.collectives.language import Collective, chunk
from epcomm.errors import ConfigError


def checked_order(collective: Collective, order: Sequence[int] | None) -> list[int]:
    """The ring's ranks; ConfigError if they aren't all ranks, once each."""
    ranks = list(range(collective.num_ranks))
    if order is not None and sorted(order) != ranks:
        raise ConfigError(f"ring: order: wanted all ranks below {collective.num_ranks}, once each, got {order}")
    return ranks if order is None else list(order)


# `part` of `parts`: which of a block's chunks a ring moves, where several rings share the work.


def allreduce(order: Sequence[int], part: int = 0, parts: int = 1) -> None:
    for block in range(len(order)):
        index = block * parts + part
        path = rotated(order, (block + 1) % len(order))
        copy_along(reduce_along(path, index, index, channel=part), path[:-1], channel=part)


def allgather(order: Sequence[int], part: int = 0, parts: int = 1) -> None:
    for position, rank in enumerate(order):
        own = chunk(rank, "input", part).copy(rank, "output", rank * parts + part)
        copy_along(own, rotated(order, position)[1:], channel=part)


def reduce_scatter(order: Sequence[int], part: int = 0, parts: int = 1) -> None:
    for position, rank in enumerate(order):
        path = rotated(order, (position + 1) % len(order))
        reduce_along(path, rank * parts + part, part, channel=part)


def broadcast(order: Sequence[int], root: int, part: int = 0) -> None:
    path = rotated(order, list(order).index(root))
    copy_along(chunk(root, "input", part).copy(root, "output"), path[1:], channel=part)


def reduce(order: Sequence[int], root: int, part: int = 0) -> None:
    path = rotated(order, (list(order).index(root) + 1) % len(order))
    reduce_along(path, part, part, channel=part)


def _allreduce(collective: Collective, order: Sequence[int] | None = None) -> None:
    allreduce(checked_order(collective, order))


def _allgather(collective: Collective, order: Sequence[int] | None = None) -> None:
    allgather(checked_order(collective, order))


def _reduce_scatter(collective: Collective, order: Sequence[int] | None = None) -> None:
    reduce_scatter(checked_order(collective, order))


def _broadcast(collective: Collective, order: Sequence[int] | None = None) -> None:
    broadcast(checked_order(collective, order), collective.root)


def _reduce(collective: Collective, order: Sequence[int] | None = None) -> None:
    reduce(checked_order(collective, order), collective.root)


RING = Algorithm(
    "ring",
    {
        "allreduce": Form(_allreduce, lambda num_ranks: num_ranks),
        "allgather": Form(_allgather),
        "reduce_scatter": Form(_reduce_scatter),
        "broadcast": Form(_broadcast),
        "reduce": Form(_reduce),
    },
    options=("order",),
)
