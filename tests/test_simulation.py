"""Simulated times against closed forms, the two engines against each other, and what follows from a simulation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.schedules import SCHEDULES
from epcomm.collectives.cost.world import World
from epcomm.collectives.language import Trace, chunk
from epcomm.collectives.plan import COLLECTIVES, Collective, Dependency, Location, Op, Plan, Program, Step
from epcomm.collectives.plan.conditions import REDUCTIONS
from epcomm.errors import ConfigError, PlanError
from epcomm.simulation.bounds import crossing, cut_bound, halves
from epcomm.simulation.costs import Costs
from epcomm.simulation.events import simulate
from epcomm.simulation.network import Cluster, RoutedNetwork, meeting
from epcomm.simulation.perfetto import trace_document
from epcomm.simulation.rounds import Round, Schedule
from epcomm.simulation.timeline import PARTS, Cause
from epcomm.topology import PRESETS, Device, Link, Topology
from epcomm.topology.presets import DGX1_LINKS

ALPHA, RATE = 0.5, 10.0  # µs, GB/s of every link
COSTS = Costs(launch=3.0, step=0.1)


def mesh(num_ranks: int) -> RoutedNetwork:
    return RoutedNetwork(PRESETS["full_mesh"](num_ranks, RATE, ALPHA))


def beta(num_bytes: float) -> float:
    """µs of bytes on a link."""
    return num_bytes / RATE / 1e3


def makespan(name: str, num_ranks: int, num_bytes: float, costs: Costs = COSTS, **options) -> float:
    plan = ALGORITHMS[name].plan("allreduce", num_ranks, **options)
    return simulate(plan, num_bytes, mesh(num_ranks), costs).makespan


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_bytes", [0, 1000, 10**7])
def test_ring(num_ranks, num_bytes):
    steps = 2 * (num_ranks - 1)  # of alpha + bytes / ranks * beta each, and a last one that only receives
    wanted = 3.0 + steps * (0.1 + ALPHA + beta(num_bytes / num_ranks)) + 0.1
    assert makespan("ring", num_ranks, num_bytes) == pytest.approx(wanted)


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
def test_recursive_doubling(num_ranks):
    steps = int(math.log2(num_ranks))
    assert makespan("recursive_doubling", num_ranks, 10**6) == pytest.approx(
        3.0 + steps * (0.1 + ALPHA + beta(10**6)) + 0.1
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 7])
def test_all_pairs_on_a_full_mesh(num_ranks):
    # One program sends to all others, one after the other; nobody shares a link.
    peers = num_ranks - 1
    plan = ALGORITHMS["one_shot"].plan("allgather", num_ranks)
    costs = Costs(launch=3.0)
    sent = simulate(plan, 10**6, mesh(num_ranks), costs).makespan
    assert sent == pytest.approx(3.0 + peers * beta(10**6) + ALPHA)


def test_tree_is_as_deep_as_its_longest_way_up_and_down():
    plan = ALGORITHMS["double_binary_tree"].plan("allreduce", 8)
    # Three levels up and three down, half of the data each; a rank with two children sends down to one after the other.
    up_and_down = 6 * ALPHA
    assert simulate(plan, 0, mesh(8)).makespan == pytest.approx(up_and_down)
    assert simulate(plan, 10**6, mesh(8)).makespan == pytest.approx(up_and_down + 8 * beta(10**6 / 2))


def shared_wire(num_pairs: int) -> RoutedNetwork:
    """Pairs of ranks, (0, 1), (2, 3)..., that talk through one wire between two switches."""
    devices = [Device("left", "switch"), Device("right", "switch")]
    links = [Link("left", "right", "network", RATE, ALPHA)]
    for rank in range(2 * num_pairs):
        devices.append(Device(f"gpu{rank}", "gpu"))
        links.append(Link(f"gpu{rank}", "right" if rank % 2 else "left", "nvlink", 100 * RATE))
    return RoutedNetwork(Topology("wire", tuple(devices), tuple(links), tuple(f"gpu{r}" for r in range(2 * num_pairs))))


def pairs_plan(num_pairs: int) -> Plan:
    """An allgather of which only the pairs' messages are looked at: the even rank of each sends to the odd one."""
    steps = []
    for rank in range(2 * num_pairs):
        peer = rank ^ 1
        send = Step(Op.SEND, src=Location("input", 0), send_to=peer)
        receive = Step(Op.RECV, dst=Location("output", peer), receive_from=peer)
        steps.append((Program(0, (receive if rank % 2 else send,)),))
    return Plan("pairs", Collective("allgather", 2 * num_pairs, 1), tuple(steps))


