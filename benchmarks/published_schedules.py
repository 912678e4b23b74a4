"""Schedules of TE-CCL's solver, replayed as plans: `benchmarks/data/te_ccl`, of github.com/microsoft/TE-CCL.

A file has the machine, the allgather's size in bytes, the finish time that was published for it, µs, and the flows:
[whose chunk, from, to, epoch]. TE-CCL's devices are numbered with switches among them. Time there is in epochs, which a
flow starts in one of; a latency below a tenth of an epoch is dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from epcomm.collectives.language import Collective, Trace, chunk
from epcomm.collectives.plan import Plan
from epcomm.topology import Device, Link, Topology
from epcomm.topology.presets import DGX1_LINKS

SCHEDULES = Path(__file__).parent / "data" / "te_ccl"


@dataclass(frozen=True)
class PublishedSchedule:
    """An allgather of `num_bytes` in all, by flows between TE-CCL's devices; `finish` is the published time, µs."""

    name: str
    machine: str
    num_bytes: int
    finish: float
    flows: list[list[int]]

    @property
    def topology(self) -> Topology:
        return _TOPOLOGIES[self.machine]()

    @property
    def chunk_bytes(self) -> float:
        """What each GPU contributes: as TE-CCL counts, an equal share of the bytes for each of the machine's GPUs."""
        return self.num_bytes / _NUM_GPUS[self.machine]

    def plan(self) -> Plan:
        """The flows, in the order of their epochs. Each way from one GPU to another has programs of its own."""
        rank_of = {name: rank for rank, name in enumerate(self.topology.ranks)}
        num_ranks = len(rank_of)
        with Trace(self.name, Collective("allgather", num_ranks, 1)) as trace:
            for rank in range(num_ranks):
                chunk(rank, "input").copy(rank, "output", rank)
            for owner, src, dst, _ in sorted(self.flows, key=lambda flow: flow[3]):
                block, giver, taker = (rank_of[f"gpu{device}"] for device in (owner, src, dst))
                chunk(giver, "output", block).copy(taker, channel=giver * num_ranks + taker)
        return trace.plan()


def read_schedule(path: Path) -> PublishedSchedule:
    return PublishedSchedule(path.stem, **json.loads(path.read_text()))


def _ndv2() -> Topology:
    """Two machines of eight V100s as TE-CCL's solver took them: their device 0 is a switch there, not a GPU."""
    devices, links = [Device("gpu0", "switch")], []
    devices += [Device(f"gpu{number}", "gpu", number // 8) for number in range(1, 16)]
    for node in (0, 8):
        for (a, b), count in DGX1_LINKS.items():
            links.append(Link(f"gpu{node + a}", f"gpu{node + b}", "nvlink", 25.0, 0.7, count))
    links += [Link("gpu0", "gpu9", "network", 12.5, 1.3), Link("gpu8", "gpu1", "network", 12.5, 1.3)]
    return Topology("TE-CCL's NDv2 x 2", tuple(devices), tuple(links), tuple(f"gpu{n}" for n in range(1, 16)))


def _dgx2() -> Topology:
    """Two machines of 16 GPUs around a switch, and a link from each odd GPU to an even one of the other machine."""
    devices, links, ranks = [], [], []
    for node in range(2):
        first = 17 * node
        devices.append(Device(f"switch{node}", "switch", node))
        for gpu in range(first + 1, first + 17):
            ranks.append(f"gpu{gpu}")
            devices.append(Device(f"gpu{gpu}", "gpu", node))
            links.append(Link(f"gpu{gpu}", f"switch{node}", "nvlink", 125.0, 0.35))
        for odd in range(1, 17, 2):
            links.append(Link(f"gpu{first + 1 + odd}", f"gpu{17 * (1 - node) + odd}", "network", 12.5, 2.6))
    return Topology("TE-CCL's DGX-2 x 2", tuple(devices), tuple(links), tuple(ranks))


_TOPOLOGIES = {"ndv2": _ndv2, "dgx2": _dgx2}
_NUM_GPUS = {"ndv2": 16, "dgx2": 32}
