"""The machines that requests name: this host, presets and NCCL's dumps, as many of them as the ranks need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from epcomm.collectives.cost.protocols import word_costs
from epcomm.collectives.cost.world import World
from epcomm.errors import ConfigError
from epcomm.simulation.network import Cluster, Network, RoutedNetwork, meeting
from epcomm.topology import PRESETS, Topology, from_nccl_xml, read_host, ring_order

#: of links whose speed nobody gave: an NVLink 4 of an H100; the memory of `two_socket_host`
_LINK_BANDWIDTH, _LINK_LATENCY = 25.0, 0.7
_MEMORY_BANDWIDTH = 204.8
#: More ranks than that are priced as a cluster where they can be, without finding a route for each pair.
_MOST_ROUTED = 16
#: Of more ranks not every device is made: two nodes stand for all.
MOST_BUILT = 128


@dataclass(frozen=True)
class Machine:
    """`num_ranks` ranks on nodes of `topology`, which has all of them, or two nodes of more than MOST_BUILT ranks.

    `kind` is the preset's name, or "host", or "dump".
    """

    kind: str
    topology: Topology
    num_ranks: int

    @classmethod
    def of(cls, topology: Topology) -> Machine:
        """The machine of a communicator's topology."""
        preset = topology.name.partition(" x ")[0]
        kind = preset if preset in PRESETS else "host" if _is_of_cores(topology) else "dump"
        return cls(kind, topology, topology.num_ranks)

    @cached_property
    def is_of_cores(self) -> bool:
        """Whether its ranks are cores of CPUs."""
        return _is_of_cores(self.topology)

    @property
    def has_speeds(self) -> bool:
        """Whether bandwidths are known, so that there are prices."""
        return self.topology.unit == "GB/s"

    @property
    def is_whole(self) -> bool:
        """Whether the topology has all ranks."""
        return self.num_ranks == self.topology.num_ranks

    @property
    def name(self) -> str:
        return self.topology.name if self.is_whole else f"{self.kind} x {len(self.nodes)}"

    @cached_property
    def nodes(self) -> list[list[int]]:
        """The ranks of each node."""
        if self.is_whole:
            return [list(ranks) for ranks in self.topology.nodes]
        size = len(self.topology.nodes[0])
        return [list(range(first, min(first + size, self.num_ranks))) for first in range(0, self.num_ranks, size)]

    @cached_property
    def world(self) -> World:
        """Its ranks as schedules see them; nodes that differ in size count as one."""
        sizes = {len(ranks) for ranks in self.nodes}
        order = ring_order(self.topology) if self.is_whole else []
        is_ascending = order == sorted(order)
        return World(
            self.num_ranks, sizes.pop() if len(sizes) == 1 else self.num_ranks, None if is_ascending else tuple(order)
        )

    @cached_property
    def routed(self) -> RoutedNetwork:
        """Every link of it."""
        return RoutedNetwork(self.topology)

    @cached_property
    def pricing_network(self) -> Network:
        """What schedules are priced on: every link, or for many ranks behind switches a `Cluster`."""
        if self.num_ranks > _MOST_ROUTED and Cluster.fits(self.topology):
            return Cluster.like(self.topology, self.num_ranks)
        return self.routed

    @cached_property
    def meeting(self) -> float:
        """µs that pass in a plan's operation before its first step, until all ranks have entered it."""
        return meeting(self.pricing_network, word_costs(self.kind))


def find_machine(name: str, num_ranks: int) -> Machine:
    """The machine of a preset's name, "host" for this one, or of a dump's file, with so many ranks.

    Linux doesn't say how fast this host's memory is: it is taken to be as fast as that of `two_socket_host`.
    ConfigError if there is no such preset or file, or if it can't have so many ranks.
    """
    if type(num_ranks) is not int or num_ranks < 1:
        raise ConfigError(f"argument `ranks`: wanted an integer >= 1, got {num_ranks!r}")
    if name == "host":
        return Machine(name, read_host(num_ranks=num_ranks).scaled(_MEMORY_BANDWIDTH), num_ranks)
    if name in ("ring", "full_mesh", "two_socket_host"):
        _check_most(name, num_ranks, MOST_BUILT)
        options = (num_ranks, _LINK_BANDWIDTH, _LINK_LATENCY) if name != "two_socket_host" else (-(-num_ranks // 2),)
        return Machine(name, PRESETS[name](*options).first_ranks(num_ranks), num_ranks)
    if name in PRESETS:
        if num_ranks > MOST_BUILT and Cluster.fits(PRESETS[name](2)):
            return Machine(name, PRESETS[name](2), num_ranks)
        _check_most(name, num_ranks, MOST_BUILT)
        size = PRESETS[name](1).num_ranks
        return Machine(name, PRESETS[name](-(-num_ranks // size)).first_ranks(num_ranks), num_ranks)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(("host", *PRESETS))
        raise ConfigError(f"argument `topology`: wanted one of {known}, or a topology dump of NCCL's, got {name!r}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"argument `topology`: {path.name} is no text: {error}") from None
    topology = from_nccl_xml(text, path.name)
    _check_most(name, num_ranks, topology.num_ranks)
    return Machine("dump", topology.first_ranks(num_ranks), num_ranks)


def _check_most(name: str, num_ranks: int, most: int) -> None:
    if num_ranks > most:
        raise ConfigError(f"argument `ranks`: wanted at most {most} on {name}, got {num_ranks}")


def _is_of_cores(topology: Topology) -> bool:
    return all(topology.device(name).kind == "core" for name in topology.ranks)
