"""Protocols and what they cost: how much of a link's bytes is payload, how long a step takes, how fast a channel is.

The figures of GPUs are NCCL's (src/graph/tuning.cc and topo.h, 2026), in µs and GB/s. LL sends 4 bytes of flag with 4
of data; LL128 8 with 120; Simple sends data, then signals. A step of ours is taken to have the latency of a step of
NCCL's ring, or of its tree for trees; steps otherwise cost nothing, for lack of a published figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from epcomm.errors import ConfigError
from epcomm.model.gpus import GPUS
from epcomm.simulation.costs import Costs

#: algorithms whose steps are NCCL's tree's
TREES = frozenset({"double_binary_tree"})


@dataclass(frozen=True)
class Protocol:
    """`base`: µs before the first step. `latency`: µs of a step by the kind of link. Both of (ring, tree)."""

    name: str
    efficiency: float
    base: tuple[float, float]
    latency: Mapping[str, tuple[float, float]]


def _latency(nvlink: tuple[float, float], pci: tuple[float, float], network: tuple[float, float]) -> dict:
    """NCCL has three kinds; xGMI counts as NVLink, and what joins sockets as PCIe."""
    return {"nvlink": nvlink, "xgmi": nvlink, "pci": pci, "socket": pci, "network": network}


#: of plans
PRICED = {
    "ll": Protocol("ll", 4 / 8, (6.6, 6.8), _latency((0.6, 0.6), (1.0, 1.0), (2.7, 5.0))),
    "ll128": Protocol("ll128", 120 / 128, (14.0, 14.0), _latency((1.9, 1.25), (2.5, 1.9), (4.0, 8.5))),
    "simple": Protocol("simple", 1.0, (8.4, 8.4), _latency((3.4, 4.0), (5.7, 4.0), (14.0, 14.0))),
}

#: In place of a protocol: the algorithm's kernel written by hand. It starts as fast as the leanest protocol, for it has
#: no FIFOs; then data comes before a flag, as with Simple.
KERNEL = "kernel"
_BY_HAND = Protocol(KERNEL, 1.0, PRICED["ll"].base, PRICED["simple"].latency)


@dataclass(frozen=True)
class Generation:
    """How fast a GPU's channels are: one with Simple or LL128, and all together with LL, on 1, 2, and more nodes."""

    simple: float
    ll128: float
    ll: tuple[float, float, float]

    def channel(self, protocol: str, channels: int, num_nodes: int) -> float:
        """GB/s of each of so many channels."""
        if protocol != "ll":
            return self.ll128 if protocol == "ll128" else self.simple
        return self.ll[min(num_nodes, 3) - 1] / channels


# LL128 and LL: NCCL's perChMaxRingLL128Bws, llMaxBws. Simple: what an SM copies (`epcomm.model.gpus`); of older GPUs no
# figure is known, and it is taken to be LL128's.
_VOLTA = Generation(20.0, 20.0, (39.0, 39.0, 20.4))
_AMPERE = Generation(20.0, 20.0, (87.7, 22.5, 19.0))
_HOPPER = Generation(GPUS["h100"].sm_bandwidth, 36.7, (141.0, 45.0, 35.0))
_BLACKWELL = Generation(GPUS["gb200"].sm_bandwidth, 40.0, (282.0, 90.0, 70.0))
_UNLIMITED = Generation(math.inf, math.inf, (math.inf, math.inf, math.inf))

#: by the preset's name; of other machines only the links limit channels
GENERATIONS = {
    "dgx1_v100": _VOLTA, "ndv2": _VOLTA, "dgx_a100": _AMPERE, "dgx_h100": _HOPPER, "dgx_h200": _HOPPER,
    "gb200_nvl72": _BLACKWELL,
}  # fmt: skip

#: Kernels written by hand of ranks that are CPU cores: benchmarks/cost_model.py fits these costs to measured allreduces
#: of 2 ranks, each on a core of its own (benchmarks/results/cost_model.json).
CPU_COSTS = Costs(launch=3.679, channel=15.785, latency={"cache": 0.0, "socket": 0.0})
#: Plans of such ranks, by the protocol that pays there. Messages are copied into FIFOs: of 2 ranks and from 1 MiB on,
#: two_shot's plan takes 0.97 to 1.43 times as long as its kernel, in the median 1.2 times
#: (benchmarks/results/plans.json).
CPU_PLAN_COSTS = replace(CPU_COSTS, channel=CPU_COSTS.channel / 1.2)
#: machines, by the preset's name, whose ranks are cores; "host" is the one that this is
HOSTS = ("two_socket_host", "host")


def protocols_of(machine: str) -> tuple[str, ...]:
    """What plans on a machine of this name can choose from."""
    return ("simple",) if machine in HOSTS else tuple(PRICED)


def word_costs(machine: str) -> Costs:
    """What a word by itself costs on a machine of this name: among GPUs as little as a step of LL's, whose messages are
    words, too.
    """
    if machine in HOSTS:
        return CPU_PLAN_COSTS
    return Costs(latency={kind: of_ring for kind, (of_ring, _) in PRICED["ll"].latency.items()})


def costs_of(machine: str, protocol: str, algorithm: str, channels: int, num_nodes: int) -> Costs:
    """The costs of the steps of a plan of this algorithm, or of its kernel, on a machine of this name; ConfigError if
    there is no such protocol.
    """
    known = (*protocols_of(machine), KERNEL)
    if protocol not in known:
        raise ConfigError(f"argument `protocol`: on {machine} wanted one of {', '.join(known)}, got {protocol!r}")
    if machine in HOSTS:
        return CPU_COSTS if protocol == KERNEL else CPU_PLAN_COSTS
    found, column = _BY_HAND if protocol == KERNEL else PRICED[protocol], int(algorithm in TREES)
    return Costs(
        launch=found.base[column],
        channel=GENERATIONS.get(machine, _UNLIMITED).channel(protocol, channels, num_nodes),
        efficiency=found.efficiency,
        latency={kind: latency[column] for kind, latency in found.latency.items()},
    )
