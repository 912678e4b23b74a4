"""What messages go through: directed links, and the ones on the way from one rank to another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from typing import Protocol

import numpy as np

from epcomm.errors import ConfigError
from epcomm.simulation.costs import Costs
from epcomm.topology import Link, Topology

#: In `Network.paths`: fewer links than the longest way has.
NO_LINK = -1


@dataclass(frozen=True)
class Routes:
    """Ways of messages: their links in order, int64 [messages, most links], filled with NO_LINK; the latency of those,
    µs, float64 [messages]; which of `kinds`, sets of kinds of links, each has, int64 [messages].
    """

    paths: np.ndarray
    latency: np.ndarray
    kinds: tuple[frozenset[str], ...]
    kind_idx: np.ndarray

    def latencies(self, costs: Costs) -> np.ndarray:
        """µs from a message's last byte leaving until it is seen, float64 [messages]."""
        least = np.array([costs.least_latency(kinds) for kinds in self.kinds])
        return np.maximum(self.latency, least[self.kind_idx]) if len(self.kind_idx) else self.latency


class Network(Protocol):
    """Links of a direction each, numbered; `bandwidth` in GB/s, float64 [num_links]."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def bandwidth(self) -> np.ndarray: ...

    def routes(self, src: np.ndarray, dst: np.ndarray) -> Routes:
        """The ways from each of `src` to its `dst`, ranks; ConfigError if there is none."""

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """(from, to) of pairs of ranks, int64 each: all that have a way, or one for each way that pairs can differ."""

    def joins(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Whether there is a way from each of `src` to its `dst`, bool [messages]."""

    def link_name(self, link: int) -> str:
        """A link's ends, for people."""


def meeting(network: Network, costs: Costs) -> float:
    """µs until all ranks have entered an operation, should all do so at once: each raises a word at every other, and
    waits for the one that comes from farthest. Pairs that no links join don't count.
    """
    return float(network.routes(*network.joined()).latencies(costs).max(initial=0.0))


