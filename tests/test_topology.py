"""Topologies: routes, presets, dumps that others made, this machine, and orders of rings."""

from __future__ import annotations

import random
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.simulation.network import RoutedNetwork
from epcomm.simulation.rounds import Round, Schedule
from epcomm.topology import PRESETS, Device, Link, Topology, crossings, from_nccl_xml, read_host, ring_order
from epcomm.topology.host import parse_list

DUMPS = {path.stem: path for path in (Path(__file__).parent / "data" / "topology").glob("*.xml")}


def hops(topology: Topology, order: list[int]) -> list[float]:
    """Bandwidths of a ring's hops."""
    return [topology.bandwidth(a, b) for a, b in zip(order, order[1:] + order[:1])]


def test_crossings_of_two_nodes_of_four():
    def node_of(rank: int) -> int:
        return rank // 4

    assert crossings([0, 4, 1, 5, 2, 6, 3, 7], node_of) == 8
    assert crossings(range(8), node_of) == 2
    least = min(crossings(order, node_of) for order in permutations(range(8)))
    assert least == 2


def placed(node_of: list[int]) -> Topology:
    """GPUs in nodes, all linked, slowly between nodes."""
    devices = tuple(Device(f"gpu{rank}", "gpu", node) for rank, node in enumerate(node_of))
    links = tuple(
        Link(f"gpu{a}", f"gpu{b}", "nvlink", 100 if node_of[a] == node_of[b] else 10)
        for a in range(len(devices)) for b in range(a)
    )  # fmt: skip
    return Topology("placed", devices, links, tuple(device.name for device in devices))


@pytest.mark.parametrize(
    "node_of, wanted",
    [([0, 1] * 4, 2), ([0, 0, 1, 1, 0, 0, 1, 1], 2), ([2, 1, 0, 2, 1, 0], 3), ([0, 0, 0], 0), ([0], 0)],
)
def test_a_ring_enters_each_node_once(node_of, wanted):
    topology = placed(node_of)
    order = ring_order(topology)
    assert sorted(order) == list(range(len(node_of)))
    assert crossings(order, topology.node_of) == wanted
    # and a plan of that ring sends over no other links
    plan = ALGORITHMS["ring"].plan("allreduce", len(node_of), order=order)
    links = {(position.rank, step.send_to) for position, step in plan.steps() if step.op.sends}
    assert sum(node_of[a] != node_of[b] for a, b in links) == wanted


def test_the_ring_of_a_dgx1_is_of_double_links():
    topology = PRESETS["dgx1_v100"]()
    assert hops(topology, list(range(8))) != [50.0] * 8
    assert hops(topology, ring_order(topology)) == [50.0] * 8


@pytest.mark.parametrize("seed", range(10))
def test_orders_in_a_machine_are_the_best(seed):
    """Against all orders, on links of random speeds: the slowest hop first, then the sum of 1 / bandwidth."""
    choose = random.Random(seed)
    devices = tuple(Device(f"gpu{rank}", "gpu") for rank in range(6))
    pairs = [(a, b) for a in range(6) for b in range(a)]
    links = tuple(Link(f"gpu{a}", f"gpu{b}", "nvlink", choose.choice([10, 20, 25, 50])) for a, b in pairs)
    topology = Topology("random", devices, links, tuple(device.name for device in devices))

    def rated(order: list[int]) -> tuple[float, float]:
        return min(hops(topology, order)), -sum(1 / bandwidth for bandwidth in hops(topology, order))

    best = max(rated([0, *rest]) for rest in permutations(range(1, 6)))
    assert rated(ring_order(topology)) == pytest.approx(best)


