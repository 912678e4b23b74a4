"""Topologies as NCCL and RCCL write them (NCCL_TOPO_DUMP_FILE), of one machine.

    <system version>
      <cpu numaid arch vendor familyid modelid affinity>
        <pci busid class link_speed link_width>
          <gpu dev sm rank gdr> <nvlink target count tclass/>  or on AMD's  <xgmi target count tclass/>
          <nic> <net name dev speed port guid gdr latency maxconn/>

Dumps differ: some have GPUs as <pci> of a GPU's class without <gpu>, and NVLinks not at all. Bandwidths are in GB/s per
direction, as in NCCL's model (src/graph/topo.h and xml.h, 2026): of an NVLink by the GPU's sm, between sockets by the
CPU, of PCIe by speed and width. A link of xGMI has that of AMD's data sheets (MI100: 46, MI200: 50, MI300: 64). NICs
have theirs in the dump, or that of their PCIe.
"""

from __future__ import annotations

import itertools
import math

from epcomm.topology.machine import Device, Link, Topology
from epcomm.xml_elements import Element, parse_xml

_GPU_CLASSES = ("0x0302", "0x0300", "0x0380", "0x1200")  # 3D, VGA, display controllers; processing accelerators
_NIC_CLASSES = ("0x0200", "0x0207")
_NVSWITCH_CLASS = "0x0680"

# (from this sm on, GB/s of one NVLink)
_NVLINK = ((100, 40.1), (90, 20.6), (80, 20.0), (70, 20.0), (0, 18.0))
# GB/s of one link of xGMI by the GPU's gcn
_XGMI = {"908": 46.0, "910": 50.0, "gfx90a": 50.0, "gfx942": 64.0}
# GB/s of a lane of PCIe per GT/s: NCCL takes PCIe 3 x16 (8 GT/s) for 12 GB/s
_LANE = 12 / 16 / 8


def from_nccl_xml(text: str, where: str = "topology") -> Topology:
    """The topology of a dump, ranks in the order of `rank`, or else of the document.

    ConfigError with the line and the reason if it is none.
    """
    system = parse_xml(text, where)
    if system.tag != "system":
        system.wrong("wanted <system>")
    return _Reader(system).topology()