class RoutedNetwork:
    """The links of a topology, one for each direction; messages take `Topology.route`. The equal links of a `Link` are
    one.
    """

    def __init__(self, topology: Topology):
        if topology.unit != "GB/s":
            raise ConfigError(f"topology {topology.name}: bandwidths are {topology.unit}; times need GB/s")
        self.topology, self.num_ranks = topology, topology.num_ranks
        widest: dict[tuple[str, str], Link] = {}  # of several links between two devices, the one that routes take
        for link in topology.links:
            for ends in ((link.a, link.b), (link.b, link.a)):
                if ends not in widest or link.total > widest[ends].total:
                    widest[ends] = link
        self._kinds = {ends: link.kind for ends, link in widest.items()}
        self.ends = list(widest)
        self.bandwidth = np.array([link.total for link in widest.values()])
        self._number = {ends: number for number, ends in enumerate(self.ends)}
        self._found: dict[tuple[int, int], tuple[tuple[int, ...], float, frozenset[str]]] = {}

    def routes(self, src: np.ndarray, dst: np.ndarray) -> Routes:
        pairs, inverse = np.unique(src * self.num_ranks + dst, return_inverse=True)
        ways = [self._way(*divmod(pair, self.num_ranks)) for pair in pairs.tolist()]
        paths = np.full((len(ways), max((len(links) for links, _, _ in ways), default=0)), NO_LINK)
        for row, (links, _, _) in zip(paths, ways):
            row[: len(links)] = links
        kinds = tuple({kinds: None for _, _, kinds in ways})
        kind_idx = np.array([kinds.index(each) for _, _, each in ways], np.int64)
        latency = np.array([latency for _, latency, _ in ways])
        return Routes(paths[inverse], latency[inverse], kinds, kind_idx[inverse])

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = np.array([pair for pair in permutations(range(self.num_ranks), 2) if self._is_joined(*pair)], np.int64)
        src, dst = pairs.reshape(-1, 2).T
        return src, dst

    def joins(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        return np.array([self._is_joined(a, b) for a, b in zip(src.tolist(), dst.tolist())], bool)

    def link_name(self, link: int) -> str:
        return " -> ".join(self.ends[link])

    def _is_joined(self, src: int, dst: int) -> bool:
        try:
            self._way(src, dst)
        except ConfigError:
            return False
        return True

    def _way(self, src: int, dst: int) -> tuple[tuple[int, ...], float, frozenset[str]]:
        """Links, latency and kinds of links of the route between two ranks."""
        if (src, dst) not in self._found:
            route = self.topology.route(src, dst)
            ends = list(zip(route.devices, route.devices[1:]))
            kinds = frozenset(self._kinds[pair] for pair in ends)
            self._found[src, dst] = (tuple(self._number[pair] for pair in ends), route.latency, kinds)
        return self._found[src, dst]


@dataclass(frozen=True)
class Cluster:
    """Nodes of one size around a switch that is never the narrowest, by arithmetic: worlds of any size.

    In a node each rank has a link out and one in. Between nodes its messages go by one of the node's `num_nics`, which
    ranks share evenly. `inside` and `between` are (kind, GB/s of a rank's link or of a NIC, µs).
    """

    num_ranks: int
    ranks_per_node: int
    inside: tuple[str, float, float]
    between: tuple[str, float, float] = ("network", float("inf"), 0.0)
    num_nics: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.ranks_per_node < 1 or self.num_nics < 1:
            counts = (self.num_ranks, self.ranks_per_node, self.num_nics)
            raise ConfigError(f"cluster: wanted ranks, ranks per node and NICs >= 1, got {counts}")

    @classmethod
    def like(cls, topology: Topology, num_ranks: int) -> Cluster:
        """Nodes as `topology` has, but so many that they have `num_ranks`.

        ConfigError unless its nodes are of one size, at least 2, and a switch joins the ranks of each; for more ranks
        than it has, it has to have two nodes.
        """
        nodes = topology.nodes
        if not cls.fits(topology) or num_ranks > topology.num_ranks and len(nodes) < 2:
            wanted = f"nodes of one size with a switch each, two of them for more than {topology.num_ranks} ranks"
            raise ConfigError(f"cluster: wanted {wanted}, got {topology.name}")
        near = topology.route(0, nodes[0][1])
        if len(nodes) == 1:
            return cls(num_ranks, len(nodes[0]), ("nvlink", near.bandwidth, near.latency))
        far, nics = topology.route(0, nodes[1][0]), {topology.nic(rank) for rank in nodes[0]}
        between = ("network", far.bandwidth, far.latency)
        return cls(num_ranks, len(nodes[0]), ("nvlink", near.bandwidth, near.latency), between, len(nics))

    @staticmethod
    def fits(topology: Topology) -> bool:
        """Whether its nodes are of one size, at least 2, and a switch joins the ranks of each."""
        sizes = {len(ranks) for ranks in topology.nodes}
        if len(sizes) != 1 or min(sizes) < 2:
            return False
        middle = topology.route(0, topology.nodes[0][1]).devices[1:-1]
        return len(middle) == 1 and topology.device(middle[0]).kind == "switch"

    @cached_property
    def bandwidth(self) -> np.ndarray:
        of_ranks = np.full(2 * self.num_ranks, self.inside[1])
        return np.concatenate([of_ranks, np.full(2 * self._num_nodes * self.num_nics, self.between[1])])

    def routes(self, src: np.ndarray, dst: np.ndarray) -> Routes:
        is_far = (src // self.ranks_per_node != dst // self.ranks_per_node).astype(np.int64)
        first_nic = 2 * self.num_ranks
        out = np.where(is_far, first_nic + 2 * self._nic(src), 2 * src)
        into = np.where(is_far, first_nic + 2 * self._nic(dst) + 1, 2 * dst + 1)
        latency = np.array([self.inside[2], self.between[2]])[is_far]
        kinds = tuple(frozenset([kind]) for kind, _, _ in (self.inside, self.between))
        return Routes(np.stack([out, into], axis=1), latency, kinds, is_far)

    def joined(self) -> tuple[np.ndarray, np.ndarray]:
        """A pair of one node, and one of two nodes."""
        others = [rank for rank in sorted({1, self.num_ranks - 1}) if 0 < rank < self.num_ranks]
        return np.zeros(len(others), np.int64), np.array(others, np.int64)

    def joins(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        return np.ones(len(src), bool)

    def link_name(self, link: int) -> str:
        number, direction = divmod(link, 2)
        of_rank = number < self.num_ranks
        nic = "node {}, NIC {}".format(*divmod(number - self.num_ranks, self.num_nics))
        device = f"rank {number}" if of_rank else nic
        return f"{device}, {'in' if direction else 'out'}"

    @property
    def _num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)

    def _nic(self, rank: np.ndarray) -> np.ndarray:
        node, local = np.divmod(rank, self.ranks_per_node)
        return node * self.num_nics + local * self.num_nics // self.ranks_per_node