def test_routes():
    topology = PRESETS["dgx1_v100"]()
    direct = topology.route(0, 1)
    assert (direct.devices, direct.bandwidth, direct.latency) == (("node0.gpu0", "node0.gpu1"), 50, 0.7)
    # no NVLink from 0 to 5, and GPUs don't forward: by way of the sockets
    around = topology.route(0, 5)
    assert around.devices == ("node0.gpu0", "node0.pci0", "node0.cpu0", "node0.cpu1", "node0.pci2", "node0.gpu5")
    assert around.bandwidth == 6
    cluster = PRESETS["dgx_h100"](2)
    same_rail, other_rail = cluster.route(1, 9), cluster.route(1, 10)
    assert "rail1" in same_rail.devices and "spine" not in same_rail.devices
    assert same_rail.bandwidth == other_rail.bandwidth == 50
    assert cluster.route(0, 1).devices == ("node0.gpu0", "node0.nvswitch", "node0.gpu1")
    assert cluster.route(0, 1).bandwidth == 450
    lonely = Topology("lonely", (Device("a", "gpu"), Device("b", "gpu")), (), ("a", "b"))
    assert lonely.bandwidth(0, 1) == 0
    with pytest.raises(ConfigError, match="no way from a to b"):
        lonely.route(0, 1)


