"""What no plan beats: bytes that have to cross between groups of ranks, over what their links carry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epcomm.errors import ConfigError
from epcomm.simulation.costs import BYTES_PER_MICROSECOND
from epcomm.simulation.network import NO_LINK, Network

#: More pairs of ranks are not looked at.
_MOST_PAIRS = 100_000


def allreduce_bound(network: Network, num_bytes: float, groupings: Sequence[Sequence[Sequence[int]]]) -> float:
    """µs below which no allreduce of `num_bytes` per rank is, whatever its latencies, if ranks alone add.

    Of k groups of ranks, each element has to be brought together from k groups and handed out to k: 2 (k - 1) times it
    leaves a group (Patarasuk and Yuan, 2009). `groupings` are ways to divide all ranks: singly, by node. What a group
    can send is what the narrowest of these sets of links can carry: of all ways that lead out of it the first, second
    ... links, or each one's narrowest.
    """
    bound = 0.0
    for groups in groupings:
        if len(groups) > 1:
            rate = sum(_outgoing(network, group) for group in groups) * BYTES_PER_MICROSECOND
            bound = max(bound, 2 * (len(groups) - 1) * num_bytes / rate)
    return bound


def _outgoing(network: Network, group: Sequence[int]) -> float:
    """GB/s that a group can send to all other ranks together."""
    inside = np.array(group)
    outside = np.setdiff1d(np.arange(network.num_ranks), inside)
    if len(inside) * len(outside) > _MOST_PAIRS:
        raise ConfigError(f"bound: {len(inside)} ranks and {len(outside)} others have too many pairs to look at")
    paths = network.routes(np.repeat(inside, len(outside)), np.tile(outside, len(inside))).paths
    widths = np.where(paths != NO_LINK, network.bandwidth[paths], np.inf)
    last = (paths != NO_LINK).sum(axis=1) - 1
    cuts = [widths.argmin(axis=1), *(np.minimum(last, hop) for hop in range(paths.shape[1]))]
    links = (np.unique(paths[np.arange(len(paths)), hops]) for hops in cuts)
    return min(float(network.bandwidth[cut].sum()) for cut in links)
