"""Ranks that disagree, that receive too much, or that die: what every rank raises, and that the others can go on."""

from __future__ import annotations

import functools
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import KIND_IDS, KINDS, Case, Step, check_rows, dispatched, on_ranks, round_trip
from failure_cases import SOON, Raised, raised_by

import epcomm
from epcomm.errors import CapacityError, MismatchError, PeerFailedError, PeerLostError, TimeoutError
from epcomm.testing.ranks import RankDied, rank_outcomes, run_ranks

# ---- more rows than max_recv_rows


def largest(step: Step, ranks: Sequence[int] | None = None) -> int:
    """Rows of the rank (of these) that receives most: padding counts where it takes memory."""
    padding = step.case.layout == "contiguous"
    counts = [int((rows.source_token >= -1).sum() if padding else rows.is_real.sum()) for rows in step.exchange.rows]
    return max(counts if ranks is None else [counts[rank] for rank in ranks])


def run_over_capacity(comm: epcomm.Communicator, case: Case) -> None:
    """All ranks raise, also those that would receive few rows; then the handle goes on as if nothing had been."""
    needed = largest(Step(case, comm.size, 0))
    just_enough = replace(case, max_recv_rows=needed).handle(comm)
    ep = replace(case, max_recv_rows=needed - 1).handle(comm)
    small = replace(case, gate="none")
    kept = []
    for number in range(6):
        step = Step(case, comm.size, 0)
        raised = raised_by(dispatched, ep, step)
        assert type(raised.error) is CapacityError, raised
        numbers = re.findall(r"\d+", raised.text.partition("max_recv_rows")[2])
        most = [largest(Step(case, comm.size, 0), [rank]) for rank in range(comm.size)]
        assert numbers[:3] == [str(needed), str(most.index(needed)), str(needed - 1)], raised
        kept.append(raised)  # with the frames it went through
        comm.check()
        round_trip(ep, Step(small, comm.size, number))
        round_trip(just_enough, step)
        assert comm.allreduce(torch.ones(1)) == comm.size


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_more_rows_than_there_is_room_for(mode: str, layout: str, num_threads: int) -> None:
    case = Case(mode, layout, gate="one_rank", tokens="uneven", alignment=4)
    on_ranks(3, run_over_capacity, case, num_threads=num_threads, longest=0.0005)


# ---- ranks that disagree

OTHER_HANDLES: dict[str, Any] = {
    "num_experts": 7, "topk": 2, "hidden": 10, "max_tokens": 8, "dtype": torch.float32, "mode": "latency",
    "layout": "flat", "placement": (1, 1, 1, 0, 0, 0), "max_recv_rows": 50, "blocks": 4, "alignment": 2,
}  # fmt: skip


def check_mismatch(comm: epcomm.Communicator, call: Callable[[], Any], *texts: str) -> None:
    """Every rank raises `MismatchError` with both texts, soon."""
    comm.barrier()
    started = time.monotonic()
    raised = raised_by(call)
    assert type(raised.error) is MismatchError, raised
    assert all(text in raised.text for text in texts), (texts, raised)
    assert raised.when - started < SOON, raised
    comm.reset()


def run_other_handles(comm: epcomm.Communicator) -> None:
    case = Case()
    for name, value in OTHER_HANDLES.items():
        mine = replace(case, **{name: value}) if comm.rank == 1 else case
        texts = [f"{name}={value}"] + ([] if name == "placement" else [f"{name}={getattr(case, name)}"])
        check_mismatch(comm, functools.partial(mine.handle, comm), *texts)
    round_trip(case.handle(comm), Step(case, comm.size, 0))


def test_handles_that_differ() -> None:
    on_ranks(3, run_other_handles, longest=0)


def calls_that_differ(ep: Any, other: Any, step: Step, comm: epcomm.Communicator) -> dict[str, Any]:
    """(what rank 1 calls, what the others call, what the texts name), made anew for each use."""
    rank, mode = ep.rank, step.case.mode
    index = step.exchange.indices[rank]
    x, y, weights = step.x()[rank], step.y()[rank], step.weights[rank]
    routing = ep.route(index)
    received = ep.dispatch(x, routing)
    calls = {
        "allreduce": (lambda: comm.allreduce(x), lambda: ep.dispatch(x, routing), "allreduce(", "dispatch("),
        "combine": (lambda: ep.combine(y, received), lambda: ep.dispatch(x, routing), "combine(", "dispatch("),
        "barrier": (comm.barrier, lambda: ep.combine(y, received), "barrier(", "combine("),
        "close": (ep.close, lambda: ep.dispatch(x, routing), "close(", "dispatch("),
        "weights": (lambda: ep.dispatch(x, routing, weights), lambda: ep.dispatch(x, routing), "given", "None"),
        "width": (lambda: ep.dispatch(x[:, 1:], routing), lambda: ep.dispatch(x, routing), "x 8", "x 9"),
        "dtype": (lambda: ep.dispatch(x.half(), routing), lambda: ep.dispatch(x, routing), "float16", "bfloat16"),
        "tensors": (lambda: ep.dispatch((x[:, :4], x[:, 4:]), routing), lambda: ep.dispatch(x, routing), "x 4", "x 9"),
        "dtype of y": (lambda: ep.combine(y.half(), received), lambda: ep.combine(y, received), "float16", "bfloat16"),
        "handle": (lambda: dispatched(other, step), lambda: dispatched(ep, step), ep.name, other.name),
        "topk": (lambda: ep.dispatch(x, ep.route(index[:, 1:])), lambda: dispatched(ep, step), "topk=2", "topk=3"),
        "index": (lambda: ep.dispatch(x, ep.route(index.int())), lambda: dispatched(ep, step), "int32", "int64"),
    }
    if step.case.layout != "flat":
        usual = functools.partial(ep.combine, y, received)
        calls["reduce"] = (functools.partial(usual, reduce=False), usual, "reduce=False", "reduce=True")
        calls["weights of combine"] = (functools.partial(usual, weights), usual, "given", "None")
    if mode == "throughput":
        calls["route"] = (lambda: ep.route(index), lambda: ep.dispatch(x, routing), "route(", "dispatch(")
    return calls