# name: GB/s between the first two ranks, links of each GPU to others or a switch, NICs
MACHINES = {
    "dgx1_v100": (50, 6, 4), "ndv2": (50, 6, 1), "dgx_a100": (300, 12, 8), "dgx_h100": (450, 18, 8),
    "dgx_h200": (450, 18, 8), "gb200_nvl72": (900, 18, 72), "mi300x": (64, 7, 8),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
def test_machines(name):
    bandwidth, num_links, num_nics = MACHINES[name]
    topology = PRESETS[name]()
    assert topology.bandwidth(0, 1) == bandwidth
    for rank in topology.ranks:
        fabric = [link for link in topology.links if rank in (link.a, link.b) and link.kind in ("nvlink", "xgmi")]
        assert sum(link.count for link in fabric) == num_links
    assert sum(device.kind == "nic" for device in topology.devices) == num_nics
    assert topology.num_ranks == (72 if name == "gb200_nvl72" else 8) and len(topology.nodes) == 1
    if num_nics == topology.num_ranks:
        assert [topology.rail(rank) for rank in range(topology.num_ranks)] == list(range(topology.num_ranks))
    if name != "gb200_nvl72":
        cluster = PRESETS[name](3)
        assert [len(node) for node in cluster.nodes] == [8] * 3
        order = ring_order(cluster)
        assert crossings(order, cluster.node_of) == 3
        assert cluster.bandwidth(0, 8) <= cluster.bandwidth(0, 1)
        assert cluster.bandwidth(0, 8) > 0


# GB/s that a node's NICs carry, and how many of its ranks share one
NETWORKS = {
    "dgx1_v100": (4 * 12.5, 2), "ndv2": (12.5, 8), "dgx_a100": (8 * 25, 1), "dgx_h100": (8 * 50, 1),
    "dgx_h200": (8 * 50, 1), "mi300x": (8 * 50, 1), "gb200_nvl72": (72 * 50, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    "name, num_nodes", [*((name, 2) for name in NETWORKS), *((name, 4) for name in NETWORKS if name != "gb200_nvl72")]
)
def test_half_of_the_nodes_to_the_other_half(name, num_nodes):
    """The bisection: each rank sends to its counterpart, or to the one beside it, all at once."""
    bandwidth, sharing = NETWORKS[name]
    cluster = PRESETS[name](num_nodes)
    size, half = len(cluster.nodes[0]), cluster.num_ranks // 2
    links = [link for link in cluster.links if link.kind == "network" and cluster.device(link.a).node == 0]
    assert sum(link.total for link in links) == bandwidth
    assert Counter(cluster.nic(rank) for rank in range(size)) == {link.a: sharing for link in links}
    assert [cluster.rail(rank) for rank in range(size, 2 * size)] == [cluster.rail(rank) for rank in range(size)]
    ranks = np.arange(half)
    for shift in (0, 1):
        counterparts = half + ranks // size * size + (ranks + shift) % size
        route = cluster.route(0, int(counterparts[0]))
        crosses_rails = cluster.rail(0) != cluster.rail(int(counterparts[0]))
        assert ("spine" in route.devices) == crosses_rails
        both_ways = [Round(np.concatenate([ranks, counterparts]), np.concatenate([counterparts, ranks]), 1.0)]
        taken = Schedule(both_ways, RoutedNetwork(cluster)).times(10**7).max()
        latency = max(cluster.route(a, b).latency for a, b in zip(ranks.tolist(), counterparts.tolist()))
        assert size * 10**7 / (taken - latency) / 1e3 == pytest.approx(bandwidth)
    assert crossings(ring_order(cluster), cluster.node_of) == num_nodes


def test_nics_do_not_forward():
    cluster = PRESETS["dgx_a100"](2)  # two NICs below each PCIe switch
    route = cluster.route(1, 8)
    assert [device for device in route.devices if "nic" in device] == ["node0.nic1", "node1.nic0"]
    assert route.devices.count("spine") == 1 and route.latency == pytest.approx(2 * 1.3)


def test_other_presets():
    assert hops(PRESETS["ring"](5, bandwidth=7.0), [0, 1, 2, 3, 4]) == [7.0] * 5
    assert PRESETS["ring"](5).bandwidth(0, 2) == 0
    assert [len(PRESETS["ring"](size).links) for size in (1, 2, 3)] == [0, 1, 3]
    assert len(PRESETS["full_mesh"](6).links) == 15
    host = PRESETS["two_socket_host"](3)
    ddr5, upi = 8 * 4.8 * 8, 22  # eight channels, 8 bytes wide
    assert host.num_ranks == 6 and host.bandwidth(0, 1) == pytest.approx(ddr5) and host.bandwidth(0, 3) == upi
    assert sorted(hops(host, ring_order(host))) == pytest.approx([upi] * 2 + [ddr5] * 4)
    with pytest.raises(ConfigError, match="num_nodes: wanted an integer >= 1, got 0"):
        PRESETS["dgx_h100"](0)


def test_a_ring_found_by_neighbours_where_there_are_many_ranks():
    """32 GPUs on a ring of links, numbered at random: the order follows the links."""
    numbers = list(range(32))
    random.Random(3).shuffle(numbers)
    devices = tuple(Device(f"gpu{rank}", "gpu") for rank in range(32))
    links = tuple(Link(f"gpu{a}", f"gpu{b}", "xgmi", 50) for a, b in zip(numbers, numbers[1:] + numbers[:1]))
    host = tuple(Link(device.name, "cpu", "pci", 5) for device in devices)
    topology = Topology("ring", (*devices, Device("cpu", "cpu")), links + host, tuple(d.name for d in devices))
    assert hops(topology, ring_order(topology)) == [50] * 32


@pytest.mark.parametrize(
    "devices, links, ranks, problem",
    [
        ([("a", "gpu"), ("a", "gpu")], [], ["a"], "same name"),
        ([("a", "tpu")], [], ["a"], "wanted one of"),
        ([("a", "gpu")], [("a", "b", 1)], ["a"], "joins two devices"),
        ([("a", "gpu")], [("a", "a", 1)], ["a"], "joins two devices"),
        ([("a", "gpu"), ("b", "gpu")], [("a", "b", 0)], ["a"], "bandwidth and count > 0"),
        ([("a", "gpu")], [], ["a", "a"], "once each"),
        ([("a", "gpu")], [], ["b"], "once each"),
    ],
)
def test_topologies_that_are_none(devices, links, ranks, problem):
    with pytest.raises(ConfigError, match=problem):
        Topology(
            "test", tuple(Device(*device) for device in devices),
            tuple(Link(a, b, "pci", bandwidth) for a, b, bandwidth in links), tuple(ranks),
        )  # fmt: skip


# what is in each dump: GPUs, fabric links in all, NICs, the fastest ring's slowest hop
IN_DUMPS = {
    "aws_p4d": (8, 0, 4, 10), "azure_ndv4": (8, 0, 8, 16), "azure_ndv5": (8, 0, 8, 22),
    "rccl_topo_4p3l": (4, 6, 2, 46), "rccl_topo_8p6l": (8, 24, 1, 46), "rccl_topo_8p_90a": (8, 12, 1, 50),
    "rccl_topo_8p_940": (8, 28, 8, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_DUMPS)
def test_dumps_that_others_made(name):
    num_gpus, num_links, num_nics, slowest = IN_DUMPS[name]
    topology = from_nccl_xml(DUMPS[name].read_text(), name)
    assert topology.num_ranks == num_gpus
    assert sum(link.count for link in topology.links if link.kind == "xgmi") == num_links
    assert sum(device.kind == "nic" for device in topology.devices) == num_nics
    order = ring_order(topology)
    assert sorted(order) == list(range(num_gpus)) and min(hops(topology, order)) == slowest
    assert {topology.rail(rank) for rank in range(num_gpus)} <= set(range(num_nics))


def test_rails_of_a_dump():
    topology = from_nccl_xml(DUMPS["rccl_topo_8p_940"].read_text())
    assert [topology.rail(rank) for rank in range(8)] == list(range(8))


DUMP = """\
<system version="1">
  <cpu numaid="0" arch="x86_64" vendor="GenuineIntel" familyid="6" modelid="143">
    <pci busid="0000:01:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
      <gpu dev="0" sm="90" rank="1" gdr="1">
        <nvlink target="0000:09:00.0" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
    <pci busid="0000:02:00.0" class="0x030200" link_speed="16 GT/s" link_width="16">
      <gpu dev="1" sm="90" rank="0" gdr="1">
        <nvlink target="0000:09:00.0" count="18" tclass="0x068000"/>
      </gpu>
    </pci>
  </cpu>
</system>
"""


def test_a_dump_with_nvlinks():
    topology = from_nccl_xml(DUMP)
    assert topology.ranks == ("gpu1", "gpu0") and topology.bandwidth(0, 1) == pytest.approx(18 * 20.6)
    between = DUMP.replace('target="0000:09:00.0" count="18" tclass="0x068000"', 'target="0000:02:00.0" count="4"', 1)
    between = between.replace('target="0000:09:00.0" count="18" tclass="0x068000"', 'target="0000:01:00.0" count="4"')
    topology = from_nccl_xml(between)
    assert [(link.a, link.b, link.count) for link in topology.links if link.kind == "nvlink"] == [("gpu0", "gpu1", 4)]
    slow = from_nccl_xml(DUMP.replace("nvlink", "other"))
    assert slow.bandwidth(0, 1) == 24  # NCCL's PCIe 4 x16


@pytest.mark.parametrize(
    "old, new, line, reason",
    [
        ("</system>", "", 15, "not XML"),
        ("<system", "<machine", 14, "not XML"),
        ('<gpu dev="0" sm="90"', '<gpu dev="0"', 4, "misses the attribute sm"),
        ('numaid="0"', 'numaid="zero"', 2, "numaid: wanted an integer"),
        ('link_speed="16 GT/s"', 'link_speed="fast"', 3, "link_speed: wanted a number"),
        ('<pci busid="0000:01:00.0"', "<pci", 3, "misses the attribute busid"),
        ('dev="1"', 'dev="0"', 8, "gpu0 is there twice"),
        ('target="0000:09:00.0" ', "", 5, "misses the attribute target"),
    ],
)
def test_malformed_dumps(old, new, line, reason):
    assert old in DUMP
    with pytest.raises(ConfigError, match=rf"mine, line {line}:") as caught:
        from_nccl_xml(DUMP.replace(old, new, 1), "mine")
    assert reason in str(caught.value)


def test_dumps_of_nothing():
    with pytest.raises(ConfigError, match="it has no GPUs"):
        from_nccl_xml("<system/>")
    with pytest.raises(ConfigError, match="wanted <system>"):
        from_nccl_xml("<graphs/>")
    xgmi = DUMPS["rccl_topo_4p3l"].read_text().replace('gcn="908"', 'gcn="1"')
    with pytest.raises(ConfigError, match="gcn: how fast its links are is known of"):
        from_nccl_xml(xgmi)


def test_this_machine():
    topology = read_host()
    assert topology.num_ranks >= 1 and topology.unit == "relative"
    assert all(topology.bandwidth(0, rank) > 0 for rank in range(1, topology.num_ranks))
    caches = [device for device in topology.devices if device.kind == "cache"]
    assert all(cache.num_bytes > 0 for cache in caches)
    assert sorted(ring_order(topology)) == list(range(topology.num_ranks))


def fake_host(root: Path, cores_of_domain: list[list[int]], threads: int = 1) -> None:
    """Files as Linux has them: each domain's cores share a cache; core c and c + number are threads of one."""
    number = sum(map(len, cores_of_domain))
    files = {"cpu/online": f"0-{number * threads - 1}\n", "node/online": f"0-{len(cores_of_domain) - 1}\n"}
    for domain, cores in enumerate(cores_of_domain):
        everyone = ",".join(str(core + number * thread) for thread in range(threads) for core in cores)
        distances = " ".join("10" if other == domain else "32" for other in range(len(cores_of_domain)))
        files |= {f"node/node{domain}/cpulist": everyone, f"node/node{domain}/distance": distances}
        for core in cores:
            siblings = ",".join(str(core + number * thread) for thread in range(threads))
            for thread in range(threads):
                folder = f"cpu/cpu{core + number * thread}"
                files[f"{folder}/topology/thread_siblings_list"] = siblings
                caches = (("1", "Data", siblings), ("1", "Instruction", siblings), ("3", "Unified", everyone))
                for index, (level, kind, shared) in enumerate(caches):
                    fields = {"level": level, "type": kind, "shared_cpu_list": shared, "size": f"{32 * int(level)}K"}
                    files |= {f"{folder}/cache/index{index}/{name}": text + "\n" for name, text in fields.items()}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_host_of_two_sockets(tmp_path):
    fake_host(tmp_path, [[0, 2, 4], [1, 3, 5]], threads=2)
    topology = read_host(tmp_path)
    assert topology.ranks == tuple(f"core{core}" for core in range(6))
    assert topology.bandwidth(0, 2) == 1 and topology.bandwidth(0, 1) == 10 / 32
    assert topology.route(0, 2).devices == ("core0", "L1 of 0", "L3 of 0", "L1 of 2", "core2")
    assert topology.route(0, 1).devices[2:6] == ("L3 of 0", "cpu0", "cpu1", "L3 of 1")
    assert (topology.device("L1 of 0").num_bytes, topology.device("L3 of 1").num_bytes) == (32 * 1024, 96 * 1024)
    assert sum(device.kind == "cache" for device in topology.devices) == 6 + 2
    order = ring_order(topology)
    assert crossings(order, lambda rank: rank % 2) == 2
    with pytest.raises(UnsupportedError, match="doesn't describe cores"):
        read_host(tmp_path / "elsewhere")


def test_as_many_ranks_of_a_host_as_wanted(tmp_path):
    fake_host(tmp_path, [[0, 2, 4], [1, 3, 5]])
    six = read_host(tmp_path)
    assert read_host(tmp_path, num_ranks=6) == six
    few = read_host(tmp_path, num_ranks=2)
    assert few == six.first_ranks(2) and few.ranks == ("core0", "core1")
    many = read_host(tmp_path, num_ranks=14)  # twice or three times as many as cores
    assert len(set(many.ranks)) == 14 and many.ranks[:6] == six.ranks
    for rank in range(6, 14):
        shared = rank % 6
        assert many.route(rank, shared).devices[1:-1] == (f"L1 of {shared}",)
        assert all(
            many.route(rank, other).devices[1:] == six.route(shared, other).devices[1:]
            for other in range(6) if other != shared
        )  # fmt: skip


def test_parts_of_a_topology():
    machine = PRESETS["dgx1_v100"]()
    part = machine.first_ranks(3)
    assert part.ranks == machine.ranks[:3] and part.name == machine.name
    assert [device.name for device in part.devices if device.kind == "gpu"] == list(part.ranks)
    assert part.bandwidth(0, 1) == machine.bandwidth(0, 1) and machine.first_ranks(8) == machine
    for number in (0, 9):
        with pytest.raises(ConfigError, match=f"wanted 1 to 8 ranks of it, got {number}"):
            machine.first_ranks(number)


def test_fingerprints_tell_topologies_apart():
    ring = PRESETS["ring"](4)
    mesh, slower = PRESETS["full_mesh"](4), PRESETS["ring"](4, 2.0)
    others = [mesh, slower, PRESETS["ring"](5), ring.scaled(3.0), ring.first_ranks(3)]
    assert ring.fingerprint == PRESETS["ring"](4).fingerprint
    assert len({topology.fingerprint for topology in (ring, *others)}) == 1 + len(others)
    assert (ring.scaled(3.0).bandwidth(0, 1), ring.scaled(3.0).unit) == (3.0, "GB/s")


def test_lists_of_numbers():
    assert parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_list("") == []
