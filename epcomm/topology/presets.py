"""Well-known machines, alone and several of them. Bandwidths are in GB/s in one direction, latencies in µs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from epcomm.errors import ConfigError
from epcomm.topology.machine import Device, Link, Topology

# A link of NVLink. NVIDIA's data sheets give all links of a GPU in both directions: V100 6 and 300 GB/s, A100 12 and
# 600, H100 and H200 18 and 900, GB200 18 and 1800.
_NVLINK2 = _NVLINK3 = _NVLINK4 = 25.0
_NVLINK5 = 50.0
# A link of Infinity Fabric between MI300X: 16 lanes of 32 Gb/s (Linux, amdgpu_xgmi.c, for GC 9.4.3); AMD's data sheet
# gives 128 in both directions. RCCL counts with 48 of the 64 (src/graph/topo.h, 2024: GFX94X_XGMI_WIDTH).
_XGMI = 64.0
# InfiniBand by what it is called: EDR 100 Gb/s, HDR 200, NDR 400.
_EDR, _HDR, _NDR = 12.5, 25.0, 50.0
# Between sockets, as NCCL counts (src/graph/topo.h, 2026): by Intel's generation, AMD's, and any ARM, for lack of a
# figure of Grace's. The links themselves carry several times as much.
_BROADWELL, _SKYLAKE, _SAPPHIRE_RAPIDS, _ZEN2, _ARM = 6.0, 10.0, 22.0, 16.0, 6.0
# A NVLink, a hop by an NVSwitch, and from NIC to NIC: the topologies of NDv2 and DGX-2 in Microsoft's TE-CCL
# (github.com/microsoft/TE-CCL). Of other links none is known here, and it is 0.
_NVLINK_LATENCY, _SWITCH_LATENCY, _NETWORK_LATENCY = 0.7, 0.35, 1.3

#: NVLinks between the GPUs of a DGX-1 with V100s: a cube mesh of 6 links per GPU (microsoft/sccl's topology of it).
DGX1_LINKS = {
    (0, 1): 2, (0, 2): 1, (0, 3): 1, (0, 4): 2, (1, 2): 1, (1, 3): 2, (1, 5): 1, (2, 3): 2,
    (2, 6): 2, (3, 7): 1, (4, 5): 2, (4, 6): 1, (4, 7): 1, (5, 6): 1, (5, 7): 2, (6, 7): 2,
}  # fmt: skip


def _pcie(gigatransfers: float) -> float:
    """16 lanes of PCIe 3 (8 GT/s), 4 (16) or 5 (32), which send 130 bits for 128 (PCI-SIG's specifications)."""
    return gigatransfers * 16 / 8 * 128 / 130


def _ddr(megatransfers: float, channels: int) -> float:
    """Channels of memory, 8 bytes wide, named by their transfers: DDR4-3200, DDR5-4800 (JEDEC JESD79-4, JESD79-5)."""
    return megatransfers * 8 * channels / 1e3


@dataclass
class _Parts:
    """A topology in the making."""

    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    ranks: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, node: int = 0, *, is_rank: bool = False) -> str:
        self.devices.append(Device(name, kind, node))
        self.ranks += [name] * is_rank
        return name

    def link(self, a: str, b: str, kind: str, bandwidth: float, latency: float = 0.0, count: int = 1) -> None:
        self.links.append(Link(a, b, kind, bandwidth, latency, count))

    def topology(self, name: str) -> Topology:
        return Topology(name, tuple(self.devices), tuple(self.links), tuple(self.ranks))


@dataclass(frozen=True)
class _Server:
    """A machine of GPUs: sockets in pairs, PCIe switches below them, each with as many GPUs and NICs as the others."""

    num_gpus: int
    num_switches: int  # PCIe
    num_nics: int
    nic: float  # GB/s of one
    pci: float
    sockets: float
    connect: Callable[[_Parts, list[str], int], None]  # the GPUs with each other
    num_sockets: int = 2


