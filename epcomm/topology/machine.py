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
        forward.

        ConfigError if there is none.
        """
        return self.route_between(self.ranks[src], self.ranks[dst])

    def bandwidth(self, src: int, dst: int) -> float:
        """The bandwidth of the route between two ranks; 0 if there is none."""
        widest = self._find_route(self.ranks[src], self.ranks[dst])
        return 0.0 if widest is None else widest.bandwidth

    def route_between(self, src: str, dst: str) -> Route:
        """`route` of two devices by name."""
        route = self._find_route(self.device(src).name, self.device(dst).name)
        if route is None:
            raise ConfigError(f"topology {self.name}: no way from {src} to {dst}")
        return route

    def nic(self, rank: int) -> str | None:
        """The NIC in a rank's machine that it reaches best; None if it reaches none."""
        routes = ((self._find_route(self.ranks[rank], name), name) for name in self._nics(rank))
        rated = [(-route.bandwidth, route.latency, len(route.devices), name) for route, name in routes if route]
        return min(rated, key=lambda rating: rating[:-1])[-1] if rated else None

    def rail(self, rank: int) -> int | None:
        """Which of its machine's NICs that is, by number."""
        nic = self.nic(rank)
        return None if nic is None else self._nics(rank).index(nic)

    def _nics(self, rank: int) -> list[str]:
        node = self.node_of(rank)
        return [device.name for device in self.devices if device.kind == "nic" and device.node == node]

    @cached_property
    def _device(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @cached_property
    def _routes(self) -> dict[tuple[str, str], Route | None]:
        return {}

    @cached_property
    def _neighbours(self) -> dict[str, list[tuple[str, Link]]]:
        found: dict[str, list[tuple[str, Link]]] = {name: [] for name in self._device}
        for link in self.links:
            found[link.a].append((link.b, link))
            found[link.b].append((link.a, link))
        return found

    def _find_route(self, src: str, dst: str) -> Route | None:
        if (src, dst) not in self._routes:
            self._routes[src, dst] = self._searched_route(src, dst)
        return self._routes[src, dst]

    def _searched_route(self, src: str, dst: str) -> Route | None:
        widest = self._search(src, dst, lambda cost, link: (max(cost[0], -link.total),), (-float("inf"),))
        if widest is None:
            return None
        width = -widest[0][0]

        def lengthened(cost: tuple[float, ...], link: Link) -> tuple[float, ...] | None:
            return None if link.total < width else (cost[0] + link.latency, cost[1] + 1)

        shortest = self._search(src, dst, lengthened, (0.0, 0.0))
        assert shortest is not None  # the widest way is one
        return Route(shortest[1], width, shortest[0][0])

    def _search(
        self,
        src: str,
        dst: str,
        lengthened: Callable[[tuple[float, ...], Link], tuple[float, ...] | None],
        start: tuple[float, ...],
    ) -> tuple[tuple[float, ...], tuple[str, ...]] | None:
        """Dijkstra's: the least cost of a way and its devices. `lengthened` adds a link to a cost; None forbids it."""
        closed, done = set(self.ranks) - {src, dst}, set()
        heap: list[tuple[tuple[float, ...], tuple[str, ...]]] = [(start, (src,))]
        while heap:
            cost, path = heapq.heappop(heap)
            at = path[-1]
            if at == dst:
                return cost, path
            if at in done:
                continue
            done.add(at)
            for name, link in self._neighbours[at]:
                if name not in closed and name not in done:
                    longer = lengthened(cost, link)
                    if longer is not None:
                        heapq.heappush(heap, (longer, (*path, name)))
        return None
