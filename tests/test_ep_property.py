"""Shapes, routings and orders of calls that nobody thought of: drawn by hypothesis, or at random from a seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from ep_cases import (
    FLOATS,
    KIND_IDS,
    KINDS,
    Case,
    Step,
    check_combined,
    check_fields,
    check_rows,
    on_ranks,
    run_cases,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import epcomm
from epcomm.testing.oracle import combined
from epcomm.testing.routing import GATES, TOKENS, payload


@st.composite
def cases(draw: st.DrawFn, world: int) -> Case:
    """Any handle of moderate size, with any traffic."""
    mode, layout = draw(st.sampled_from(KINDS))
    num_experts = draw(st.integers(1, 12))
    owner = st.lists(st.integers(0, world - 1), min_size=num_experts, max_size=num_experts).map(tuple)
    return Case(
        mode,
        layout,
        num_experts=num_experts,
        topk=draw(st.integers(1, num_experts)),
        hidden=draw(st.integers(1, 80)),
        max_tokens=draw(st.integers(0, 25)),
        dtype=draw(st.sampled_from(FLOATS)),
        alignment=draw(st.integers(1, 9)),
        placement=draw(st.none() | owner),
        blocks=draw(st.integers(1, 4)),
        gate=draw(st.sampled_from(sorted(GATES))),
        tokens=draw(st.sampled_from(sorted(TOKENS))),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


# The message of a failure names its case, which is small already: shrinking would take minutes.
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data(), st.integers(1, 4), st.integers(1, 2), st.sampled_from(["processes", "threads"]))
def test_any_case(data: st.DataObject, world: int, num_threads: int, ranks: str) -> None:
    drawn = data.draw(st.lists(cases(world), min_size=5, max_size=10))
    on_ranks(world, run_cases, drawn, ranks=ranks, num_threads=num_threads, longest=0)


# ---- random programs


@dataclass
class Player:
    """A rank that calls what a seed says: peers with the same seed make the same calls, and keep other results."""

    comm: epcomm.Communicator
    case: Case
    seed: int
    routings: list[tuple[Step, Any]] = field(default_factory=list)
    results: list[tuple[Step, Any, int | None]] = field(default_factory=list)  # with what its payload depends on
    outputs: list[torch.Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.ep, self.rank = self.case.handle(self.comm), self.comm.rank
        self.choose, self.choose_alone = random.Random(self.seed), random.Random(f"{self.seed}/{self.rank}")

    def play(self, num_turns: int) -> None:
        moves = [
            self.route,
            self.dispatch,
            self.dispatch,
            self.combine,
            self.combine,
            self.other,
            self.begin,
            self.forget,
        ]
        for _ in range(num_turns):
            self.choose.choice(moves)()
            self.keep_or_drop()
        self.check_results()
        self.wait()

    def route(self) -> None:
        step = Step(self.case, self.comm.size, next(self.numbers))
        self.routings.append((step, self.ep.route(step.exchange.indices[self.rank])))

    def x(self, step: Step, version: int) -> list[torch.Tensor]:
        return [payload(x.shape, x.dtype, step.number, rank, version, 9) for rank, x in enumerate(step.x())]

    def dispatch(self) -> None:
        if not self.routings:
            self.route()
        step, routing = self.choose.choice(self.routings)
        version, has_weights = next(self.numbers), self.choose.random() < 0.5
        options = {"copy": self.choose_alone.random() < 0.2}
        weights = step.weights[self.rank] if has_weights else None
        received = self.ep.dispatch(self.x(step, version)[self.rank], routing, weights, **options)
        check_fields(step, received, has_weights)
        self.results.append((step, received, version))
        self.check_results()

    def combine(self) -> None:
        # which routing is for all ranks to agree on; a result of it may be gone here
        placed = [(step, routing) for step, routing in self.routings if routing.is_placed]
        if not placed:
            return
        step, routing = self.choose.choice(placed)
        y, weights, bias = step.y(), None, None
        if self.choose.random() < 0.5 and self.case.layout != "flat":
            weights = step.weights[self.rank]
        if self.choose_alone.random() < 0.3:
            bias = torch.full_like(step.x()[self.rank], 3)
        rows, target = y[self.rank], routing
        for of_step, received, _ in self.results:
            if of_step is step and self.choose_alone.random() < 0.7:
                rows, target = received.output_buffer().copy_(rows), received
                if self.choose_alone.random() < 0.3:
                    self.outputs.append(rows)
                break
        result = self.ep.combine(rows, target, weights, bias=bias)
        check_combined(step, result, combined(step.exchange, self.rank, y, weights, bias), self.case.dtype)

    def other(self) -> None:
        assert self.comm.allreduce(torch.ones(3)).tolist() == [self.comm.size] * 3

    def begin(self) -> None:
        """Something asynchronous, behind which the next calls queue."""
        self.works.append(self.comm.allreduce(torch.ones(1000), async_op=True))

    def wait(self) -> None:
        for work in self.works:
            assert (work.result() == self.comm.size).all()
        self.works.clear()

    def forget(self) -> None:
        """The routings that a program knows are the same on all ranks."""
        if len(self.routings) > 4:
            del self.routings[self.choose.randrange(len(self.routings))]

    def keep_or_drop(self) -> None:
        """What each rank holds on to is its own affair."""
        while self.results and self.choose_alone.random() < 0.4:
            del self.results[self.choose_alone.randrange(len(self.results))]
        if self.choose_alone.random() < 0.5:
            self.outputs.clear()
        if self.choose_alone.random() < 0.3:
            self.wait()

    def check_results(self) -> None:
        for step, received, version in self.results:
            check_rows(step, self.rank, received.x, self.x(step, version))


def play(comm: epcomm.Communicator, case: Case, seed: int, num_turns: int) -> None:
    Player(comm, case, seed).play(num_turns)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_random_programs(mode: str, layout: str) -> None:
    for seed in range(6):
        case = Case(mode, layout, gate="holes_and_duplicates", tokens="uneven", alignment=4, blocks=1 + seed % 4)
        on_ranks(2 + seed % 2, play, case, seed, 80, disturb=seed)


@pytest.mark.slow
@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_long_random_programs(mode: str, layout: str) -> None:
    for seed in range(10, 60):
        traffic = Case(mode, layout, gate="holes", tokens="uneven", hidden=300)
        case = replace(traffic, alignment=seed % 3 + 1, blocks=seed % 4 + 1)
        ranks = "processes" if seed % 5 else "threads"
        on_ranks(2 + seed % 3, play, case, seed, 150, disturb=seed, num_threads=1 + seed % 2, ranks=ranks)