def run_calls_that_differ(comm: epcomm.Communicator, case: Case) -> None:
    ep, other = case.handle(comm), case.handle(comm)
    step = Step(case, comm.size, 0)
    for name in calls_that_differ(ep, other, step, comm):
        spoiled, usual, *texts = calls_that_differ(ep, other, step, comm)[name]
        check_mismatch(comm, spoiled if comm.rank == 1 else usual, *texts)
        round_trip(ep, step)
        round_trip(other, step)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_calls_that_differ(mode: str, layout: str) -> None:
    on_ranks(3, run_calls_that_differ, Case(mode, layout), longest=0)


# ---- ranks that die or leave


def run_until_killed(phase: str, case: Case) -> Raised:
    comm = epcomm.init(timeout=20.0)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    x, y = step.x()[comm.rank], step.y()[comm.rank]
    round_trip(ep, step)
    routing = ep.route(step.exchange.indices[comm.rank])
    received = ep.dispatch(x, routing)
    comm.barrier()
    if comm.rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()  # the others are in it by then
    while comm.rank == 1:
        round_trip(ep, step) if phase == "anywhere" else time.sleep(0.1)
    started = time.monotonic()
    calls = {
        "route": lambda: ep.dispatch(x, ep.route(step.exchange.indices[comm.rank])),
        "dispatch": lambda: ep.dispatch(x, routing),
        "combine": lambda: ep.combine(y, received),
        "close": ep.close,
        "anywhere": lambda: [round_trip(ep, step) for _ in itertools.count()],
    }
    raised = raised_by(calls[phase])
    assert raised.when - started < 0.1 + SOON
    check_rows(step, comm.rank, received.x, step.x())  # what was received stays
    assert type(raised_by(calls["combine"]).error) is PeerLostError  # and so does the failure
    ep.close()
    comm.close()
    return raised


@pytest.mark.parametrize("phase", ["route", "dispatch", "combine", "close", "anywhere"])
@pytest.mark.parametrize("mode, layout", KINDS[::4], ids=KIND_IDS[::4])
def test_peer_that_is_killed(mode: str, layout: str, phase: str) -> None:
    outcomes = rank_outcomes(run_until_killed, 3, phase, Case(mode, layout), expendable=[1])
    assert isinstance(outcomes[1], RankDied)
    for raised in (outcomes[0], outcomes[2]):
        assert isinstance(raised, Raised), raised
        assert type(raised.error) is PeerLostError and raised.error.rank == 1, raised


PHASES = {"route": "token counts", "dispatch": "receive block", "combine": "expert outputs"}


def run_too_late(case: Case, phase: str) -> Raised:
    with epcomm.init(timeout=20.0) as comm:
        ep, step = case.handle(comm), Step(case, comm.size, 0)
        round_trip(ep, step)
    comm = epcomm.init(timeout=0.5)
    ep, index = case.handle(comm), step.exchange.indices[comm.rank]
    x, y = step.x()[comm.rank], step.y()[comm.rank]
    done: dict[str, Any] = {}
    calls = {
        "route": lambda: ep.route(index),
        "dispatch": lambda: ep.dispatch(x, done["route"]),
        "combine": lambda: ep.combine(y, done["dispatch"]),
    }
    for name in itertools.takewhile(lambda name: name != phase, calls):
        done[name] = calls[name]()
    if comm.rank == 1:
        time.sleep(1.5)
    return raised_by(calls[phase])


@pytest.mark.parametrize("phase", PHASES)
def test_peer_that_comes_too_late(phase: str) -> None:
    in_time, late, third = run_ranks(run_too_late, 3, Case(), phase)
    kinds = {type(raised.error) for raised in (in_time, third)}
    assert TimeoutError in kinds and kinds <= {TimeoutError, PeerFailedError}
    assert type(late.error) is PeerFailedError
    for raised in (in_time, late, third):
        assert all(text in raised.text for text in (phase, "rank 1", "0.5 s", PHASES[phase])), raised


def run_until_raised(case: Case) -> Any:
    with epcomm.init(timeout=20.0) as comm:
        ep, step = case.handle(comm), Step(case, comm.size, 0)
        round_trip(ep, step)
        if comm.rank == 1:
            raise ArithmeticError("the experts of rank 1 gave up")
        return raised_by(round_trip, ep, step)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
@pytest.mark.parametrize("mode, layout", KINDS[::4], ids=KIND_IDS[::4])
def test_peer_that_raises_between_operations(mode: str, layout: str, ranks: str) -> None:
    outcomes = rank_outcomes(run_until_raised, 3, Case(mode, layout), ranks=ranks)
    assert type(outcomes[1]) is ArithmeticError
    for outcome in (outcomes[0], outcomes[2]):
        assert type(outcome) is not Raised or type(outcome.error) is PeerFailedError
        assert "the experts of rank 1 gave up" in str(outcome)
