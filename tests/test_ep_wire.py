"""Rows that travel once per (token, rank): the same results, with one rounding more; and when that is picked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from ep_cases import KINDS_BY_RANK, Case, Step, on_ranks, round_trip, run_cases
from failure_cases import raised_by
from test_expert_parallel import placement_cases, shape_cases, traffic_cases

import epcomm
from epcomm.errors import ConfigError
from epcomm.moe.wire import cheaper_wire, expected_ranks
from epcomm.testing.oracle import even_placement

BY_RANK_IDS = [layout for _, layout in KINDS_BY_RANK]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("mode, layout", KINDS_BY_RANK, ids=BY_RANK_IDS)
def test_traffic(mode: str, layout: str, world: int) -> None:
    cases = [replace(case, mode=mode, layout=layout, wire="rank") for case in traffic_cases()]
    on_ranks(world, run_cases, cases if world < 5 else cases[::2], longest=0.0005)


@pytest.mark.parametrize("mode, layout", KINDS_BY_RANK, ids=BY_RANK_IDS)
def test_shapes_formats_and_placements(mode: str, layout: str) -> None:
    cases = shape_cases() + placement_cases(3)
    on_ranks(3, run_cases, [replace(case, mode=mode, layout=layout, wire="rank") for case in cases], longest=0)


def run_combine_first(comm: epcomm.Communicator, case: Case) -> None:
    """Sums are made where dispatch put the rows: a routing has to be dispatched before its first combine."""
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    routing = ep.route(step.exchange.indices[comm.rank])
    raised = raised_by(ep.combine, step.y()[comm.rank], routing)
    assert type(raised.error) is ConfigError and "wanted a routing that was dispatched" in raised.text
    comm.reset()
    round_trip(ep, step)


def test_combine_before_dispatch() -> None:
    on_ranks(2, run_combine_first, Case(wire="rank"), longest=0)


def rank_sets(num_experts: int, topk: int, owner: Sequence[int]) -> list[int]:
    """For each choice of experts, how many ranks own one of them."""
    return [len({owner[e] for e in chosen}) for chosen in itertools.combinations(range(num_experts), topk)]


@pytest.mark.parametrize("num_experts, topk, size", [(6, 2, 3), (8, 3, 4), (5, 5, 2), (7, 1, 7), (9, 4, 2)])
def test_expected_ranks(num_experts: int, topk: int, size: int) -> None:
    owner = even_placement(num_experts, size)
    counts = rank_sets(num_experts, topk, owner)
    assert expected_ranks(num_experts, topk, owner) == pytest.approx(sum(counts) / len(counts))


def test_choice() -> None:
    """Links much slower than memory make the detour worth it; none is where memory is the link."""
    owner = even_placement(256, 8)
    assert cheaper_wire(8, 256, 8, owner, link_speed=1.0) == "expert"
    assert cheaper_wire(8, 256, 8, owner, link_speed=450 / 3350) == "rank"
    assert cheaper_wire(8, 256, 1, owner, link_speed=450 / 3350) == "expert"  # nothing is sent twice
    assert cheaper_wire(1, 256, 8, even_placement(256, 1), link_speed=450 / 3350) == "expert"


def run_wires(comm: epcomm.Communicator) -> None:
    assert Case().handle(comm).config.wire == "expert"  # on CPUs
    assert Case(layout="flat").handle(comm).config.wire == "rank"
    assert Case(wire="rank").handle(comm).memory()["arrivals"] > 0
    for case in (Case(layout="flat", wire="expert"), Case(wire="node")):
        raised = raised_by(case.handle, comm)
        assert type(raised.error) is ConfigError and "argument `wire`: wanted" in raised.text
        comm.reset()


def test_wire_argument() -> None:
    on_ranks(2, run_wires, longest=0)


def run_counted(comm: epcomm.Communicator) -> None:
    """What crosses to a peer: each token once, however many of its experts are there."""
    case = Case(wire="rank", num_experts=8, topk=4, max_tokens=20, hidden=64)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    routing = ep.route(step.exchange.indices[comm.rank])
    per_rank, per_expert = routing.send_counts
    owner = torch.tensor(step.exchange.owner)
    named = owner[step.exchange.indices[comm.rank]]
    assert per_rank.tolist() == [int((named == rank).any(dim=1).sum()) for rank in range(comm.size)]
    assert int(per_expert.sum()) > int(per_rank.sum())


def test_rows_on_the_wire() -> None:
    on_ranks(3, run_counted, longest=0)
