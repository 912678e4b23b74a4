"""Hierarchical: inside of nodes by all pairs, between nodes by rings, one for each rank of a node (a rail each).

An allreduce is a reduce_scatter in each node, an allreduce along each rail, an allgather in each node: a node's network
carries each byte about twice, shared among its rails. Each phase has channels of its own, so that they overlap.
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.nodes import RAIL, Nodes
from epcomm.collectives.algorithms.paths import (
    copy_along,
    copy_to_each,
    own_block,
    reduce_along,
    reduce_in_order,
    rotated,
)
from epcomm.collectives.language import Collective, chunk

#: channel of the phase out of the rails
SPREAD = 2


def _allreduce(collective: Collective, ranks_per_node: int | None = None) -> None:
    nodes = Nodes.of(collective, ranks_per_node)
    for index in range(collective.num_chunks):
        local, turn = divmod(index, nodes.number)
        rail = nodes.rail(local)
        for node, rank in enumerate(rail):
            reduce_in_order(rank, nodes.node(node), index, index)
        path = rotated(rail, (turn + 1) % len(rail))
        copy_along(reduce_along(path, index, index, source="output", channel=RAIL), path[:-1], channel=RAIL)
        for node, rank in enumerate(rail):
            copy_to_each(chunk(rank, "output", index), nodes.node(node), channel=SPREAD)


def _reduce_scatter(collective: Collective, ranks_per_node: int | None = None) -> None:
    nodes = Nodes.of(collective, ranks_per_node)
    for block in range(collective.num_ranks):
        owner_node, local = divmod(block, nodes.ranks_per_node)
        rail = nodes.rail(local)
        for node, rank in enumerate(rail):
            reduce_in_order(rank, nodes.node(node), block, block, buffer="scratch")
        reduce_along(rotated(rail, (owner_node + 1) % len(rail)), block, 0, source="scratch", channel=RAIL)


def _allgather(collective: Collective, ranks_per_node: int | None = None) -> None:
    nodes = Nodes.of(collective, ranks_per_node)
    for rank in range(collective.num_ranks):
        node, local = divmod(rank, nodes.ranks_per_node)
        copy_along(own_block(rank), rotated(nodes.rail(local), node)[1:], channel=RAIL)
        for holder_node, holder in enumerate(nodes.rail(local)):
            copy_to_each(chunk(holder, "output", rank), nodes.node(holder_node), channel=SPREAD)


def _broadcast(collective: Collective, ranks_per_node: int | None = None) -> None:
    nodes, root = Nodes.of(collective, ranks_per_node), collective.root
    root_node, local = divmod(root, nodes.ranks_per_node)
    copy_along(chunk(root, "input").copy(root, "output"), rotated(nodes.rail(local), root_node)[1:], channel=RAIL)
    for node, holder in enumerate(nodes.rail(local)):
        copy_to_each(chunk(holder, "output"), nodes.node(node), channel=SPREAD)


def _reduce(collective: Collective, ranks_per_node: int | None = None) -> None:
    nodes, root = Nodes.of(collective, ranks_per_node), collective.root
    root_node, local = divmod(root, nodes.ranks_per_node)
    rail = nodes.rail(local)
    for node, rank in enumerate(rail):
        reduce_in_order(rank, nodes.node(node), 0, 0, buffer="scratch")
    reduce_along(rotated(rail, (root_node + 1) % len(rail)), 0, 0, source="scratch", channel=RAIL)


HIERARCHICAL = Algorithm(
    "hierarchical",
    {
        "allreduce": Form(_allreduce, lambda num_ranks: num_ranks),
        "reduce_scatter": Form(_reduce_scatter),
        "allgather": Form(_allgather),
        "broadcast": Form(_broadcast),
        "reduce": Form(_reduce),
    },
    options=("ranks_per_node",),
)