class _Reader:
    def __init__(self, system: Element):
        self.devices: list[Device] = []
        self.links: list[Link] = []
        self._gpus: dict[str, tuple[int, str]] = {}  # PCI bus id: (rank, name)
        self._meshes: list[tuple[Element, str, str, float]] = []  # <nvlink> or <xgmi>, GPU, kind, bandwidth
        self._system = system
        domains = []
        for cpu in system.find("cpu"):
            name = f"cpu{cpu.integer('numaid')}"
            self._add(name, "cpu", cpu)
            domains.append((cpu, name))
            self._read_nics(cpu, name, math.inf)  # those without a PCI device, virtual ones
            self._read_below(cpu, name)
        for (cpu, a), (_, b) in itertools.combinations(domains, 2):
            self._link(cpu, a, b, "socket", _socket_bandwidth(cpu))
        self._read_meshes()

    def topology(self) -> Topology:
        ranks = tuple(name for _, name in sorted(self._gpus.values()))
        if not ranks:
            self._system.wrong("it has no GPUs")
        return Topology(self._system.where, tuple(self.devices), tuple(self.links), ranks)

    def _add(self, name: str, kind: str, element: Element) -> None:
        if any(device.name == name for device in self.devices):
            element.wrong(f"{name} is there twice")
        self.devices.append(Device(name, kind))

    def _link(self, element: Element, a: str, b: str, kind: str, bandwidth: float, count: int = 1) -> None:
        if a == b or not (bandwidth > 0 and count > 0):
            wanted = "wanted a link to another device, and its bandwidth and count > 0"
            element.wrong(f"{wanted}, got {count} of {bandwidth:g} GB/s from {a} to {b}")
        self.links.append(Link(a, b, kind, bandwidth, 0.0, count))

    def _read_below(self, parent: Element, above: str) -> None:
        """The PCI devices below a NUMA domain or bridge. `above` is the device they hang on."""
        for pci in parent.find("pci"):
            bus, code = pci.text("busid").lower(), pci.text("class").lower()
            gpu = next(pci.find("gpu"), None)
            if gpu is not None or code.startswith(_GPU_CLASSES) and not list(pci.find("pci")):
                self._read_gpu(pci, gpu, bus, above)
            elif list(pci.find("nic")):
                self._read_nics(pci, above, _pci_bandwidth(pci))
            elif code.startswith(_NIC_CLASSES):
                self._add(f"nic {bus}", "nic", pci)
                self._link(pci, f"nic {bus}", above, "pci", _pci_bandwidth(pci))
            elif list(pci.find("pci")):
                self._add(f"pci {bus}", "pci", pci)
                self._link(pci, f"pci {bus}", above, "pci", _pci_bandwidth(pci))
                self._read_below(pci, f"pci {bus}")

    def _read_gpu(self, pci: Element, gpu: Element | None, bus: str, above: str) -> None:
        number = len(self._gpus)
        rank = number if gpu is None else gpu.integer("rank", number)
        name = f"gpu{number if gpu is None else gpu.integer('dev', number)}"
        self._add(name, "gpu", pci)
        self._gpus[bus] = (rank, name)
        self._link(pci, name, above, "pci", _pci_bandwidth(pci))
        for element in () if gpu is None else gpu.children:
            if element.tag == "nvlink":
                assert gpu is not None
                sm = gpu.integer("sm")
                bandwidth = next(bandwidth for first, bandwidth in _NVLINK if sm >= first)
                self._meshes.append((element, name, "nvlink", bandwidth))
            elif element.tag == "xgmi":
                assert gpu is not None
                gcn = gpu.text("gcn")
                if gcn not in _XGMI:
                    gpu.wrong(f"gcn: how fast its links are is known of {', '.join(_XGMI)}, got {gcn!r}")
                self._meshes.append((element, name, "xgmi", _XGMI[gcn]))

    def _read_nics(self, parent: Element, above: str, bandwidth: float) -> None:
        """The networks of a device, each of them a NIC of its own here."""
        for net in (net for nic in parent.find("nic") for net in nic.find("net")):
            name = f"nic{net.integer('dev')}"
            self._add(name, "nic", net)
            self._link(net, name, above, "pci", min(bandwidth, net.number("speed") / 8000))  # from Mb/s

    def _read_meshes(self) -> None:
        """Links between GPUs, which the dump has at both ends, and to NVSwitches, all of which are one here."""
        seen: set[tuple[str, str]] = set()
        for element, name, kind, bandwidth in self._meshes:
            target, count = element.text("target").lower(), element.integer("count", 1)
            if element.text("tclass", "").lower().startswith(_NVSWITCH_CLASS):
                other = "nvswitch"
                if not any(device.name == other for device in self.devices):
                    self._add(other, "switch", element)
            elif target in self._gpus:
                other = self._gpus[target][1]
            else:
                continue  # a GPU that the dump's process doesn't see
            if (other, name) not in seen:
                self._link(element, name, other, kind, bandwidth, count)
                seen.add((name, other))


def _pci_bandwidth(pci: Element) -> float:
    """GB/s of a PCI device's link upwards; of PCIe 3 x16 where the dump doesn't know it, as NCCL takes it."""
    speed = pci.text("link_speed", "")
    if not speed or speed.startswith("Unknown"):
        return 12.0
    return pci.number("link_speed") * (pci.integer("link_width") or 16) * _LANE


def _socket_bandwidth(cpu: Element) -> float:
    """GB/s between two NUMA domains, by the CPU."""
    vendor, family, model = cpu.text("vendor", ""), cpu.integer("familyid", 0), cpu.integer("modelid", 0)
    if vendor == "AuthenticAMD":
        return 32.0 if family >= 0xBF else 24.0 if family >= 0xAF else 16.0
    if vendor == "GenuineIntel":
        return 40.0 if model >= 0xCF else 22.0 if model >= 0x8F else 10.0 if model >= 0x55 else 6.0
    return 6.0


