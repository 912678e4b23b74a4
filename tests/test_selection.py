"""What `auto` means for an allreduce: by the request and the machine a kernel or a plan, and ranks that run it."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_cases import addend, reduced, same_bits
from failure_cases import raised_by
from host_cases import on_hosts

import epcomm
from epcomm.collectives import reductions
from epcomm.collectives.cost.choice import Candidate, Request, choose
from epcomm.collectives.cost.kernels import octave
from epcomm.collectives.cost.machines import Machine, find_machine
from epcomm.collectives.plan.lower import prove
from epcomm.collectives.selection import chosen_kernel, chosen_on
from epcomm.errors import ConfigError, PeerFailedError
from epcomm.explain.explanation import explain
from epcomm.kernels.protocol.collectives import ONE_SHOT_BYTES
from epcomm.kernels.protocol.lines import PROTOCOLS
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import rank_outcomes, run_ranks
from epcomm.topology import PRESETS, Device, Link, Topology, crossings, known_gpus, read_host

MIB = 1 << 20
SIZES = (16, 1024, ONE_SHOT_BYTES, ONE_SHOT_BYTES + 16, 3 << 16, MIB, 16 * MIB, 256 * MIB)


def renumbered(topology: Topology, ranks: list[int]) -> Topology:
    """The machine with its devices in the hands of other ranks."""
    return dataclasses.replace(topology, ranks=tuple(topology.ranks[rank] for rank in ranks))


def bridged_pairs() -> Topology:
    """Four GPUs on one PCIe switch, of which 0 and 2, 1 and 3 are joined by NVLink bridges."""
    gpus = [f"gpu{number}" for number in range(4)]
    return Topology(
        "bridged pairs",
        (Device("switch", "pci"), *(Device(name, "gpu") for name in gpus)),
        (
            *(Link(name, "switch", "pci", 32.0) for name in gpus),
            *(Link(*ends, "nvlink", 300.0, 0.7) for ends in (("gpu0", "gpu2"), ("gpu1", "gpu3"))),
        ),
        tuple(gpus),
    )


#: small machines, and the dtypes of which a kernel sums 250,001 numbers there: pairs differ in all but the last
MACHINES = {
    "ring of 5": (PRESETS["ring"](5, 25.0, 0.7), set[str]()),
    "twisted ring": (renumbered(PRESETS["ring"](4, 25.0, 0.7), [0, 2, 1, 3]), set[str]()),
    "half a DGX-1": (PRESETS["dgx1_v100"]().first_ranks(4), set[str]()),
    "bridged pairs": (bridged_pairs(), {"bfloat16"}),
    "mesh": (PRESETS["full_mesh"](4, 25.0, 0.7), {"float32", "bfloat16"}),
}


@cache
def machine(name: str, num_ranks: int) -> Machine:
    return find_machine(name, num_ranks)


def chosen(topology: Topology, num_bytes: int, dtype: str = "float32", **options: Any) -> Candidate:
    return choose(Request(num_bytes, Machine.of(topology), dtype, **options))


# ---- what is chosen


@pytest.mark.parametrize("name", ["host", "two_socket_host"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_on_cores_it_is_the_measured_kernel(name: str, num_ranks: int) -> None:
    for num_bytes, dtype, programs in itertools.product(SIZES, ("float32", "bfloat16", "int8"), (1, 4)):
        for known in (machine(name, num_ranks), Machine.of(read_host(num_ranks=num_ranks))):
            found = choose(Request(num_bytes, known, dtype, num_programs=programs))
            assert found.is_kernel and found.runs
            assert found.algorithm == chosen_kernel("auto", num_bytes, spans_hosts=False)
            assert found.algorithm == ("one_shot" if num_bytes <= ONE_SHOT_BYTES else "two_shot")


def test_one_nvswitch_joins_all_pairs_alike() -> None:
    for num_bytes in (MIB, 4 * MIB):
        found = choose(Request(num_bytes, machine("dgx_h100", 8)))
        assert (found.algorithm, found.is_kernel) == ("two_shot", True)


def test_where_pairs_differ_plans_follow_the_links() -> None:
    large = chosen(PRESETS["dgx1_v100"](), 64 * MIB)
    assert large.channels > 1 and chosen(PRESETS["dgx1_v100"](), 64 * MIB, num_programs=1).channels == 1
    twisted, half = (chosen(MACHINES[name][0], 4 * MIB, num_programs=2) for name in ("twisted ring", "half a DGX-1"))
    for found, order in ((large, (0, 1, 3, 2, 6, 7, 5, 4)), (twisted, (0, 2, 1, 3)), (half, (0, 1, 3, 2))):
        assert found.algorithm in ("ring", "bidirectional_ring") and not found.is_kernel
        ring = set(zip(order, (*order[1:], order[0])))
        ways = [(position.rank, step.send_to) for position, step in found.plan.steps() if step.send_to is not None]
        assert ring <= set(ways) <= ring | {(b, a) for a, b in ring}


def test_pairs_joined_by_bridges() -> None:
    """Halves are exchanged over NVLink, quarters over PCIe; a ring would enter each pair once."""
    found = chosen(bridged_pairs(), 64 * MIB)
    assert (found.algorithm, found.is_kernel) == ("halving_doubling", False)
    assert crossings(found.request.machine.world.order, lambda rank: rank % 2) == 2


def test_ranks_that_no_links_join_are_reached_nevertheless() -> None:
    """By plans that follow the links, of 16-bit sums too; by load and store, without a price, if there is no way."""
    for op, is_wide in (("sum", True), ("avg", True), ("max", False)):  # that rounds nothing
        found = chosen(MACHINES["twisted ring"][0], MIB, "bfloat16", op=op)
        assert not found.is_kernel and found.has_price and (found.wide_sums, found.plan.wide_sums) == (is_wide, is_wide)
    devices = tuple(Device(f"gpu{number}", "gpu") for number in range(4))
    names = tuple(device.name for device in devices)
    pairs = (Link("gpu0", "gpu1", "nvlink", 300.0, 0.7), Link("gpu2", "gpu3", "nvlink", 300.0, 0.7))
    found = chosen(Topology("pairs apart", devices, pairs, names), MIB)
    assert (found.algorithm, found.is_kernel, found.has_price) == ("two_shot", True, False)


def test_several_nodes_have_one_kernel() -> None:
    for num_bytes in SIZES:
        found = choose(Request(num_bytes, machine("dgx_h100", 16), "bfloat16"))
        assert (found.algorithm, found.is_kernel) == ("hierarchical", True) and found.rounds_once


LARGER = [PRESETS[name]() for name in ("dgx1_v100", "dgx_h100", "mi300x")]
TOLD = [*(topology for topology, _ in MACHINES.values()), PRESETS["ring"](2), *LARGER]


@pytest.mark.parametrize("topology", TOLD, ids=lambda topology: f"{topology.name} {topology.num_ranks}")
def test_16_bit_sums_round_once(topology: Topology) -> None:
    ways = itertools.product(SIZES, ("bfloat16", "float16"), ("sum", "avg"), (1, 16))
    for num_bytes, dtype, op, programs in itertools.islice(ways, 0, None, 5):  # every value meets every other one
        found = chosen(topology, num_bytes, dtype, op=op, num_programs=programs)
        assert found.runs and found.rounds_once and found.roundings <= 1
        if not found.is_kernel:
            assert prove(found.plan).proof.roundings <= 1 and (found.plan.wide_sums or op != "avg")


@pytest.mark.parametrize("topology", TOLD, ids=lambda topology: f"{topology.name} {topology.num_ranks}")
def test_what_is_chosen_can_run(topology: Topology) -> None:
    for num_bytes, programs in itertools.product(SIZES[1::2], (1, 3, 16)):
        found = chosen(topology, num_bytes, num_programs=programs)
        assert found.is_kernel or found.protocol in PROTOCOLS and found.channels <= programs
        assert found.is_kernel or prove(found.plan).proof.same_bits
    twin = Topology(topology.name, topology.devices, topology.links, topology.ranks)
    assert chosen(twin, MIB) == chosen(topology, MIB)
    assert chosen(topology, MIB).algorithm == chosen(topology, MIB, "complex64").algorithm


def test_what_is_known_of_gpus() -> None:
    for name, wanted in (("NVIDIA H100 80GB HBM3", "dgx_h100"), ("NVIDIA H200", "dgx_h200"),
                         ("NVIDIA GB200", "gb200_nvl72")):  # fmt: skip
        assert known_gpus(name, 4, has_switch=True) == PRESETS[wanted]().first_ranks(4)
        assert known_gpus(name, 4, has_switch=False).unit == "relative"
    for name, num_ranks in (("NVIDIA GH200 480GB", 4), ("NVIDIA A100-SXM4-80GB", 8), ("NVIDIA H100 80GB HBM3", 9)):
        unknown = known_gpus(name, num_ranks, has_switch=True)
        assert (unknown.num_ranks, unknown.unit) == (num_ranks, "relative")
        assert chosen(unknown, MIB).algorithm == "two_shot" and chosen(unknown, 1024).algorithm == "one_shot"


def test_sizes_are_chosen_by_octaves() -> None:
    for name, most in (("ring", 1 << 22), ("dgx_h100", 1 << 18)):
        topology = PRESETS[name](8) if name == "ring" else PRESETS[name]()
        for num_bytes in range(4, most, most // 50 * 4):
            ways = [(each.algorithm, each.protocol, each.channels, each.pieces)
                    for each in (chosen(topology, num_bytes), chosen(topology, octave(num_bytes)))]  # fmt: skip
            assert ways[0] == ways[1] and octave(num_bytes) // 2 < num_bytes <= octave(num_bytes)


# ---- on ranks


def check_sums(comm: epcomm.Communicator, num_items: int, dtype: torch.dtype, op: str = "sum") -> None:
    """Three calls, out of place, in place, asynchronous, and three of a bound one, by definition."""
    rank, size = comm.rank, comm.size
    for call in range(3):
        inputs = [addend(other, (num_items,), dtype, op, call, size) for other in range(size)]
        wanted, x = reduced(inputs, op), inputs[rank].clone()
        got = comm.allreduce(x, op)
        assert same_bits(got, wanted), (comm.describe_allreduce(x, op), call)
        work = comm.allreduce(x, op, async_op=True)
        assert work.wait() and same_bits(work.result(), wanted)
        bound = comm.bind_allreduce(x, op, out=(out := torch.empty_like(x)))
        for _ in range(3):
            out.zero_()
            assert same_bits(bound(), wanted)
        comm.allreduce(x, op, out=x)
        assert same_bits(x, wanted)


def runs_as_chosen(comm: epcomm.Communicator, num_items: int, dtype: torch.dtype) -> Candidate:
    """Checks that ranks run, for such a tensor, what `choose` and `explain` say; returns that."""
    x = torch.zeros(num_items, dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    request = Request(x.nbytes, Machine.of(comm.topology), name, num_programs=comm.num_programs)
    found = choose(request)
    if request.machine.has_speeds:
        assert explain(request).chosen == found
    text = comm.describe_allreduce(x)
    if found.is_kernel:
        assert f"algorithm=auto ({found.algorithm})" in text
    else:
        assert f"algorithm=plan {found.plan.name} {prove(found.plan).fingerprint}" in text
    return found


@pytest.mark.parametrize("name", MACHINES)
def test_ranks_run_what_is_chosen(name: str) -> None:
    topology, by_kernel = MACHINES[name]

    def body() -> list[tuple[str, bool]]:
        with epcomm.init(timeout=60.0, topology=topology, num_threads=2) as comm:
            assert comm.topology is topology
            found = []
            for num_items, dtype in itertools.product((0, 5, 250_001), (torch.float32, torch.bfloat16)):
                check_sums(comm, num_items, dtype)
                if num_items:
                    candidate = runs_as_chosen(comm, num_items, dtype)
                    found.append((candidate.algorithm, candidate.is_kernel))
            check_sums(comm, 1001, torch.int32, "max")
            check_sums(comm, 1001, torch.float16, "avg")
            x = torch.arange(7.0) + comm.rank
            total, everywhere = comm.reduce(x, 1), comm.allreduce(x)
            assert total is None or torch.equal(total, everywhere)
            return found

    found = run_ranks(body, topology.num_ranks, ranks="threads", timeout=200.0)
    assert all(each == found[0] for each in found)
    kinds = dict(zip(itertools.product(("small", "large"), ("float32", "bfloat16")), found[0]))
    assert kinds["small", "bfloat16"] == kinds["small", "float32"]
    assert {dtype for dtype in ("float32", "bfloat16") if kinds["large", dtype][1]} == by_kernel


@pytest.mark.slow
def test_eight_ranks_of_a_dgx1() -> None:
    def body() -> str:
        with epcomm.init(timeout=100.0, topology=PRESETS["dgx1_v100"](), num_threads=1) as comm:
            for num_items, dtype in itertools.product((1001, 300_001), (torch.float32, torch.bfloat16)):
                check_sums(comm, num_items, dtype)
                runs_as_chosen(comm, num_items, dtype)
            return comm.describe_allreduce(torch.zeros(300_001))

    assert "algorithm=plan bidirectional_ring" in run_ranks(body, 8, ranks="threads", timeout=200.0)[0]


@pytest.mark.slow
@pytest.mark.parametrize("topology", LARGER, ids=lambda topology: topology.name)
def test_whatever_is_chosen_is_bound(topology: Topology) -> None:
    """There is memory for the FIFOs of as many channels as a GPU's ranks would have, and tables aren't too long."""

    def body() -> list[str]:
        with epcomm.init(timeout=100.0, topology=topology, num_threads=16) as comm:
            ways = itertools.product(SIZES, (torch.float32, torch.bfloat16))
            return [comm.describe_allreduce(torch.empty(size // dtype.itemsize, dtype=dtype)) for size, dtype in ways]

    found = run_ranks(body, 8, ranks="threads", timeout=280.0)
    assert all(texts == found[0] for texts in found)


@pytest.mark.slow
def test_interpreted_ranks_run_what_is_chosen() -> None:
    def body() -> str:
        with kernels_of("mixed"), epcomm.init(timeout=100.0, topology=MACHINES["twisted ring"][0]) as comm:
            for dtype in (torch.float32, torch.bfloat16):
                check_sums(comm, 1001, dtype)
                runs_as_chosen(comm, 1001, dtype)
            return comm.describe_allreduce(torch.zeros(1001))

    assert "algorithm=plan bidirectional_ring" in run_ranks(body, 4, timeout=300.0)[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_and_explain_agree_on_this_host(num_ranks: int) -> None:
    """Each on its own: a host's topology is read, and kernels are as ever."""

    def body() -> None:
        with epcomm.init(timeout=30.0) as comm:
            assert comm.topology == read_host(num_ranks=comm.size)
            for num_items, dtype in itertools.product((1, 3000, 70_001), (torch.float32, torch.bfloat16, torch.int8)):
                found = runs_as_chosen(comm, num_items, dtype)
                name = str(dtype).removeprefix("torch.")
                request = Request(num_items * dtype.itemsize, find_machine("host", comm.size), name)
                explained = explain(request).chosen
                assert (explained.algorithm, explained.protocol) == (found.algorithm, found.protocol)
            check_sums(comm, 1001, torch.float32)

    run_ranks(body, num_ranks, ranks="threads")


