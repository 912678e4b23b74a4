"""Alltoall: directly, or in two levels, so that a network between nodes carries one message per pair of nodes and rail.

In two levels, a rank first gives its blocks for local rank l of every node to local rank l of its own node; that one
then sends to its counterpart in each node what all ranks of this node have for it. Every block crosses nodes at most
once. Each level has channels of its own, so that they overlap.
"""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.algorithms.nodes import RAIL, Nodes
from epcomm.collectives.language import Collective, chunk


def _direct(collective: Collective) -> None:
    ranks = range(collective.num_ranks)
    in_pairs = not len(ranks) & (len(ranks) - 1)
    for distance in ranks:  # each step's messages have receivers of their own
        for rank in ranks:
            # in pairs, ranks of a node of a power of two leave it in the same steps, to one rank each
            to = rank ^ distance if in_pairs else (rank + distance) % len(ranks)
            chunk(rank, "input", to).copy(to, "output", rank)


def _two_level(collective: Collective, ranks_per_node: int | None = None) -> None:
    nodes = Nodes.of(collective, ranks_per_node)
    size = nodes.ranks_per_node
    for rank in range(collective.num_ranks):
        node, local = divmod(rank, size)
        for to in range(collective.num_ranks):
            to_node, to_local = divmod(to, size)
            place = ("output", rank) if to_node == node else ("scratch", to_node * size + local)
            chunk(rank, "input", to).copy(nodes.rank(node, to_local), *place)
    for rank in range(collective.num_ranks):
        node, local = divmod(rank, size)
        for to_node in range(nodes.number):
            if to_node != node:
                blocks = chunk(rank, "scratch", to_node * size, size)
                blocks.copy(nodes.rank(to_node, local), "output", node * size, channel=RAIL)


DIRECT = Algorithm("direct", {"alltoall": Form(_direct, in_place=False)})
TWO_LEVEL = Algorithm("two_level", {"alltoall": Form(_two_level, in_place=False)}, options=("ranks_per_node",))
