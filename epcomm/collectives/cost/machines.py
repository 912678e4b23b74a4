"""The machines that requests name: presets and NCCL's dumps, as many of them as the ranks need."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from epcomm.collectives.cost.schedules import World
from epcomm.errors import ConfigError
from epcomm.simulation.network import Cluster, Network, RoutedNetwork
from epcomm.topology import PRESETS, Topology, from_nccl_xml, ring_order

#: of links whose speed nobody gave: an NVLink 4 of an H100
_LINK_BANDWIDTH, _LINK_LATENCY = 25.0, 0.7
#: More ranks than that are priced as a cluster, without finding a route for each pair.
_MOST_ROUTED = 16


@dataclass(frozen=True)
class Machine:
    """A topology whose first `num_ranks` ranks take part. `kind` is the preset's name, or "dump"."""

    kind: str
    topology: Topology
    num_ranks: int

    @cached_property
    def world(self) -> World:
        """Its ranks as schedules see them; nodes that differ in size count as one."""
        sizes = {len(ranks) for ranks in self.topology.nodes}
        size = sizes.pop() if len(sizes) == 1 else self.num_ranks
        order = ring_order(self.topology)
        return World(self.num_ranks, size, None if order == sorted(order) else tuple(order))

    @property
    def num_nodes(self) -> int:
        return len(self.topology.nodes)

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


def find_machine(name: str, num_ranks: int) -> Machine:
    """The machine of a preset's name or of a dump's file, with so many ranks.

    ConfigError if there is no such preset or file, or if a dump has too few GPUs.
    """
    if type(num_ranks) is not int or num_ranks < 1:
        raise ConfigError(f"argument `ranks`: wanted an integer >= 1, got {num_ranks!r}")
    if name in ("ring", "full_mesh"):
        return Machine(name, PRESETS[name](num_ranks, _LINK_BANDWIDTH, _LINK_LATENCY), num_ranks)
    if name == "two_socket_host":
        return Machine(name, _first_ranks(PRESETS[name](-(-num_ranks // 2)), num_ranks), num_ranks)
    if name in PRESETS:
        size = PRESETS[name](1).num_ranks
        topology = PRESETS[name](-(-num_ranks // size))
        return Machine(name, _first_ranks(topology, num_ranks), num_ranks)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(PRESETS)
        raise ConfigError(f"argument `topology`: wanted one of {known}, or a topology dump of NCCL's, got {name!r}")
    topology = from_nccl_xml(path.read_text(), path.name)
    if topology.num_ranks < num_ranks:
        raise ConfigError(f"argument `ranks`: wanted at most {topology.num_ranks}, the GPUs of {name}, got {num_ranks}")
    return Machine("dump", _first_ranks(topology, num_ranks), num_ranks)


def _first_ranks(topology: Topology, num_ranks: int) -> Topology:
    """The topology with its first ranks only; the other ranks' devices are gone, for they would not forward."""
    gone = set(topology.ranks[num_ranks:])
    return replace(
        topology,
        devices=tuple(device for device in topology.devices if device.name not in gone),
        links=tuple(link for link in topology.links if not {link.a, link.b} & gone),
        ranks=topology.ranks[:num_ranks],
    )