@pytest.mark.parametrize("num_pairs", [1, 2, 3])
def test_contention_on_a_shared_link_divides_its_bandwidth(num_pairs):
    timeline = simulate(pairs_plan(num_pairs), 10**6, shared_wire(num_pairs))
    assert timeline.makespan == pytest.approx(num_pairs * beta(10**6) + ALPHA, rel=1e-12)
    [(name, share), *_] = timeline.busiest_links(1)
    assert name == "left -> right" and share == pytest.approx(1 - ALPHA / timeline.makespan)
    assert timeline.parts["queue"] == pytest.approx((num_pairs - 1) * beta(10**6))
    both_ways = Schedule([Round(np.arange(0, 2 * num_pairs, 2), np.arange(1, 2 * num_pairs, 2), 1.0)],
                         shared_wire(num_pairs)).times(10**6)  # fmt: skip
    assert both_ways.max() == pytest.approx(timeline.makespan)


def test_a_channel_is_a_limit_of_its_own():
    plan = pairs_plan(1)
    slow = simulate(plan, 10**6, shared_wire(1), Costs(channel=RATE / 4))
    assert slow.makespan == pytest.approx(4 * beta(10**6) + ALPHA + 4 * beta(10**6))  # to send, then to receive
    flags = simulate(plan, 10**6, shared_wire(1), Costs(efficiency=0.5))
    assert flags.makespan == pytest.approx(2 * beta(10**6) + ALPHA)


@pytest.mark.parametrize("depth, late", [(1, 1), (2, 2), (8, None)])
def test_a_full_fifo_holds_its_sender_back(depth, late):
    sends = tuple(Step(Op.SEND, src=Location("input", 0), send_to=1) for _ in range(3))
    receives = tuple(Step(Op.RECV, dst=Location("output", 0), receive_from=0) for _ in range(3))
    programs = ((Program(0, sends),), (Program(0, receives),))
    plan = Plan("fifo", Collective("allgather", 2, 1), programs, fifo_depth=depth)
    timeline = simulate(plan, 10**6, mesh(2), Costs(channel=RATE))
    # A message takes one unit to send and one to receive: one slot makes sender and receiver take turns, two make the
    # third message wait until the first is received.
    unit = beta(10**6)
    wanted = {1: 3 * (2 * unit + ALPHA), 2: 4 * unit + 2 * ALPHA, 8: 4 * unit + ALPHA}
    assert timeline.makespan == pytest.approx(wanted[depth])
    waited = [number for number, (cause, _) in enumerate(timeline.cause) if cause is Cause.SLOT]
    assert waited[:1] == ([] if late is None else [late])


def test_channels_keep_their_order_and_dependencies_are_waited_for():
    steps = (Step(Op.COPY, src=Location("input", 0), dst=Location("output", 0)),)
    copy = Step(Op.COPY, src=Location("input", 0), dst=Location("scratch", 0))
    later = (Step(Op.NOP, after=(Dependency(0, 0),)), copy)
    plan = Plan("two programs", Collective("allreduce", 1, 1), ((Program(0, steps), Program(1, later)),), 1)
    timeline = simulate(plan, 10**6, mesh(1), Costs(channel=RATE, step=1.0))
    unit = 1.0 + beta(10**6)
    assert timeline.start.tolist() == pytest.approx([0.0, unit, unit])
    assert timeline.cause[1] == (Cause.AFTER, 0) and timeline.cause[2] == (Cause.PROGRAM, 1)
    assert timeline.makespan == pytest.approx(2 * unit)


