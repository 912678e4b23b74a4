"""What cannot be used yet, here, or any more: routings that are undispatched, of another handle, or outdated."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from ep_cases import KIND_IDS, KINDS, Case, Step, check_raised, on_ranks, round_trip
from failure_cases import raised_by

import epcomm
from epcomm.errors import ClosedError, ConfigError, PeerFailedError
from epcomm.testing.ranks import run_ranks


def run_before_dispatch(comm: epcomm.Communicator, case: Case) -> None:
    """combine needs everyone's counts, which latency mode exchanges in dispatch."""
    ep = case.handle(comm)
    for number in range(3):
        step = Step(case, comm.size, number)
        routing, y = ep.route(step.exchange.indices[comm.rank]), step.y()
        comm.barrier()
        raised = raised_by(ep.combine, y[comm.rank], routing)
        assert type(raised.error) in (ConfigError, PeerFailedError) and "not dispatched" in raised.text, raised
        comm.reset()
        round_trip(ep, step)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "flat"])
def test_combine_before_dispatch(layout: str) -> None:
    on_ranks(2, run_before_dispatch, Case("latency", layout), longest=0)


def run_with_routing_of_another_handle(comm: epcomm.Communicator, case: Case) -> None:
    ep, other = case.handle(comm), case.handle(comm)
    step = Step(case, comm.size, 0)
    x, y, index = step.x()[comm.rank], step.y()[comm.rank], step.exchange.indices[comm.rank]
    for number in range(2):
        routing, foreign = ep.route(index), other.route(index)
        received, foreign_received = ep.dispatch(x, routing), other.dispatch(x, foreign)
        mine = foreign if comm.rank == 1 else routing
        check_raised(comm, functools.partial(ep.dispatch, x, mine), ConfigError, "`routing`", "another handle")
        routing, foreign = ep.route(index), other.route(index)
        received, foreign_received = ep.dispatch(x, routing), other.dispatch(x, foreign)
        results = foreign_received if comm.rank == 1 else received
        check_raised(comm, functools.partial(ep.combine, y, results), ConfigError, "`received`", "another handle")
        round_trip(ep, Step(case, comm.size, number))


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_routing_of_another_handle(mode: str, layout: str) -> None:
    on_ranks(3, run_with_routing_of_another_handle, Case(mode, layout), longest=0)


def check_closed(*calls: Any) -> None:
    """Each of the calls (a function and its arguments) raises `ClosedError`."""
    for call in calls:
        raised = raised_by(*call)
        assert type(raised.error) is ClosedError, raised


def run_after_reset(comm: epcomm.Communicator, case: Case) -> None:
    """Routings and results from before a reset are outdated; tensors stay."""
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    x, y = step.x()[comm.rank], step.y()[comm.rank]
    for number in range(3):
        routing = ep.route(step.exchange.indices[comm.rank])
        received = ep.dispatch(x, routing)
        before = received.x.clone()
        comm.abort("enough")
        raised_by(comm.barrier)
        comm.reset()
        check_closed((ep.dispatch, x, routing), (ep.combine, y, routing), (ep.combine, y, received))
        round_trip(ep, Step(case, comm.size, number))
        real = step.exchange.rows[comm.rank].is_real
        assert torch.equal(received.x[real], before[real])
    comm.barrier()


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_reset_outdates_routings_and_results(mode: str, layout: str) -> None:
    on_ranks(2, run_after_reset, Case(mode, layout), longest=0)


def run_after_fork(comm: epcomm.Communicator, case: Case) -> None:
    """A child speaks for no rank: all its calls fail, and the parent's go on."""
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    x, y, index = step.x()[comm.rank], step.y()[comm.rank], step.exchange.indices[comm.rank]
    routing = ep.route(index)
    received = ep.dispatch(x, routing)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check_closed((ep.route, index), (ep.dispatch, x, routing), (ep.combine, y, received))
            ep.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    del received
    for number in range(3):
        round_trip(ep, Step(case, comm.size, number))


@pytest.mark.parametrize("mode, layout", KINDS[::4], ids=KIND_IDS[::4])
def test_forked_child(mode: str, layout: str) -> None:
    on_ranks(2, run_after_fork, Case(mode, layout), longest=0)


def run_after_close(case: Case) -> None:
    with epcomm.init(timeout=30.0) as comm:
        ep, other, step = case.handle(comm), case.handle(comm), Step(case, comm.size, 0)
        routing = ep.route(step.exchange.indices[comm.rank])
        x, y = step.x()[comm.rank], step.y()[comm.rank]
        received = ep.dispatch(x, routing)
        ep.close()
        ep.close()
        assert f"num_experts={case.num_experts}" in repr(ep) and repr(ep).endswith(", closed>")
        assert f"of {len(x)} tokens of rank {comm.rank}" in repr(routing)
        assert f"rank {comm.rank}, {case.layout}: {x.dtype} {tuple(received.x.shape)}" in repr(received)
        index = step.exchange.indices[comm.rank]
        calls = [(ep.route, index), (ep.dispatch, x, routing), (ep.combine, y, received), (ep.combine, y, routing)]
        check_closed(*calls)
        round_trip(other, step)
        routing = other.route(index)
    check_closed(*calls, (other.route, index), (other.dispatch, x, routing), (other.combine, y, routing))
    other.close()


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_closed_handles_and_communicators(mode: str, layout: str) -> None:
    run_ranks(run_after_close, 2, Case(mode, layout))
