"""What the rounds of algorithms are made of: turns of a ring, chains, butterflies, trees, all pairs; and mirrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from epcomm.collectives.algorithms.double_binary_tree import Tree
from epcomm.errors import ConfigError
from epcomm.simulation.rounds import Round

#: All pairs of more ranks than that are not priced: their messages are too many to look at.
MOST_PAIRED = 300
#: Nor are chains of more ranks, a round for each.
MOST_CHAINED = 1024


def turns(order: np.ndarray, number: int, share: float, *, is_sum: bool = False) -> list[Round]:
    """Each rank of a ring sends to the next, `number` times; `order` [ranks], or of several rings [places, rings]."""
    if number < 1 or len(order) < 2:
        return []
    src, dst = order.ravel(), np.roll(order, -1, axis=0).ravel()
    return [Round(src, dst, share, forwards=True, is_sum=is_sum, repeat=number)]


def chain(path: np.ndarray, share: float) -> list[Round]:
    """From the first rank of a path to the next, and on to the last."""
    if len(path) > MOST_CHAINED:
        raise ConfigError(f"chains are priced among up to {MOST_CHAINED} ranks, got {len(path)}")
    return [Round(path[at : at + 1], path[at + 1 : at + 2], share, forwards=True) for at in range(len(path) - 1)]


def all_pairs(groups: np.ndarray, share: float, parts: int = 1) -> list[Round]:
    """Everybody to everybody else of the group, groups [number, size]."""
    size = groups.shape[1]
    _check_pairs(size)
    if size == 1:
        return []
    shifted = [np.roll(groups, -distance, axis=1).ravel() for distance in range(1, size)]
    src = np.tile(groups.ravel(), size - 1)
    return [Round(src, np.concatenate(shifted), share, parts)]


def _check_pairs(size: int) -> None:
    if size > MOST_PAIRED:
        raise ConfigError(f"all pairs are priced among up to {MOST_PAIRED} ranks, got {size}")


def to_each(givers: np.ndarray, groups: np.ndarray, share: float) -> list[Round]:
    """From a giver to everybody else of its group, givers [number], groups [number, size]."""
    _check_pairs(min(groups.shape))
    src = np.repeat(givers, groups.shape[1])
    dst = groups.ravel()
    is_other = src != dst
    return [Round(src[is_other], dst[is_other], share)] if is_other.any() else []


def butterfly(ranks: np.ndarray, partner: Callable[[int], np.ndarray]) -> list[Round]:
    """The reduce_scatter of a butterfly among a power of two of ranks, in shares of all of their blocks;
    `partner(step)` are positions.
    """
    steps = len(ranks).bit_length() - 1
    return [Round(ranks, ranks[partner(step)], 0.5 ** (step + 1), is_sum=step > 0) for step in range(steps)]


def levels(tree: Tree) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(children, their parents) level by level from the tree's root down."""
    level = [tree]
    while level:
        pairs = [(child.rank, parent.rank) for parent in level for child in parent.children]
        if pairs:
            children, parents = np.array(pairs).T
            yield children, parents
        level = [child for parent in level for child in parent.children]


def mirrored(rounds: Sequence[Round]) -> list[Round]:
    """The copies that mirror sums: what came last goes back first."""
    return [replace(each, src=each.dst, dst=each.src, is_sum=False) for each in reversed(rounds)]


def summed(rounds: Sequence[Round]) -> list[Round]:
    """The same as sums: what is sent first is an input, and a partial sum from then on."""
    return [replace(each, is_sum=number > 0) for number, each in enumerate(rounds)]


def phases(*parts: Sequence[Round]) -> list[Round]:
    """One after the other, each by programs of its own, so that a phase's first pieces overlap with the last ones of
    the phase before.
    """
    return [replace(each, anew=number == 0) for part in parts for number, each in enumerate(part)]


def scaled(rounds: Sequence[Round], factor: float) -> list[Round]:
    """The same with so many times the bytes."""
    return [replace(each, share=each.share * factor) for each in rounds]


def side_by_side(one: Sequence[Round], other: Sequence[Round]) -> list[Round]:
    """Two algorithms that run at once, each with half of the data in programs of its own; as many rounds in both."""
    return [
        replace(
            a, src=np.concatenate([a.src, b.src]), dst=np.concatenate([a.dst, b.dst]), share=a.share / 2,
            lane=np.repeat([0, 1], [len(a.src), len(b.src)]),
        )
        for a, b in zip(one, other, strict=True)
    ]  # fmt: skip