def test_programs_of_one_thread_take_turns():
    plan = ALGORITHMS["ring"].plan("allreduce", 3, channels=4)
    costs = Costs(channel=RATE / 100)  # links take next to no time beside programs
    alone = simulate(ALGORITHMS["ring"].plan("allreduce", 3), 10**6, mesh(3), costs).makespan
    times = {workers: simulate(plan, 10**6, mesh(3), costs, num_workers=workers).makespan for workers in (1, 2, 4, 9)}
    # four programs, each of a quarter of the bytes; in turn they also fill the time in which one would wait
    assert times[4] == times[9] == simulate(plan, 10**6, mesh(3), costs).makespan < 0.3 * alone
    assert times[4] < times[2] < times[1] <= alone
    timeline = simulate(plan, 10**6, mesh(3), costs, num_workers=2)
    for rank, worker in product(range(3), range(2)):
        own = np.flatnonzero((timeline.graph.rank == rank) & (timeline.graph.program % 2 == worker))
        own = own[np.argsort(timeline.start[own])]
        assert (timeline.complete[own][:-1] <= timeline.start[own][1:]).all()
    assert sum(timeline.parts.values()) == pytest.approx(timeline.makespan)
    with pytest.raises(ConfigError, match="num_workers: wanted at least 1, got 0"):
        simulate(plan, 8, mesh(3), num_workers=0)


def test_the_kind_of_link_has_a_least_latency():
    costs = Costs(latency={"nvlink": 2.0, "network": 7.0})
    near = simulate(ALGORITHMS["ring"].plan("allreduce", 2), 0, mesh(2), costs)
    assert near.makespan == pytest.approx(2 * 2.0)
    assert simulate(pairs_plan(1), 0, shared_wire(1), costs).makespan == pytest.approx(7.0)
    assert simulate(pairs_plan(1), 0, shared_wire(1), Costs(latency={"network": 0.1})).makespan == pytest.approx(ALPHA)


def network(preset: str, num_ranks: int) -> RoutedNetwork:
    return mesh(num_ranks) if preset == "full_mesh" else RoutedNetwork(PRESETS[preset](num_ranks // 8))


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "hierarchical", "halving_doubling"])
def test_a_cluster_is_its_topology_by_arithmetic(name):
    machines = PRESETS["dgx_h100"](2)
    cluster = Cluster.like(machines, 16)
    costs = Costs(launch=3.0, latency={"nvlink": 1.0, "network": 5.0})
    for num_bytes in (8, 10**7):
        found = [
            Schedule(SCHEDULES[name]["allreduce"](World(16, 8)), net).times(num_bytes, costs)
            for net in (cluster, RoutedNetwork(machines))
        ]
        assert np.allclose(*found)


def test_a_meeting_takes_as_long_as_the_word_from_farthest():
    costs = Costs(latency={"nvlink": 1.0, "network": 5.0})
    machines = PRESETS["dgx_h100"](2)
    for net in (RoutedNetwork(machines), Cluster.like(machines, 16), Cluster.like(machines, 100_000)):
        assert meeting(net, costs) == 5.0
    assert meeting(RoutedNetwork(PRESETS["dgx_h100"](1)), costs) == meeting(Cluster.like(machines, 8), costs) == 1.0
    assert meeting(mesh(1), costs) == meeting(Cluster.like(machines, 1), costs) == 0.0
    assert meeting(mesh(3), Costs()) == ALPHA
    ring = RoutedNetwork(PRESETS["ring"](6, RATE, ALPHA))
    assert meeting(ring, Costs()) == ALPHA and len(ring.joined()[0]) == 2 * 6  # no links join the others


@pytest.mark.parametrize(
    "dst, shared",
    [([16, 17], 2), ([16, 24], 1), ([1, 9], 1)],  # into one node, into two, and nowhere
)
def test_ranks_share_the_nics_of_their_node(dst, shared):
    cluster = Cluster(32, 8, ("nvlink", 1000 * RATE, 0.0), ("network", RATE, ALPHA), num_nics=1)
    taken = Schedule([Round(np.array([0, 8]), np.array(dst), 1.0)], cluster).times(10**6).max()
    is_far = dst != [1, 9]
    assert taken == pytest.approx(shared * beta(10**6) * (1 if is_far else 1e-3) + ALPHA * is_far)
    out = Schedule([Round(np.array([0, 1]), np.array([8, 16]), 1.0)], cluster).times(10**6).max()
    assert out == pytest.approx(2 * beta(10**6) + ALPHA)
    by_own_nics = Cluster(32, 8, cluster.inside, cluster.between, num_nics=8)
    assert Schedule([Round(np.array([0, 1]), np.array([8, 16]), 1.0)], by_own_nics).times(10**6).max() < out


