"""Algorithms as rounds: for each collective of each algorithm against its plan, simulated event by event."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
from execution_checks import POWERS_OF_TWO

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.schedules import SCHEDULES, algorithms_of
from epcomm.collectives.cost.world import World
from epcomm.collectives.plan import COLLECTIVES
from epcomm.collectives.plan.conditions import REDUCTIONS, ROOTED
from epcomm.errors import ConfigError
from epcomm.simulation.costs import Costs
from epcomm.simulation.events import simulate
from epcomm.simulation.network import RoutedNetwork
from epcomm.simulation.rounds import Schedule
from epcomm.topology import PRESETS

PAIRS = [(name, kind) for name, schedules in SCHEDULES.items() for kind in schedules]
#: whose ranks all do the same at the same time, or have nothing to wait for but one message: as in rounds
REGULAR = [("ring", kind) for kind in SCHEDULES["ring"]] + [
    ("double_binary_tree", "allreduce"), ("recursive_doubling", "allreduce"), ("one_shot", "allgather"),
    ("one_shot", "broadcast"),
]  # fmt: skip
NETWORKS = [("full_mesh", 3), ("full_mesh", 6), ("full_mesh", 8), ("dgx_h100", 8), ("dgx_h100", 16)]
COSTS = Costs(launch=3.0, step=0.1, channel=5.0, latency={"nvlink": 1.0, "network": 5.0})


@cache
def network(preset: str, num_ranks: int) -> RoutedNetwork:
    if preset == "full_mesh":
        return RoutedNetwork(PRESETS["full_mesh"](num_ranks, 10.0, 0.5))
    return RoutedNetwork(PRESETS[preset](num_ranks // 8))


def ratio(name: str, kind: str, world: World, net: RoutedNetwork, num_bytes: float, costs: Costs) -> float:
    """How much longer the rounds take than the plan."""
    algorithm = ALGORITHMS[name]
    options = {"ranks_per_node": world.ranks_per_node} if "ranks_per_node" in algorithm.options else {}
    plan = algorithm.plan(kind, world.num_ranks, root=world.root, **options)
    rounds = Schedule(SCHEDULES[name][kind](world), net).times(num_bytes, costs).max()
    return rounds / simulate(plan, num_bytes, net, costs).makespan


def roots(kind: str, num_ranks: int) -> list[int]:
    return [0, num_ranks - 1] if kind in ROOTED else [0]


def test_what_has_plans_has_rounds():
    assert {name: set(schedules) for name, schedules in SCHEDULES.items()} == {
        name: set(algorithm.forms) for name, algorithm in ALGORITHMS.items()
    }
    for kind in COLLECTIVES:
        assert all(kind in ALGORITHMS[name].forms for name in algorithms_of(kind))


@pytest.mark.parametrize("preset, num_ranks", [("full_mesh", 4), ("full_mesh", 8), ("dgx_h100", 8)])
@pytest.mark.parametrize("name, kind", REGULAR)
def test_rounds_are_what_events_are(name, kind, preset, num_ranks):
    net = network(preset, num_ranks)
    for num_bytes, root in product((8, 10**5, 10**7), roots(kind, num_ranks)):
        world = World(num_ranks, num_ranks, root=root)
        assert ratio(name, kind, world, net, num_bytes, COSTS) == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("name, kind", PAIRS)
def test_rounds_are_close_to_events(name, kind):
    # A program's steps overlap where rounds do not: its sums with its next sends.
    for preset, num_ranks in NETWORKS:
        if num_ranks == 16 and name == "one_shot":
            continue  # a node's ranks all send to the next node's first one, then to its second
        for root in roots(kind, num_ranks):
            world = World(num_ranks, min(num_ranks, 8), root=root)
            try:
                SCHEDULES[name][kind](world)
            except ConfigError as error:
                if num_ranks & (num_ranks - 1) and (name, kind) in POWERS_OF_TWO:
                    assert "wanted a power of two" in str(error)
                else:
                    assert "wanted several nodes" in str(error) and num_ranks <= 8
                continue
            for num_bytes, channel in ((8, 5.0), (10**6, 5.0), (10**6, math.inf)):
                costs = Costs(launch=3.0, step=0.1, channel=channel, latency={"nvlink": 1.0})
                assert 0.6 < ratio(name, kind, world, network(preset, num_ranks), num_bytes, costs) < 1.45


@pytest.mark.parametrize("name", ["ring", "bidirectional_ring", "one_shot", "two_shot", "double_binary_tree", "direct"])
def test_channels_and_pieces_pay_off_as_in_events(name):
    net, world = network("full_mesh", 8), World(8, 8)
    for kind in SCHEDULES[name]:
        schedule = Schedule(SCHEDULES[name][kind](world), net)
        for channels, pieces in ((2, 1), (1, 4), (2, 4)):
            plan = ALGORITHMS[name].plan(kind, 8, channels=channels, pieces=pieces)
            events = simulate(plan, 10**6, net, COSTS).makespan
            assert 0.6 < schedule.times(10**6, COSTS, channels=channels, pieces=pieces).max() / events < 1.5


@pytest.mark.parametrize("name", ["ring", "double_binary_tree", "recursive_doubling", "hierarchical", "two_level"])
def test_pieces_overlap_as_in_events(name):
    net, world = network("dgx_h100", 16), World(16, 8)
    by_node = name in ("hierarchical", "two_level")
    options = {"ranks_per_node": 8} if by_node else {}
    for kind, channel in product(SCHEDULES[name], (20.0, math.inf)):
        schedule = Schedule(SCHEDULES[name][kind](world), net)
        costs = Costs(launch=3.0, channel=channel, latency={"nvlink": 1.0, "network": 3.0})
        for pieces in (2, 4, 8) if kind in ROOTED else (2, 4):  # more fill FIFOs
            plan = ALGORITHMS[name].plan(kind, 16, pieces=pieces, **options)
            events = simulate(plan, 10**7, net, costs).makespan
            most = 1.65 if by_node else 1.25  # phases of one piece overlap in events, too
            assert 0.85 < schedule.times(10**7, costs, pieces=pieces).max() / events < most


def test_channels_use_links_side_by_side():
    # Two programs of a rank queue at the link to the first peer, then keep two links busy.
    net, costs = network("full_mesh", 8), Costs()
    schedule = Schedule(SCHEDULES["direct"]["alltoall"](World(8, 8)), net)
    for channels, slots in ((1, 7.0), (2, 4.0), (7, 13 / 7)):
        plan = ALGORITHMS["direct"].plan("alltoall", 8, channels=channels)
        found = schedule.times(10**7, costs, channels=channels).max()
        assert found == pytest.approx(simulate(plan, 10**7, net, costs).makespan, rel=0.15)
        assert found == pytest.approx(slots * 1000 + 0.5)


@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("name", ["ring", "double_binary_tree", "one_shot", "two_shot", "hierarchical"])
def test_wide_sums_cost_in_rounds_what_they_cost_in_events(name, num_ranks):
    # From narrow to wide, in rounds and in events: as many partial sums travel.
    net = network("full_mesh", num_ranks)
    options = {"ranks_per_node": num_ranks // 2} if name == "hierarchical" else {}
    for kind in REDUCTIONS & set(SCHEDULES[name]):
        schedule = Schedule(SCHEDULES[name][kind](World(num_ranks, num_ranks // 2)), net)
        plan = ALGORITHMS[name].plan(kind, num_ranks, **options)
        rounds = [schedule.times(10**7, Costs(), wide_sums=wide).max() for wide in (False, True)]
        events = [simulate(plan, 10**7, net, Costs(), wide_sums=wide).makespan for wide in (False, True)]
        assert rounds[1] / rounds[0] == pytest.approx(events[1] / events[0], rel=0.15), kind


@pytest.mark.parametrize("name, kind", [pair for pair in PAIRS if pair[1] in ("allgather", "broadcast", "alltoall")])
def test_one_rank_copies(name, kind):
    if name in ("hierarchical", "two_level"):
        with pytest.raises(ConfigError, match="wanted several nodes, got one"):
            SCHEDULES[name][kind](World(1, 1))
        return
    rounds = Schedule(SCHEDULES[name][kind](World(1, 1)), network("full_mesh", 1)).times(10**6, COSTS).max()
    events = simulate(ALGORITHMS[name].plan(kind, 1), 10**6, network("full_mesh", 1), COSTS).makespan
    assert rounds == pytest.approx(events, rel=1e-3)


def test_worlds_that_are_too_large():
    with pytest.raises(ConfigError, match="all pairs are priced among up to 300 ranks, got 301"):
        SCHEDULES["direct"]["alltoall"](World(301, 301))
    for kind, talking in (("broadcast", 301), ("reduce", 302)):  # a broadcast's root doesn't pass on what it gets
        with pytest.raises(ConfigError, match=f"all pairs are priced among up to 300 ranks, got {talking}"):
            SCHEDULES["two_shot"][kind](World(302, 302))
    with pytest.raises(ConfigError, match="chains are priced among up to 1024 ranks, got 1025"):
        SCHEDULES["ring"]["broadcast"](World(1025, 1025))
