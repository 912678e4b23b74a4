"""What no plan beats: bytes that have to cross between groups of ranks, over what their links carry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epcomm.collectives.plan import Collective
from epcomm.errors import ConfigError
from epcomm.simulation.costs import BYTES_PER_MICROSECOND
from epcomm.simulation.network import NO_LINK, Network

#: More pairs of ranks are not looked at.
_MOST_PAIRS = 1_000_000


@dataclass(frozen=True)
class Crossing:
    """Units of a collective that have to leave each of its groups, and enter it, float64 [groups]; and that leave one
    in all, each as often as it has to.
    """

    leaves: np.ndarray
    enters: np.ndarray
    total: float


def crossing(collective: Collective, groups: Sequence[Sequence[int]]) -> Crossing:
    """What has to cross between groups that divide all ranks, if ranks alone add and copy.

    A block that a group needs enters it once; a sum that it contributes to leaves it once, added up. Of k groups an
    allreduce brings each element together from all and hands it out to all: 2 (k - 1) times it leaves one (Patarasuk
    and Yuan, 2009).
    """
    sizes = np.array([len(group) for group in groups], float)
    is_root = np.array([collective.root in group for group in groups], float)
    others, once = collective.num_ranks - sizes, np.ones(len(groups))
    leaves, enters = {
        "allreduce": (once, once),
        "allgather": (sizes, others),
        "reduce_scatter": (others, sizes),
        "alltoall": (sizes * others, sizes * others),
        "broadcast": (is_root, 1 - is_root),
        "reduce": (1 - is_root, is_root),
    }[collective.kind]
    if len(groups) == 1:
        return Crossing(np.zeros(1), np.zeros(1), 0.0)
    total = 2.0 * (len(groups) - 1) if collective.kind == "allreduce" else max(leaves.sum(), enters.sum())
    return Crossing(leaves, enters, float(total))


def halves(num_ranks: int) -> list[list[list[int]]]:
    """All ways to divide ranks in two groups, 2 ** (num_ranks - 1) - 1."""
    ranks = range(num_ranks)
    return [
        [[rank for rank in ranks if bits >> rank & 1 == side] for side in (0, 1)] for bits in range(2, 2**num_ranks, 2)
    ]


def cut_bound(
    network: Network, collective: Collective, num_bytes: float, groupings: Sequence[Sequence[Sequence[int]]],
    *, are_alike: bool = False,
) -> float:  # fmt: skip
    """µs below which no plan of the collective is, with `num_bytes` in its unit, whatever its latencies.

    `groupings` are ways to divide all ranks: singly, by node, in `halves`. What a group can send, or take in, is what
    the narrowest of these sets of links can carry: of all ways that lead out of it, or into it, the first, second ...
    links, or each one's narrowest, or the one that most ways share for its width. ConfigError if no way leads there.

    `are_alike`: of each grouping only the first group is looked at, than which no other one has more links.
    """
    bound = 0.0
    for groups in groupings:
        if len(groups) > 1:
            shown = groups[:1] if are_alike else groups
            rates = (np.array([_rate(network, group, way) for group in shown]) for way in (1, -1))
            out, into = (np.broadcast_to(each, len(groups)) for each in rates)
            has_to = crossing(collective, groups)
            shares = (has_to.leaves / out, has_to.enters / into, has_to.total / out.sum(), has_to.total / into.sum())
            bound = max(bound, max(float(share.max()) for share in shares) * num_bytes / BYTES_PER_MICROSECOND)
    return bound


def _rate(network: Network, group: Sequence[int], way: int) -> float:
    """GB/s from a group to all other ranks together, or with `way` -1 from those to it."""
    inside = np.array(group)
    outside = np.setdiff1d(np.arange(network.num_ranks), inside)
    if len(inside) * len(outside) > _MOST_PAIRS:
        raise ConfigError(f"bound: {len(inside)} ranks and {len(outside)} others have too many pairs to look at")
    src, dst = (np.repeat(inside, len(outside)), np.tile(outside, len(inside)))[::way]
    joined = network.joins(src, dst)
    if not joined.any():
        raise ConfigError(f"bound: no way leads between ranks {list(group)} and the others")
    paths = network.routes(src[joined], dst[joined]).paths
    widths = np.where(paths != NO_LINK, network.bandwidth[paths], np.inf)
    last = (paths != NO_LINK).sum(axis=1) - 1
    num_ways = np.bincount(paths[paths != NO_LINK], minlength=len(network.bandwidth))
    cuts = [widths.argmin(axis=1), (num_ways[paths] / widths).argmax(axis=1)]
    cuts += [np.minimum(last, hop) for hop in range(paths.shape[1])]
    links = (np.unique(paths[np.arange(len(paths)), hops]) for hops in cuts)
    return min(float(network.bandwidth[cut].sum()) for cut in links)
