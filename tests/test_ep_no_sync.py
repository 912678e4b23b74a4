"""Results whose shape doesn't depend on the routing (host_sync=False); rows that are dropped past `max_recv_rows`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_combined, in_all_kinds, on_ranks, round_trip
from failure_cases import raised_by
from test_ep_failures import largest

import epcomm
from epcomm.errors import CapacityError, ConfigError
from epcomm.testing.oracle import Exchange, combined, received_weights

CASE = Case(hidden=20, gate="holes_and_duplicates", tokens="uneven", alignment=4, host_sync=False, zero_tail=True)


def kinds(case: Case) -> list[Case]:
    return [kind for kind in in_all_kinds([case]) if kind.layout != "padded"]


def first_rows(values: torch.Tensor | None, wanted: torch.Tensor | None, fill: Any) -> None:
    """`values` starts with `wanted`, cut where it ends; what comes then is `fill`."""
    if wanted is None:
        assert values is None
        return
    assert values is not None and values.dtype == wanted.dtype
    kept = min(len(wanted), len(values))
    assert torch.equal(values[:kept], wanted[:kept]), (values, wanted)
    assert values[kept:].eq(fill).all(), values[kept:]


def kept_counts(exchange: Exchange, rank: int, limit: int) -> list[int]:
    """Rows (flat: selections) of each local expert that lie before the limit."""
    rows = exchange.rows[rank]
    if exchange.layout == "flat":
        assert rows.topk_idx is not None
        kept = rows.topk_idx[:limit]
        return [int((kept == number).sum()) for number in range(len(exchange.experts_of(rank)))]
    return [int((rows.expert[:limit] == expert).sum()) for expert in exchange.experts_of(rank)]


def without_dropped(exchange: Exchange, y: Sequence[torch.Tensor], limit: int) -> list[torch.Tensor]:
    """Expert outputs of which those past the limit count for nothing."""
    return [torch.cat([rows[:limit], torch.zeros_like(rows[limit:])]) for rows in y]


def fixed_round_trip(ep: Any, step: Step, limit: int) -> None:
    """Dispatch and combine of a step on a handle that gives `limit` rows, whatever is received."""
    rank, exchange, x, y = ep.rank, step.exchange, step.x(), step.y()
    rows = exchange.rows[rank]
    received = ep.dispatch(x[rank], ep.route(exchange.indices[rank]), step.weights[rank])
    assert received.x.shape == (limit, step.case.hidden)
    first_rows(received.x, rows.gather(x), 0)
    first_rows(received.source_token, rows.source_token, -1)
    first_rows(received.source_rank, rows.source_rank, -1)
    first_rows(received.topk_idx, rows.topk_idx, -1)
    first_rows(received.topk_weights, received_weights(exchange, rank, step.weights), 0)
    assert received.expert_counts.tolist() == kept_counts(exchange, rank, limit)
    if rows.expert_offsets is None:
        assert received.expert_offsets is None
    else:
        assert received.expert_offsets.tolist() == rows.expert_offsets.clamp(max=limit).tolist()
    outputs = torch.full((limit, step.case.hidden), torch.nan, dtype=step.case.dtype)
    kept = min(limit, len(rows.source_token))
    outputs[:kept] = y[rank][:kept]
    factors = step.weights[rank] if step.case.layout != "flat" else None
    if step.number % 2:
        outputs = received.output_buffer().copy_(outputs)
    result = ep.combine(outputs, received, factors)
    clean = [rows.nan_to_num() for rows in without_dropped(exchange, y, limit)]
    check_combined(f"rank {rank}, {step}", result, combined(exchange, rank, clean, factors), step.case.dtype)


def run_fixed(comm: epcomm.Communicator, cases: list[Case]) -> None:
    for case in cases:
        ep = case.handle(comm)
        for number in range(3):
            fixed_round_trip(ep, Step(case, comm.size, number), ep.config.capacity)
        ep.close()


@pytest.mark.parametrize("world, num_threads", [(1, 1), (2, 2), (3, 1)])
def test_fixed_rows(world: int, num_threads: int) -> None:
    cases = kinds(CASE) + kinds(replace(CASE, index_dtype=torch.int32, hidden=3, gate="none", alignment=1))
    on_ranks(world, run_fixed, cases, num_threads=num_threads)


def run_dropping(comm: epcomm.Communicator, cases: list[Case]) -> None:
    """Limits from one row to all but one."""
    for case in cases:
        needed = largest(Step(case, comm.size, 1))
        for limit in {1, needed // 2, needed - 1, needed}:
            ep = replace(case, max_recv_rows=limit, overflow="drop").handle(comm)
            for number in (1, 2, 1):
                fixed_round_trip(ep, Step(case, comm.size, number), limit)
            ep.close()


@pytest.mark.parametrize("world", [1, 3])
def test_dropped_rows(world: int) -> None:
    on_ranks(world, run_dropping, kinds(CASE), longest=0)


@pytest.mark.parametrize("world, kernels", [(1, "triton"), (2, "mixed")])
def test_on_the_gpu_target(world: int, kernels: str) -> None:
    on_ranks(world, run_fixed, kinds(CASE), kernels=kernels, longest=0)


@pytest.mark.parametrize("kernels", ["triton", "mixed"])
def test_dropped_rows_on_the_gpu_target(kernels: str) -> None:
    few = ("throughput", "contiguous"), ("latency", "flat")
    cases = [kind for kind in kinds(CASE) if (kind.mode, kind.layout) in few]
    on_ranks(2, run_dropping, cases, kernels=kernels, longest=0)


def run_dropped_with_host_sync(comm: epcomm.Communicator) -> None:
    """With host sync what is received has as many rows as fit."""
    case = Case(gate="zipf", overflow="drop")
    needed = largest(Step(case, comm.size, 0))
    ep, step = replace(case, max_recv_rows=needed - 2).handle(comm), Step(case, comm.size, 0)
    received = ep.dispatch(step.x()[comm.rank], ep.route(step.exchange.indices[comm.rank]))
    rows = step.exchange.rows[comm.rank].gather(step.x())
    assert torch.equal(received.x, rows[: needed - 2])
    assert received.routing.rows_needed == needed


def test_dropped_rows_with_host_sync() -> None:
    on_ranks(3, run_dropped_with_host_sync, longest=0)


def run_too_many(comm: epcomm.Communicator) -> None:
    """On CPUs nothing is learned late: the error is that of a handle with host sync."""
    case = Case(gate="one_rank", host_sync=False, max_recv_rows=3)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    for _ in range(3):
        raised = raised_by(lambda: ep.route(step.exchange.indices[comm.rank]))
        assert type(raised.error) is CapacityError and "wanted at least" in raised.text
        comm.check()


def test_too_many_rows() -> None:
    on_ranks(2, run_too_many, longest=0)


BAD = [
    ({"overflow": "ignore"}, "overflow"),
    ({"overflow": "drop", "layout": "padded"}, "overflow"),
    ({"zero_tail": True, "host_sync": True}, "zero_tail"),
    ({"zero_tail": True, "host_sync": False, "layout": "padded"}, "zero_tail"),
    ({"zero_tail": 3}, "zero_tail"),
    ({"host_sync": "no"}, "host_sync"),
]


def run_bad(comm: epcomm.Communicator) -> None:
    for arguments, name in BAD:
        raised = raised_by(replace(Case(), **arguments).handle, comm)
        assert type(raised.error) is ConfigError and f"argument `{name}`: wanted" in raised.text, raised
        comm.reset()
    round_trip(Case().handle(comm), Step(Case(), comm.size, 0))


def test_bad_arguments() -> None:
    on_ranks(1, run_bad, longest=0)


def run_large_dropping(comm: epcomm.Communicator) -> None:
    """More rows arrive by rank than a block has: their sums need room of their own."""
    case = Case(wire="rank", overflow="drop", max_recv_rows=20, max_tokens=64, hidden=2048, dtype=torch.float32)
    ep = case.handle(comm)
    for number in range(3):
        step = Step(case, comm.size, number)
        rank, exchange, y = comm.rank, step.exchange, step.y()
        received = ep.dispatch(step.x()[rank], ep.route(exchange.indices[rank]))
        result = ep.combine(y[rank][: len(received.x)], received, step.weights[rank])
        clean = [rows.nan_to_num() for rows in without_dropped(exchange, y, 20)]
        check_combined(f"{step}", result, combined(exchange, rank, clean, step.weights[rank]), case.dtype)


def test_sums_of_more_rows_than_a_block_has() -> None:
    on_ranks(2, run_large_dropping, longest=0)