def test_it_is_chosen_once_per_size_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def counted(*request: Any) -> Any:
        requests.append(request[1:4])
        return chosen_on(*request)

    monkeypatch.setattr(reductions, "chosen_on", counted)
    with epcomm.init(topology=PRESETS["ring"](1), num_threads=1) as comm:
        for _ in range(3):
            for x in (torch.ones(100), torch.ones(10, 10), torch.ones(100, dtype=torch.bfloat16)):
                assert torch.equal(comm.allreduce(x), x) and torch.equal(comm.bind_allreduce(x)(), x)
    assert requests == [(400, torch.float32, "sum"), (200, torch.bfloat16, "sum")]


def test_an_allreduce_is_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, bind = [], reductions.Reductions._bound_allreduce

    def counted(self: Any, *request: Any) -> Any:
        requests.append(request[-1])
        return bind(self, *request)

    monkeypatch.setattr(reductions.Reductions, "_bound_allreduce", counted)
    with epcomm.init(num_threads=1) as comm:
        for algorithm, _ in itertools.product(("auto", "two_shot", "ring"), range(3)):  # a kernel's name, a plan's
            x = torch.arange(100.0)
            assert torch.equal(comm.allreduce(x, algorithm=algorithm), x)
    assert requests == ["auto", "two_shot", "ring"]