def _cluster(name: str, server: _Server, num_nodes: int) -> Topology:
    """Machines whose NICs of one number meet in one switch, a rail's; rails meet in one more."""
    if type(num_nodes) is not int or num_nodes < 1:
        raise ConfigError(f"{name}: num_nodes: wanted an integer >= 1, got {num_nodes!r}")
    parts = _Parts()
    rails = [parts.add(f"rail{rail}", "switch", -1) for rail in range(server.num_nics if num_nodes > 1 else 0)]
    if len(rails) > 1:
        spine = parts.add("spine", "switch", -1)
        for rail in rails:
            parts.link(rail, spine, "network", server.nic, _NETWORK_LATENCY / 2, num_nodes)
    for node in range(num_nodes):
        sockets = [parts.add(f"node{node}.cpu{socket}", "cpu", node) for socket in range(server.num_sockets)]
        for first, second in zip(sockets[::2], sockets[1::2]):
            parts.link(first, second, "socket", server.sockets)
        switches = [parts.add(f"node{node}.pci{number}", "pci", node) for number in range(server.num_switches)]
        for number, switch in enumerate(switches):
            parts.link(switch, sockets[number * len(sockets) // len(switches)], "pci", server.pci)
        gpus = [parts.add(f"node{node}.gpu{number}", "gpu", node, is_rank=True) for number in range(server.num_gpus)]
        for number, gpu in enumerate(gpus):
            parts.link(gpu, switches[number * len(switches) // len(gpus)], "pci", server.pci)
        server.connect(parts, gpus, node)
        for number in range(server.num_nics):
            nic = parts.add(f"node{node}.nic{number}", "nic", node)
            parts.link(nic, switches[number * len(switches) // server.num_nics], "pci", server.pci)
            if rails:
                parts.link(nic, rails[number], "network", server.nic, _NETWORK_LATENCY / 2)
    return parts.topology(name if num_nodes == 1 else f"{name} x {num_nodes}")


def _cube_mesh(parts: _Parts, gpus: list[str], node: int) -> None:
    for (a, b), count in DGX1_LINKS.items():
        parts.link(gpus[a], gpus[b], "nvlink", _NVLINK2, _NVLINK_LATENCY, count)


def _nvswitch(num_links: int, bandwidth: float) -> Callable[[_Parts, list[str], int], None]:
    def connect(parts: _Parts, gpus: list[str], node: int) -> None:
        switch = parts.add(f"node{node}.nvswitch", "switch", node)
        for gpu in gpus:
            parts.link(gpu, switch, "nvlink", bandwidth, _SWITCH_LATENCY, num_links)

    return connect


def _infinity_fabric(parts: _Parts, gpus: list[str], node: int) -> None:
    for number, gpu in enumerate(gpus):
        for other in gpus[number + 1 :]:
            parts.link(gpu, other, "xgmi", _XGMI)


# per machine: GPUs, PCIe switches, NICs, GB/s of a NIC, of PCIe and between sockets
_SERVERS = {
    # NVIDIA's data sheet and white paper WP-08437: two Xeons E5-2698 v4, four EDR NICs, one with two GPUs to a switch
    "dgx1_v100": _Server(8, 4, 4, _EDR, _pcie(8), _BROADWELL, _cube_mesh),
    # Azure's page of the NDv2 series: V100s linked as in a DGX-1, two Xeons 8168, one EDR NIC
    "ndv2": _Server(8, 4, 1, _EDR, _pcie(8), _SKYLAKE, _cube_mesh),
    # NVIDIA's user guide: two EPYCs 7742, eight HDR NICs; Azure's dump of ND A100 v4: two and two GPUs to a switch
    "dgx_a100": _Server(8, 4, 8, _HDR, _pcie(16), _ZEN2, _nvswitch(12, _NVLINK3)),
    # NVIDIA's DGX BasePOD reference architecture, its core components: two Xeons 8480C, eight NDR NICs; DGX H100 user
    # guide, table 6: a NIC for each GPU; Azure's dump of ND H100 v5: those two to a switch
    "dgx_h100": _Server(8, 8, 8, _NDR, _pcie(32), _SAPPHIRE_RAPIDS, _nvswitch(18, _NVLINK4)),
    "dgx_h200": _Server(8, 8, 8, _NDR, _pcie(32), _SAPPHIRE_RAPIDS, _nvswitch(18, _NVLINK4)),
    # MLPerf's descriptions of GB200 systems: trays of two Graces, four GPUs, four NICs. A rack of 18 trays is one node
    # here: what NVLink joins. GPUs reach their NIC by their Grace, over more than the NIC's PCIe carries.
    "gb200_nvl72": _Server(72, 72, 72, _NDR, _pcie(32), _ARM, _nvswitch(18, _NVLINK5), num_sockets=36),
    # RCCL's dump rccl_topo_8p_940: two Xeons of family 6, model 143; a GPU and an NDR NIC to a switch
    "mi300x": _Server(8, 8, 8, _NDR, _pcie(32), _SAPPHIRE_RAPIDS, _infinity_fabric),
}


def _server_preset(name: str) -> Callable[..., Topology]:
    def preset(num_nodes: int = 1) -> Topology:
        return _cluster(name, _SERVERS[name], num_nodes)

    preset.__name__ = name
    preset.__doc__ = f"`num_nodes` of {name}, whose NICs of one number are a rail."
    return preset


def ring(num_ranks: int, bandwidth: float = 1.0, latency: float = 0.0) -> Topology:
    """Each rank linked with the next; the last with the first."""
    pairs = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    closing = [(0, num_ranks - 1)] if num_ranks > 2 else []
    return _linked("ring", num_ranks, pairs + closing, bandwidth, latency)


def full_mesh(num_ranks: int, bandwidth: float = 1.0, latency: float = 0.0) -> Topology:
    """Each rank linked with each other one."""
    pairs = [(a, b) for a in range(num_ranks) for b in range(a + 1, num_ranks)]
    return _linked("full_mesh", num_ranks, pairs, bandwidth, latency)


def _linked(name: str, num_ranks: int, pairs: list[tuple[int, int]], bandwidth: float, latency: float) -> Topology:
    parts = _Parts()
    devices = [parts.add(f"gpu{rank}", "gpu", is_rank=True) for rank in range(num_ranks)]
    for a, b in pairs:
        parts.link(devices[a], devices[b], "nvlink", bandwidth, latency)
    return parts.topology(name)


def two_socket_host(
    cores_per_socket: int = 4, memory: float = _ddr(4800, 8), sockets: float = _SAPPHIRE_RAPIDS
) -> Topology:
    """A host whose ranks are cores of two sockets.

    `memory`: GB/s of a socket, by default Sapphire Rapids' eight channels of DDR5-4800; each core is taken to be able
    to use all of it, whatever the others do. `sockets`: between the two.
    """
    parts = _Parts()
    domains = [parts.add(f"cpu{socket}", "cpu") for socket in range(2)]
    parts.link(domains[0], domains[1], "socket", sockets)
    for socket, domain in enumerate(domains):
        for core in range(cores_per_socket):
            name = parts.add(f"core{socket * cores_per_socket + core}", "core", is_rank=True)
            parts.link(name, domain, "cache", memory)
    return parts.topology("two_socket_host")


#: by name; machines of GPUs take `num_nodes`
PRESETS: dict[str, Callable[..., Topology]] = {
    "ring": ring, "full_mesh": full_mesh, "two_socket_host": two_socket_host,
    **{name: _server_preset(name) for name in _SERVERS},
}  # fmt: skip