def test_a_repeated_round_is_computed_until_its_period_is_seen():
    ranks = np.arange(48)
    cluster = Cluster(48, 8, ("nvlink", 100.0, 1.0), ("network", 10.0, 6.0), 8)
    once = Round(ranks, np.roll(ranks, -1), 0.1, forwards=True)
    one_by_one = Schedule([once] * 700, cluster).times(10**6)
    assert np.allclose(Schedule([replace(once, repeat=700)], cluster).times(10**6), one_by_one, rtol=1e-9)
    # a hop's mean latency around the ring, or what the slowest link takes: whichever is more
    per_round = max(7 / 8 * 2.0 + 1 / 8 * 16.0, 10.0)
    assert one_by_one.max() == pytest.approx(700 * per_round, rel=0.01)


def test_a_hundred_thousand_ranks():
    num_ranks = 100_000
    cluster = Cluster.like(PRESETS["dgx_h100"](2), num_ranks)
    world = World(num_ranks, 8)
    steps = math.floor(math.log2(num_ranks))  # among 65536, and two messages with those left over
    far = cluster.between[2]
    doubling = Schedule(SCHEDULES["recursive_doubling"]["allreduce"](world), cluster).times(0).max()
    assert doubling == pytest.approx((steps - 3) * far + 3 * cluster.inside[2] + 2 * cluster.inside[2], rel=0.05)
    ring = Schedule(SCHEDULES["ring"]["allreduce"](world), cluster).times(0).max()
    mean_hop = (7 * cluster.inside[2] + far) / 8
    assert ring == pytest.approx(2 * (num_ranks - 1) * mean_hop, rel=1e-4)
    tree = Schedule(SCHEDULES["double_binary_tree"]["allreduce"](world), cluster).times(10**6).max()
    assert doubling < tree < ring


@pytest.mark.parametrize("name", ["ring", "two_shot", "double_binary_tree", "halving_doubling", "pat", "swing"])
def test_the_critical_path_has_no_gaps_and_sums_to_the_makespan(name):
    plan = ALGORITHMS[name].plan("allreduce", 8, channels=2, pieces=2)
    for preset in ("full_mesh", "dgx_h100"):
        timeline = simulate(plan, 10**6, network(preset, 8), Costs(launch=3.0, step=0.1, channel=20.0))
        path = timeline.critical_path
        assert path[0].begin == 3.0 and path[-1].end == timeline.makespan
        assert all(before.end == after.begin for before, after in zip(path, path[1:]))
        assert sum(timeline.parts.values()) == pytest.approx(timeline.makespan)
        assert set(timeline.parts) == set(PARTS) and min(timeline.parts.values()) >= -1e-9
        assert (timeline.complete >= timeline.start).all() and (timeline.link_use <= 1 + 1e-12).all()


def test_wide_sums_travel_in_twice_the_bytes():
    ring = ALGORITHMS["ring"].plan("allreduce", 4)
    # a chunk travels six hops: the first as an input, two as partial sums, three as a result
    narrow, wide = (simulate(ring, 4000, mesh(4), Costs(), wide_sums=each).makespan for each in (False, True))
    assert wide - narrow == pytest.approx(2 * beta(1000))
    two_shot = ALGORITHMS["two_shot"].plan("allreduce", 4)
    narrow, wide = (simulate(two_shot, 4000, mesh(4), Costs(), wide_sums=each).makespan for each in (False, True))
    assert wide == narrow  # only inputs and results travel
    for name in ("ring", "recursive_doubling", "double_binary_tree"):
        schedule = Schedule(SCHEDULES[name]["allreduce"](World(8, 8)), mesh(8))
        plan = ALGORITHMS[name].plan("allreduce", 8)
        events = simulate(plan, 10**6, mesh(8), Costs(), wide_sums=True).makespan
        assert schedule.times(10**6, Costs(), wide_sums=True).max() == pytest.approx(events)


