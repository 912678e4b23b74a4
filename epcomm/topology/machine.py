"""A topology: devices, links between them, and which devices are ranks."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from epcomm.errors import ConfigError

#: What a device can be: those that ranks run on, and what lies between them. "cpu" is a NUMA domain.
KINDS = ("gpu", "core", "cpu", "cache", "pci", "switch", "nic")


@dataclass(frozen=True)
class Device:
    """A device by its name, unique in its topology. `node` numbers the machines; `num_bytes` is a cache's size."""

    name: str
    kind: str
    node: int = 0
    num_bytes: int = 0


@dataclass(frozen=True)
class Link:
    """`count` equal links between two devices, in both directions at once.

    `bandwidth` is in GB/s (or in the topology's unit), of one of them in one direction; `latency` in µs. `kind` says
    what it is: "nvlink", "xgmi", "pci", "network", "socket", "cache".
    """

    a: str
    b: str
    kind: str
    bandwidth: float
    latency: float = 0.0
    count: int = 1

    @property
    def total(self) -> float:
        """The bandwidth of all of them."""
        return self.bandwidth * self.count


@dataclass(frozen=True)
class Route:
    """A way from one device to another: devices on it, ends included, its narrowest link's bandwidth, its latency."""

    devices: tuple[str, ...]
    bandwidth: float
    latency: float


_Cost = tuple[float, ...]
#: what a way costs, and its devices
_Way = tuple[_Cost, tuple[str, ...]]