def test_it_is_rejected_before_anything_is_priced() -> None:
    def body() -> tuple[Any, Any]:
        with epcomm.init(timeout=30.0, topology=PRESETS["ring"](3)) as comm:
            return raised_by(comm.allreduce, torch.ones(3), "band"), comm.reset()

    for raised, _ in run_ranks(body, 3, ranks="threads"):
        assert isinstance(raised.error, (ConfigError, PeerFailedError))
        assert "argument `op`: wanted one of ('sum', 'avg'" in raised.text


# ---- the ranks' topology


def outcomes(num_ranks: int, topology_of: Any) -> list[str]:
    def body() -> None:
        epcomm.init(timeout=20.0, topology=topology_of(epcomm.world.rendezvous.launched_rank.get().rank))

    found = rank_outcomes(body, num_ranks, ranks="threads")
    assert all(isinstance(outcome, ConfigError) for outcome in found), found
    return [str(outcome) for outcome in found]


def test_ranks_agree_on_their_topology() -> None:
    ring = PRESETS["ring"](3)
    for other, named in ((None, "none"), (PRESETS["ring"](3, 2.0), "ring (3 ranks, ")):
        for message in outcomes(3, lambda rank, other=other: other if rank == 1 else ring):
            assert "argument `topology`: wanted the same on all ranks" in message
            assert f"ring (3 ranks, {ring.fingerprint}) on rank(s) [0, 2]" in message
            assert named in message and message.endswith("on rank(s) [1]")


