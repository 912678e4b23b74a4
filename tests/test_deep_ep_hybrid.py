"""DeepEP's `HybridEPBuffer`: rows by a map of experts, permuted or not, with and without waiting, and drops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_combined, check_raised, check_rows, on_ranks, require

import epcomm
from epcomm.errors import ConfigError
from epcomm.integrations import deep_ep
from epcomm.testing.oracle import combined, received_weights
from epcomm.testing.routing import payload

BASE = Case(hidden=40, num_experts=7, max_tokens=6)
CASES = [
    replace(BASE, gate="holes", tokens="uneven"),
    replace(BASE, gate="zipf", tokens="none_on_even_ranks", index_dtype=torch.int32),
    replace(BASE, dtype=torch.float32, tokens="none"),
]


def maps(step: Step) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(map, probabilities) [num_tokens, experts] of each rank, from its indices and weights."""
    size, result = step.case.num_experts, ([], [])
    for index, weights in zip(step.exchange.indices, step.weights):
        chosen, probs = torch.zeros(len(index), size, dtype=torch.bool), torch.zeros(len(index), size)
        for token, slot in (index >= 0).nonzero().tolist():
            chosen[token, index[token, slot]] = True
            probs[token, index[token, slot]] = weights[token, slot]
        result[0].append(chosen)
        result[1].append(probs)
    return result