@dataclass(frozen=True)
class Topology:
    """Devices and links; `ranks` names the device of each rank. `unit` is that of bandwidths.

    ConfigError if names repeat or are unknown, or if a link has no bandwidth.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    ranks: tuple[str, ...]
    unit: str = "GB/s"

    def __post_init__(self) -> None:
        if len(self._device) < len(self.devices):
            raise ConfigError(f"topology {self.name}: two devices have the same name")
        for device in self.devices:
            if device.kind not in KINDS:
                raise ConfigError(f"topology {self.name}: {device.name}: wanted one of {KINDS}, got {device.kind!r}")
        for link in self.links:
            if link.a not in self._device or link.b not in self._device or link.a == link.b:
                raise ConfigError(f"topology {self.name}: a link joins two devices of it, got {link.a} and {link.b}")
            if not (link.bandwidth > 0 and link.count > 0 and link.latency >= 0):
                raise ConfigError(f"topology {self.name}: {link}: wanted bandwidth and count > 0, latency >= 0")
        if len(set(self.ranks)) < len(self.ranks) or not set(self.ranks) <= set(self._device):
            raise ConfigError(f"topology {self.name}: ranks: wanted devices of it, once each, got {self.ranks}")

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def fingerprint(self) -> str:
        """The same for topologies that are equal, on every machine, and hardly for others: 16 hex digits."""
        return hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()

    def first_ranks(self, num_ranks: int) -> Topology:
        """The topology with its first ranks only; the other ranks' devices are gone, for they would not forward.

        ConfigError if it hasn't so many.
        """
        if not 0 < num_ranks <= self.num_ranks:
            raise ConfigError(f"topology {self.name}: wanted 1 to {self.num_ranks} ranks of it, got {num_ranks}")
        gone = set(self.ranks[num_ranks:])
        return replace(
            self,
            devices=tuple(device for device in self.devices if device.name not in gone),
            links=tuple(link for link in self.links if not {link.a, link.b} & gone),
            ranks=self.ranks[:num_ranks],
        )

    def scaled(self, bandwidth: float) -> Topology:
        """With bandwidths in GB/s, `bandwidth` for each unit of now: of one whose bandwidths are relative."""
        links = tuple(replace(link, bandwidth=link.bandwidth * bandwidth) for link in self.links)
        return replace(self, links=links, unit="GB/s")

    def device(self, name: str) -> Device:
        """A device by its name; ConfigError if there is none."""
        if name not in self._device:
            raise ConfigError(f"topology {self.name}: it has no device {name!r}")
        return self._device[name]

    def node_of(self, rank: int) -> int:
        """The machine a rank is in."""
        return self.device(self.ranks[rank]).node

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each machine that has some."""
        ranks: dict[int, list[int]] = {}
        for rank in range(self.num_ranks):
            ranks.setdefault(self.node_of(rank), []).append(rank)
        return tuple(tuple(ranks[node]) for node in sorted(ranks))

    def route(self, src: int, dst: int) -> Route:
        """The widest way between two ranks, of those the fastest; not through other ranks' devices, which don't
        forward. Between machines it goes by each rank's own NIC, if that is as wide.

        ConfigError if there is none.
        """
        route = self._ranks_route(src, dst)
        if route is None:
            raise ConfigError(f"topology {self.name}: no way from {self.ranks[src]} to {self.ranks[dst]}")
        return route

    def bandwidth(self, src: int, dst: int) -> float:
        """The bandwidth of the route between two ranks; 0 if there is none."""
        route = self._ranks_route(src, dst)
        return 0.0 if route is None else route.bandwidth

    def nic(self, rank: int) -> str | None:
        """The NIC in a rank's machine that it reaches best; None if it reaches none.

        Ranks that reach several equally well share them out: the first takes the first of them, as in NCCL.
        """
        return self._own_nics[rank]

    def rail(self, rank: int) -> int | None:
        """Which of its machine's NICs that is, by number."""
        nic = self.nic(rank)
        return None if nic is None else self._nics(self.node_of(rank)).index(nic)

    def _nics(self, node: int) -> list[str]:
        return [device.name for device in self.devices if device.kind == "nic" and device.node == node]

    @cached_property
    def _own_nics(self) -> dict[int, str | None]:
        found: dict[int, str | None] = {}
        for ranks in self.nodes:
            taken: dict[tuple[str, ...], int] = {}  # by NICs that are equally good: how many ranks have one of them
            for rank in ranks:
                best = self._best_nics(rank)
                found[rank] = best[taken.get(best, 0) % len(best)] if best else None
                taken[best] = taken.get(best, 0) + 1
        return found

    def _best_nics(self, rank: int) -> tuple[str, ...]:
        routes = [(self._find_route(self.ranks[rank], name), name) for name in self._nics(self.node_of(rank))]
        rated = [((-route.bandwidth, route.latency, len(route.devices)), name) for route, name in routes if route]
        best = min((rating for rating, _ in rated), default=None)
        return tuple(name for rating, name in rated if rating == best)

    def _ranks_route(self, src: int, dst: int) -> Route | None:
        widest = self._find_route(self.ranks[src], self.ranks[dst])
        out, into = self.nic(src), self.nic(dst)
        if widest is None or self.node_of(src) == self.node_of(dst) or out is None or into is None:
            return widest
        legs = [
            self._find_route(self.ranks[src], out), self._network._find_route(out, into),
            self._find_route(into, self.ranks[dst]),
        ]  # fmt: skip
        ways = [leg for leg in legs if leg is not None and leg.bandwidth >= widest.bandwidth]
        if len(ways) < len(legs):
            return widest
        devices = sum((leg.devices[1:] for leg in ways), ways[0].devices[:1])
        return Route(devices, widest.bandwidth, sum(leg.latency for leg in ways))

    @cached_property
    def _network(self) -> Topology:
        """The links between machines only: NICs don't forward to each other."""
        return replace(self, links=tuple(link for link in self.links if link.kind == "network"))

    @cached_property
    def _device(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _neighbours(self) -> dict[str, list[tuple[str, Link]]]:
        found: dict[str, list[tuple[str, Link]]] = {name: [] for name in self._device}
        for link in self.links:
            found[link.a].append((link.b, link))
            found[link.b].append((link.a, link))
        return found

    @cached_property
    def _found(self) -> dict[tuple[str, float], dict[str, _Way]]:
        """Searches that were made, by where from and how wide: the fastest way to each device; of 0.0 the widest."""
        return {}

    def _find_route(self, src: str, dst: str) -> Route | None:
        """The widest way between two devices, of those the fastest; None if there is none."""
        widest = self._ways(src, 0.0, lambda cost, link: (max(cost[0], -link.total),), (-float("inf"),)).get(dst)
        if widest is None:
            return None
        width = -widest[0][0]
        (latency, _), devices = self._ways(src, width, lambda cost, link: (cost[0] + link.latency, cost[1] + 1))[dst]
        return Route(devices, width, latency)

    def _ways(
        self, src: str, width: float, lengthened: Callable[[_Cost, Link], _Cost], start: _Cost = (0.0, 0.0)
    ) -> dict[str, _Way]:
        """Dijkstra's: the least cost of a way to each device over links of this width, and the way. `lengthened` adds
        a link to a cost. Other ranks' devices are ends of ways only.
        """
        if (src, width) in self._found:
            return self._found[src, width]
        found: dict[str, _Way] = {}
        heap: list[_Way] = [(start, (src,))]
        while heap:
            cost, path = heapq.heappop(heap)
            at = path[-1]
            if at in found:
                continue
            found[at] = (cost, path)
            if at != src and at in self._rank_devices:
                continue
            for name, link in self._neighbours[at]:
                if name not in found and link.total >= width:
                    heapq.heappush(heap, (lengthened(cost, link), (*path, name)))
        self._found[src, width] = found
        return found

    @cached_property
    def _rank_devices(self) -> frozenset[str]:
        return frozenset(self.ranks)