def test_topologies_that_are_not_the_ranks() -> None:
    for message in outcomes(3, lambda rank: PRESETS["ring"](4)):
        assert "argument `topology`: wanted a machine of 3 ranks, got one of 4, ring" in message
    devices, links = (Device("a", "gpu"), Device("b", "gpu", node=1)), (Link("a", "b", "network", 1.0),)
    apart = Topology("apart", devices, links, ("a", "b"))
    for message in outcomes(2, lambda rank: apart):
        assert "wanted these ranks in each machine, which share memory: [(0, 1)], got [(0,), (1,)] of apart" in message
    with pytest.raises(ConfigError, match="argument `topology`: wanted an epcomm.topology.Topology, got 'dgx_h100'"):
        epcomm.init(topology="dgx_h100")


def test_ranks_on_several_hosts(port: int) -> None:
    devices = tuple(Device(f"core{rank}", "core", rank % 2) for rank in range(4))
    links = (*(Link("core0", device.name, "network", 1.0) for device in devices[1:]),)
    told = Topology("interleaved", devices, links, tuple(device.name for device in devices))

    def body(comm: epcomm.Communicator) -> tuple[Any, str]:
        check_sums(comm, 1001, torch.bfloat16)
        return comm.topology, comm.describe_allreduce(torch.zeros(5))

    for topology in (None, told):
        for found, text in on_hosts([0, 1, 0, 1], port, body, topology=topology):
            assert found == topology and "algorithm=auto (rails)" in text


def test_default_ranks_load_no_cost_model() -> None:
    code = (
        "import sys, torch, epcomm\n"
        "epcomm.init().allreduce(torch.ones(3))\n"
        "print([name for name in sys.modules if name.startswith(('epcomm.topology', 'epcomm.simulation', "
        "'epcomm.collectives.cost.'))])"
    )
    root = Path(__file__).resolve().parent.parent
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=root)
    assert result.stdout.strip() == "['epcomm.collectives.cost.kernels']", result.stderr
