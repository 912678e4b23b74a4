"""All pairs begin with different peers: never slower, by simulation, than if all began with rank 0, and as right."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import pytest

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.algorithms.paths import copy_to_each, own_block, reduce_in_order
from epcomm.collectives.language import Collective, Trace
from epcomm.collectives.plan import Plan
from epcomm.collectives.plan.verify import verify
from epcomm.simulation.costs import Costs
from epcomm.simulation.events import simulate
from epcomm.simulation.network import RoutedNetwork
from epcomm.topology import PRESETS

STAGGERED = [("one_shot", "allgather"), ("one_shot", "reduce_scatter"), ("two_shot", "allreduce")]
BEGINNING = [*STAGGERED, ("one_shot", "allreduce")]


def in_order(name: str, kind: str, num_ranks: int, pieces: int) -> Plan:
    """The same sums and copies, where each rank sends to rank 0 first, then to rank 1 and so on."""
    ranks = range(num_ranks)
    with Trace(name, Collective(kind, num_ranks, num_ranks if kind == "allreduce" else 1)) as trace:
        if kind == "allgather":
            for rank in ranks:
                copy_to_each(own_block(rank), ranks)
        elif kind == "reduce_scatter":
            for rank in ranks:
                reduce_in_order(rank, ranks, rank, 0)
        else:
            for total in [reduce_in_order(rank, ranks, rank, rank) for rank in ranks]:
                copy_to_each(total, ranks)
    return trace.plan(pieces=pieces)


@cache
def network(preset: str, num_ranks: int) -> RoutedNetwork:
    if preset == "full_mesh":
        return RoutedNetwork(PRESETS["full_mesh"](num_ranks, 25.0, 0.7))
    return RoutedNetwork(PRESETS[preset]())


@pytest.mark.parametrize("preset", ["full_mesh", "dgx_h100"])
@pytest.mark.parametrize("num_ranks", [4, 8])
@pytest.mark.parametrize("name, kind", STAGGERED)
def test_staggered_peers_are_never_slower(name, kind, num_ranks, preset):
    gains = []
    for pieces in (1, 4):
        plans = [ALGORITHMS[name].plan(kind, num_ranks, pieces=pieces), in_order(name, kind, num_ranks, pieces)]
        proofs = [verify(plan) for plan in plans]
        assert proofs[0].roundings == proofs[1].roundings and all(proof.same_bits for proof in proofs)
        assert Counter(sent(plans[0])) == Counter(sent(plans[1]))
        for num_bytes in (8, 10**5, 10**7):
            for channel, step in ((5.0, 0.1), (40.0, 0.0), (math.inf, 0.0)):
                costs = Costs(launch=3.0, step=step, channel=channel, latency={"nvlink": 1.0})
                net = network(preset, num_ranks)
                ours, theirs = (simulate(plan, num_bytes, net, costs).makespan for plan in plans)
                assert ours <= theirs * (1 + 1e-9)
                gains.append(theirs / ours)
    assert max(gains) > 1.1 or preset == "full_mesh"  # whose ranks share no links


def sent(plan: Plan) -> list[tuple[int, int, int]]:
    """(from, to, chunks) of each message."""
    return [(position.rank, step.send_to, step.count) for position, step in plan.steps() if step.op.sends]


@pytest.mark.parametrize("num_ranks", [3, 5, 8])
@pytest.mark.parametrize("name, kind", BEGINNING)
def test_no_two_ranks_begin_with_the_same_peer(name, kind, num_ranks):
    first: dict[int, int] = {}
    for position, step in ALGORITHMS[name].plan(kind, num_ranks).steps():
        if step.op.sends:
            first.setdefault(position.rank, step.send_to)
    assert sorted(first.values()) == list(range(num_ranks))


@pytest.mark.parametrize("num_ranks", [3, 5, 8])
@pytest.mark.parametrize("name, kind", [pair for pair in BEGINNING if pair[1] != "allgather"])
def test_sums_stay_in_the_order_of_ranks(name, kind, num_ranks):
    for programs in ALGORITHMS[name].plan(kind, num_ranks).programs:
        senders = [
            step.receive_from for program in programs for step in program.steps
            if step.op.receives and (step.op.reduces or step.dst is not None and step.dst.buffer == "scratch")
        ]  # fmt: skip
        assert senders == sorted(senders) and len(senders) == num_ranks - 1
