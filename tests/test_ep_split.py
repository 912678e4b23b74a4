"""Split and asynchronous dispatch and combine: what runs between, several handles in flight, and misuse."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import (
    KIND_IDS,
    KINDS,
    Case,
    Step,
    check_combined,
    check_fields,
    check_raised,
    check_rows,
    in_all_kinds,
    on_ranks,
    round_trip,
)
from failure_cases import raised_by

import epcomm
from epcomm.errors import ClosedError, ConfigError
from epcomm.testing.oracle import combined

CASE = Case(hidden=40, gate="holes_and_duplicates", tokens="uneven", alignment=4)


def split_round_trip(ep: Any, step: Step, between: Any) -> None:
    """`round_trip` in halves, with other calls between them."""
    rank, exchange, x, y = ep.rank, step.exchange, step.x(), step.y()
    weights = step.weights[rank] if step.number % 2 else None
    sent = ep.dispatch(x[rank], ep.route(exchange.indices[rank]), weights, split=True)
    expected = None if sent.expected is None else sent.expected.rows_in_block()[0]
    between()
    received = sent.finish()
    assert sent.finish() is received
    if ep.config.has_fixed_rows:  # where they will be was known
        assert sent.expected is received and expected is not None
        assert (expected.shape, expected.data_ptr()) == (received.x.shape, received.x.data_ptr())
    else:
        assert expected is None
    check_rows(step, rank, received.x, x)
    check_fields(step, received, weights is not None)
    rows = y[rank] if step.number % 3 else received.output_buffer().copy_(y[rank])
    factors = step.weights[rank] if step.case.layout != "flat" and weights is None else None
    sent = ep.combine(rows, received, factors, split=True)
    between()
    result = sent.finish()
    check_combined(f"rank {rank}, {step}: split", result, combined(exchange, rank, y, factors), step.case.dtype)


def run_split(comm: epcomm.Communicator) -> None:
    """Collectives, routing, and whole and split operations of another handle run between the halves."""
    others = iter(range(100, 1000))
    for case in in_all_kinds([CASE]):
        ep, other = case.handle(comm), case.handle(comm)

        def between(case: Case = case, ep: Any = ep, other: Any = other) -> None:
            step = Step(case, comm.size, next(others))
            ep.route(step.exchange.indices[comm.rank])
            assert comm.allreduce(torch.ones(3)).eq(comm.size).all()
            round_trip(other, step)
            split_round_trip(other, step, comm.barrier)

        for number in range(4):
            split_round_trip(ep, Step(case, comm.size, number), between)
            round_trip(ep, Step(case, comm.size, number + 10))
        ep.close()
        other.close()


@pytest.mark.parametrize("world, num_threads", [(1, 1), (2, 2), (3, 1)])
def test_split(world: int, num_threads: int) -> None:
    on_ranks(world, run_split, num_threads=num_threads)


def run_two_in_flight(comm: epcomm.Communicator, mode: str, layout: str) -> None:
    """The halves of two handles overlap, and end in another order than they began."""
    case = Case(mode, layout, gate="zipf", tokens="uneven")
    handles = [case.handle(comm) for _ in range(2)]
    for number in range(3):
        steps = [Step(case, comm.size, 2 * number + i) for i in range(2)]
        routings = [ep.route(step.exchange.indices[comm.rank]) for ep, step in zip(handles, steps)]
        sent = [
            ep.dispatch(step.x()[comm.rank], routing, split=True) for ep, step, routing in zip(handles, steps, routings)
        ]
        received = [half.finish() for half in reversed(sent)][::-1]
        for step, result in zip(steps, received):
            check_rows(step, comm.rank, result.x, step.x())
        sent = [
            ep.combine(step.y()[comm.rank], result, split=True) for ep, step, result in zip(handles, steps, received)
        ]
        for step, half in zip(steps, sent):
            wanted = combined(step.exchange, comm.rank, step.y())
            check_combined(str(step), half.finish(), wanted, case.dtype)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_two_handles_in_flight(mode: str, layout: str) -> None:
    on_ranks(3, run_two_in_flight, mode, layout)


def run_misuse(comm: epcomm.Communicator) -> None:
    step = Step(CASE, comm.size, 0)
    ep, rank = CASE.handle(comm), comm.rank
    routing = ep.route(step.exchange.indices[rank])
    ep.dispatch(step.x()[rank], routing, split=True)
    if rank == 1:
        combine = functools.partial(ep.combine, step.y()[rank], routing)
        check_raised(comm, combine, ConfigError, "unfinished split operation", "finish")
    else:
        check_raised(comm, comm.barrier, ConfigError, "unfinished split operation")
    round_trip(ep, step)
    sent = ep.dispatch(step.x()[rank], ep.route(step.exchange.indices[rank]), split=True)
    comm.reset()
    raised = raised_by(sent.finish)
    assert type(raised.error) is ClosedError and "before the communicator was reset" in raised.text
    round_trip(ep, step)


def test_misuse() -> None:
    on_ranks(2, run_misuse, longest=0)


def run_async(comm: epcomm.Communicator) -> None:
    """Works in order beside collectives; synchronous calls queue behind; several wait at once."""
    for case in in_all_kinds([CASE]):
        ep, rank = case.handle(comm), comm.rank
        for number in range(3):
            steps = [Step(case, comm.size, 2 * number + i) for i in range(2)]
            routings = [ep.route(step.exchange.indices[rank]) for step in steps]
            sums = [comm.allreduce(torch.full((4,), float(rank + i)), async_op=True) for i in range(2)]
            works = [ep.dispatch(s.x()[rank], r, s.weights[rank], async_op=True) for s, r in zip(steps, routings)]
            total = comm.allreduce(torch.ones(2))
            assert all(work.is_completed() for work in [*sums, *works]) and total.eq(comm.size).all()
            results = [work.result() for work in works]
            for step, result in zip(steps, results):
                check_rows(step, rank, result.x, step.x())
                check_fields(step, result, True)
            works = [ep.combine(s.y()[rank], r, async_op=True) for s, r in zip(steps, results)]
            for step, work in zip(steps, works):
                wanted = combined(step.exchange, rank, step.y())
                assert work.wait()
                check_combined(str(step), work.get_future().wait()[0], wanted, case.dtype)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_async(ranks: str) -> None:
    on_ranks(2, run_async, ranks=ranks)


def run_abandoned(comm: epcomm.Communicator) -> None:
    """A reset in the middle of a split, held or dropped, leaves its block to the next call, of which there is one."""
    for case in in_all_kinds([replace(CASE, blocks=1)]):
        ep = case.handle(comm)
        for held in (True, False):
            step = Step(case, comm.size, 1)
            sent = ep.dispatch(step.x()[comm.rank], ep.route(step.exchange.indices[comm.rank]), split=True)
            if not held:
                del sent
            comm.reset()
            round_trip(ep, step)
            if held:
                for _ in range(2):
                    assert type(raised_by(sent.finish).error) is ClosedError
        ep.close()


def test_abandoned() -> None:
    on_ranks(2, run_abandoned, longest=0)


def run_in_inference_mode(comm: epcomm.Communicator) -> None:
    """The worker does as the caller would have: what the caller made in inference mode can be written there."""
    step = Step(CASE, comm.size, 1)
    ep, rank = CASE.handle(comm), comm.rank
    with torch.inference_mode():
        routing = ep.route(step.exchange.indices[rank])
        out = torch.zeros(step.exchange.rows[rank].source_token.shape + (CASE.hidden,), dtype=CASE.dtype)
        received = ep.dispatch(step.x()[rank], routing, out=out, async_op=True).result()
        check_rows(step, rank, out, step.x())
        assert received.x is out
    x = step.x(torch.float32, 9)[rank].requires_grad_()
    with torch.no_grad():
        assert not ep.dispatch(x, ep.route(step.exchange.indices[rank]), async_op=True).result().x.requires_grad


def test_modes_of_the_caller() -> None:
    on_ranks(2, run_in_inference_mode, longest=0)