def buffer_for(comm: Any, case: Case) -> Any:
    return deep_ep.HybridEPBuffer(comm, case.hidden, case.max_tokens, -(-case.num_experts // comm.size))


def routed(step: Step, rank: int) -> dict[str, Any]:
    """A routing as one kind of client gives it, or as the other."""
    if step.number % 2:
        index, weights = step.exchange.indices[rank], step.weights[rank]
        return dict(topk_idx=index, topk_weights=weights, num_of_experts=step.case.num_experts)
    chosen, probs = maps(step)
    return dict(routing_map=chosen[rank], probs=probs[rank])


def scales(step: Step) -> list[torch.Tensor]:
    return [payload((len(index), 3), torch.float32, step.number, rank) for rank, index in
            enumerate(step.exchange.indices)]  # fmt: skip


def unpermuted_trip(buffer: Any, step: Step) -> None:
    rank, exchange, case = buffer.rank, step.exchange, step.case
    x, y, factors, rows = step.x(), step.y(), scales(step), step.exchange.rows[buffer.rank]
    got, probs, scaling, handle = buffer.dispatch(x[rank], factors[rank], **routed(step, rank))
    check_rows(step, rank, got, x)
    check_rows(step, rank, scaling, factors)
    here = torch.zeros(case.num_experts, dtype=torch.bool)
    here[exchange.experts_of(rank)] = True
    require("probs", probs, torch.where(here, rows.gather(maps(step)[1]), 0.0))
    _, _, _, num_tokens, local_map, mine, _ = handle
    assert num_tokens.tolist() == [len(got)] and mine == len(x[rank])
    sent = rows.gather([chosen.to(torch.uint8) for chosen in maps(step)[0]]).bool()
    require("local map", local_map, sent[:, here])
    again, nothing, scaling, same = buffer.dispatch(2 * x[rank], handle=handle)
    check_rows(step, rank, again, [2 * rows for rows in x])
    assert nothing is None and scaling is None and same is handle
    result, summed = buffer.combine(y[rank], probs, handle)
    check_combined("combine", result, combined(exchange, rank, y), case.dtype)
    require("combined probs", summed, maps(step)[1][rank])


def permuted_trip(buffer: Any, step: Step, waits: bool) -> None:
    """With `waits` exactly the rows that there are; else more, with zeros behind them."""
    rank, exchange, case = buffer.rank, step.exchange, step.case
    x, y, factors, rows = step.x(), step.y(), scales(step), step.exchange.rows[buffer.rank]
    count, most = len(rows.source_token), 200 * case.alignment
    options = dict(pad_multiple=case.alignment)
    if not waits:
        options.update(non_blocking=True, num_permuted_tokens=most)
    given = dict(hidden=x[rank], scaling_factor=factors[rank], **options)
    got, probs, scaling, counts, handle = buffer.dispatch_with_permute(**given, **routed(step, rank))
    assert len(got) == (count if waits else most)
    check_rows(step, rank, got[:count], x)
    check_rows(step, rank, scaling[:count], factors)
    require("probs", probs[:count], received_weights(exchange, rank, step.weights))
    assert all(part[count:].eq(0).all() for part in (got, scaling, probs))
    require("tokens per expert", counts, rows.expert_offsets.diff())
    require("handle's counts", handle[7], rows.expert_counts)
    assert handle[-1].tolist() == [False] and len(handle) == 11

    again, nothing, _, _, same = buffer.dispatch_with_permute(hidden=2 * x[rank], handle=handle, **options)
    check_rows(step, rank, again[:count], [2 * rows for rows in x])
    assert nothing is None and same is handle
    whole = torch.full((len(got), case.hidden), torch.nan, dtype=case.dtype)
    whole[:count] = y[rank]
    result, summed = buffer.combine_with_unpermute(
        hidden=whole,
        probs=probs,
        handle=handle,
    )
    check_combined("combine", result, combined(exchange, rank, y), case.dtype)
    require("combined probs", summed, maps(step)[1][rank])
    result, nothing = buffer.combine_with_unpermute(hidden=whole, handle=handle)
    check_combined("combine", result, combined(exchange, rank, y), case.dtype)
    assert nothing is None


def dropping_trip(buffer: Any, step: Step) -> None:
    """Room for 4 rows: the first ones arrive, the flag tells of the others, and no sum has them."""
    rank, exchange, rows = buffer.rank, step.exchange, step.exchange.rows[buffer.rank]
    got, _, _, counts, handle = buffer.dispatch_with_permute(
        hidden=step.x()[rank], non_blocking=True, num_permuted_tokens=4, **routed(step, rank)
    )
    real, arrived = len(rows.source_token), [len(rows.source_token) > 4 for rows in exchange.rows]
    assert handle[-1].tolist() == [arrived[rank]] and int(counts.sum()) == min(real, 4)
    wanted = rows.gather(step.x())[:4]
    require("rows", got[: len(wanted)], wanted)
    result, _ = buffer.combine_with_unpermute(hidden=torch.ones_like(got), handle=handle)
    kept = torch.zeros(len(exchange.indices[rank]))
    for of_rank in exchange.rows:
        for source, token in zip(of_rank.source_rank[:4].tolist(), of_rank.source_token[:4].tolist()):
            if source == rank:
                kept[token] += 1
    require("sums of ones", result, kept[:, None].expand(-1, step.case.hidden).to(step.case.dtype))


@pytest.mark.parametrize("world", [2, 3])
def test_hybrid_ep_buffer(world: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        for case in CASES:
            buffer = buffer_for(comm, case)
            for number in range(4):
                unpermuted_trip(buffer, Step(replace(case, layout="flat"), comm.size, number))
                for waits, alignment in ((True, 4), (False, 4), (True, 1)):
                    permuted_trip(buffer, Step(replace(case, alignment=alignment), comm.size, number), waits)
                dropping_trip(buffer, Step(case, comm.size, number))
            buffer.empty_jit_cache()
            buffer.destroy()

    on_ranks(world, body)


def test_errors_keep_their_kind() -> None:
    def body(comm: epcomm.Communicator) -> None:
        step = Step(replace(BASE, gate="uniform"), comm.size, 0)
        is_bad, x, given = comm.rank == 1, step.x()[comm.rank], routed(step, comm.rank)
        buffer = buffer_for(comm, step.case)
        assert (buffer.local_rank, buffer.node_rank, buffer.num_of_nodes) == (comm.rank, 0, 1)
        none = {} if is_bad else given
        check_raised(comm, lambda: buffer.dispatch(x, **none), ConfigError, "`routing_map`")
        floats = dict(routing_map=given["probs"]) if is_bad else given
        check_raised(comm, lambda: buffer.dispatch_with_permute(hidden=x, **floats), ConfigError, "`routing_map`")
        rows = dict(num_permuted_tokens=5 if is_bad else 8, pad_multiple=4, non_blocking=True)
        check_raised(
            comm, lambda: buffer.dispatch_with_permute(hidden=x, **given, **rows), ConfigError, "`num_permuted_tokens`"
        )
        *_, handle = buffer.dispatch_with_permute(hidden=x, **given)
        kept = None if is_bad else handle
        y = step.y()[comm.rank]
        check_raised(comm, lambda: buffer.combine_with_unpermute(hidden=y, handle=kept), ConfigError, "`handle`")
        permuted_trip(buffer, step, True)

    on_ranks(2, body)