def test_the_trace_is_valid_and_its_flows_begin_and_end():
    plan = ALGORITHMS["two_shot"].plan("allreduce", 4, channels=2)
    timeline = simulate(plan, 10**6, mesh(4), COSTS)
    events = json.loads(json.dumps(trace_document(timeline)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == plan.num_steps
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(timeline.makespan)
    assert any(event["args"]["critical"] for event in slices)
    begins, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert len(begins) == sum(step.op.sends for _, step in plan.steps()) and set(begins) == set(ends)
    for number, begin in begins.items():
        assert begin["ts"] < ends[number]["ts"] and begin["pid"] != ends[number]["pid"]
        for flow in (begin, ends[number]):
            assert any(
                (each["pid"], each["tid"]) == (flow["pid"], flow["tid"])
                and each["ts"] <= flow["ts"] <= each["ts"] + each["dur"]
                for each in slices
            )
    lanes = {(event["pid"], event["tid"]) for event in events if event.get("name") == "thread_name"}
    assert lanes == {(event["pid"], event["tid"]) for event in slices}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_no_plan_beats_the_bound(kind):
    singly = [[rank] for rank in range(8)]
    nets = {
        "mesh": (mesh(8), 7 * RATE), "dgx": (RoutedNetwork(PRESETS["dgx_h100"](1)), 450.0),
        "dgx1": (RoutedNetwork(PRESETS["dgx1_v100"](1)), None),
    }  # fmt: skip
    units = {"allreduce": 2 * 7 / 8, "broadcast": 1, "reduce": 1, "allgather": 7, "reduce_scatter": 7, "alltoall": 7}
    for net, rate in nets.values():
        bound = cut_bound(net, Collective(kind, 8, 1), 10**7, [singly, *halves(8)])
        assert rate is None or bound == pytest.approx(units[kind] * 10**7 / rate / 1e3)
        for name, algorithm in ALGORITHMS.items():
            if kind in algorithm.forms:
                assert simulate(algorithm.plan(kind, 8, channels=2), 10**7, net).makespan > bound, name


# Rounds per chunk of a rank's block, or of a pair's in alltoall. The first is the last of SCCL's log of a DGX-1's
# allgather, 6 chunks in 7 rounds (github.com/microsoft/sccl, SYNTHESIS.md). Half of a ring sends 16 pairs' by 2 links.
LEAST_ROUNDS = {
    "dgx1": {"allgather": 7 / 6, "reduce_scatter": 7 / 6, "broadcast": 1 / 6, "reduce": 1 / 6, "alltoall": 8 / 3},
    "ring": {"allgather": 7 / 2, "reduce_scatter": 7 / 2, "broadcast": 1 / 2, "reduce": 1 / 2, "alltoall": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", LEAST_ROUNDS)
def test_bounds_where_not_all_ranks_are_linked(name):
    """A ring of 8 ranks, and a DGX-1's NVLinks alone: ranks that no link joins send to each other by way of others."""
    assert len(halves(8)) == 127 and [[0, 2], [1]] in halves(3)
    links = {pair: 1 for pair in zip(range(8), [*range(1, 8), 0])} if name == "ring" else DGX1_LINKS
    ranks = tuple(f"gpu{rank}" for rank in range(8))
    net = RoutedNetwork(Topology(
        name, tuple(Device(rank, "gpu") for rank in ranks),
        tuple(Link(ranks[a], ranks[b], "nvlink", RATE, count=count) for (a, b), count in links.items()), ranks,
    ))  # fmt: skip
    for kind, rounds in LEAST_ROUNDS[name].items():
        bound = cut_bound(net, Collective(kind, 8, 1), 10**6, [[[rank] for rank in range(8)], *halves(8)])
        assert bound == pytest.approx(rounds * beta(10**6)), kind
    apart = Topology("apart", tuple(Device(rank, "gpu") for rank in ranks[:2]), (), ranks[:2])
    with pytest.raises(ConfigError, match="no way leads between ranks"):
        cut_bound(RoutedNetwork(apart), Collective("broadcast", 2, 1), 8, [[[0], [1]]])


def test_bounds_between_nodes():
    two, nodes = RoutedNetwork(PRESETS["dgx_h100"](2)), [range(8), range(8, 16)]
    # what each node has to take in or to send by eight NICs, in units
    units = {"allreduce": 1, "broadcast": 1, "reduce": 1, "allgather": 8, "reduce_scatter": 8, "alltoall": 64}
    for kind, number in units.items():
        bound = cut_bound(two, Collective(kind, 16, 1, 0), 10**8, [nodes])
        assert bound == pytest.approx(number * 10**8 / 400 / 1e3)
        assert cut_bound(two, Collective(kind, 16, 1), 10**8, [[[rank] for rank in range(16)], nodes]) >= bound
    one_nic = RoutedNetwork(PRESETS["ndv2"](2))
    for root in (0, 15):
        bound = cut_bound(one_nic, Collective("reduce", 16, 1, root), 10**8, [nodes])
        assert bound == pytest.approx(10**8 / 12.5 / 1e3)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_bounds_of_groups_that_are_alike(kind):
    """Looking at one of them is as good as at all, and enough for any number of ranks."""
    machines, bounds = PRESETS["dgx_h100"](2), []
    for num_ranks, alike in ((64, True), (64, False), (100_000, True)):
        groupings = [[[rank] for rank in range(num_ranks)], np.arange(num_ranks).reshape(-1, 8).tolist()]
        net = Cluster.like(machines, num_ranks)
        bounds.append(cut_bound(net, Collective(kind, num_ranks, 1), 10**6, groupings, are_alike=alike))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-12)
    # between nodes, by 8 NICs: what one sends, or takes in, or of an allreduce what each does on average
    nodes = 12_500
    units = {"allreduce": 2 * (nodes - 1) / nodes, "broadcast": 1, "reduce": 1, "alltoall": 8 * (100_000 - 8)}
    assert bounds[2] == pytest.approx(units.get(kind, 100_000 - 8) * 10**6 / 400 / 1e3, rel=1e-9)


SUMS = [(name, kind) for name, kinds in SCHEDULES.items() for kind in kinds if kind in REDUCTIONS]


@pytest.mark.parametrize(("name", "kind"), SUMS)
def test_links_carry_as_much_in_rounds_as_in_events(name, kind):
    costs, net = Costs(efficiency=0.5), mesh(8)
    options = {"ranks_per_node": 4} if name == "hierarchical" else {}
    events = simulate(ALGORITHMS[name].plan(kind, 8, **options), 10**6, net, costs, wide_sums=True)
    rounds = Schedule(SCHEDULES[name][kind](World(8, 4 if options else 8)), net)
    assert rounds.link_times(10**6, costs, wide_sums=True).sum() == pytest.approx(events.link_busy.sum())
    if kind == "allreduce" and name in ("ring", "two_shot", "halving_doubling"):
        assert np.allclose(rounds.link_times(10**6, costs, wide_sums=True), events.link_busy)


def test_what_crosses_between_groups():
    groups = [[0, 1, 2], [3], [4, 5]]
    found = crossing(Collective("allgather", 6, 1), groups)
    assert (found.leaves.tolist(), found.enters.tolist(), found.total) == ([3, 1, 2], [3, 5, 4], 12)
    found = crossing(Collective("reduce", 6, 1, 4), groups)
    assert (found.leaves.tolist(), found.enters.tolist(), found.total) == ([1, 1, 0], [0, 0, 1], 2)
    assert crossing(Collective("alltoall", 6, 1), groups).total == 3 * 3 + 1 * 5 + 2 * 4
    assert crossing(Collective("allreduce", 6, 1), groups).total == 4
    assert crossing(Collective("allreduce", 6, 1), [range(6)]).total == 0


def test_what_cannot_be_simulated_is_refused():
    plan = ALGORITHMS["ring"].plan("allreduce", 4)
    with pytest.raises(ConfigError, match="network: wanted 4 ranks, got 3"):
        simulate(plan, 8, mesh(3))
    with pytest.raises(ConfigError, match="num_bytes: wanted a number >= 0, got -1"):
        simulate(plan, -1, mesh(4))
    with pytest.raises(ConfigError, match="bandwidths are relative"):
        RoutedNetwork(Topology("host", (Device("a", "core"),), (), ("a",), unit="relative"))
    with pytest.raises(ConfigError, match="channel: wanted GB/s > 0, got 0"):
        Costs(channel=0)
    with pytest.raises(ConfigError, match="nodes of one size with a switch each"):
        Cluster.like(PRESETS["dgx1_v100"](2), 16)
    def first_receiving(peer: int) -> tuple[Program]:
        receive = Step(Op.RECV, dst=Location("output", 0), receive_from=peer)
        return (Program(0, (receive, Step(Op.SEND, src=Location("input", 0), send_to=peer))),)

    stuck = Plan("stuck", Collective("allreduce", 2, 1), (first_receiving(1), first_receiving(0)))
    with pytest.raises(PlanError, match="deadlock"):
        simulate(stuck, 8, mesh(2))


def test_programs_of_the_language_are_priced_like_any_plan():
    with Trace("there and back", Collective("broadcast", 3, 1)) as trace:
        value = chunk(0, "input").copy(0, "output")
        value.copy(1).copy(2)
    timeline = simulate(trace.plan(), 10**6, mesh(3))
    assert timeline.makespan == pytest.approx(2 * (ALPHA + beta(10**6)))
