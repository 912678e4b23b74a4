"""Double binary tree: two trees, each with half of the data. A rank that has children in one is a leaf of the other, so
all send and receive about the same. Steps grow with the logarithm of the ranks.

A rooted collective's trees span the other ranks, and the root is the parent of both trees' roots.
Source: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from epcomm.collectives.algorithms.algorithm import Algorithm, Form
from epcomm.collectives.language import Chunk, Collective, chunk


@dataclass(frozen=True)
class Tree:
    """A rank and the trees under it."""

    rank: int
    children: tuple[Tree, ...] = ()


def in_order_tree(ranks: Sequence[int]) -> Tree:
    """A tree of logarithmic height in whose order, left to right, the ranks are. Those at even positions are its
    leaves.
    """
    middle = 1 << (len(ranks).bit_length() - 1)  # counted from 1: even, unless there is one rank only
    parts = (ranks[: middle - 1], ranks[middle:])
    return Tree(ranks[middle - 1], tuple(in_order_tree(part) for part in parts if part))


def two_trees(ranks: Sequence[int]) -> tuple[Tree, Tree]:
    """Trees of the same ranks, none of which has children in both: the second is shifted, or mirrored, by one place."""
    other = [*ranks[-1:], *ranks[:-1]] if len(ranks) % 2 else list(ranks[::-1])
    return in_order_tree(ranks), in_order_tree(other)


def _reduce_up(tree: Tree, index: int, buffer: str) -> Chunk:
    """Sums a chunk of the tree's inputs into the buffer of its root; those under it use theirs on the way."""
    total = chunk(tree.rank, "input", index)
    for child in tree.children:
        total = total.reduce(_reduce_up(child, index, buffer), buffer, channel=index)
    return total


def _copy_down(half: Chunk, tree: Tree, channel: int) -> None:
    """Copies a chunk that the tree's root has to all under it."""
    for child in tree.children:
        _copy_down(half.copy(child.rank, channel=channel), child, channel)


def _allreduce(collective: Collective) -> None:
    for half, tree in enumerate(two_trees(range(collective.num_ranks))):
        _copy_down(_reduce_up(tree, half, "output").copy(tree.rank, "output"), tree, half)


def _rooted(collective: Collective) -> list[Tree]:
    """The two trees under the root of a collective."""
    others = [rank for rank in range(collective.num_ranks) if rank != collective.root]
    trees = two_trees(others) if others else ()
    return [Tree(collective.root, (tree,)) for tree in trees] or [Tree(collective.root)] * 2


def _broadcast(collective: Collective) -> None:
    for half, tree in enumerate(_rooted(collective)):
        _copy_down(chunk(tree.rank, "input", half).copy(tree.rank, "output"), tree, half)


def _reduce(collective: Collective) -> None:
    for half, tree in enumerate(_rooted(collective)):
        total = chunk(tree.rank, "input", half)
        parts = [_reduce_up(child, half, "scratch") for child in tree.children]
        if not parts:
            total.copy(tree.rank, "output")
        for part in parts:
            total.reduce(part, "output", channel=half)


DOUBLE_BINARY_TREE = Algorithm(
    "double_binary_tree",
    {
        "allreduce": Form(_allreduce, lambda num_ranks: 2),
        "broadcast": Form(_broadcast, lambda num_ranks: 2),
        "reduce": Form(_reduce, lambda num_ranks: 2),
    },
)
