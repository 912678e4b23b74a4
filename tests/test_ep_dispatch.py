"""What the arguments of route and dispatch mean, in every layout and mode, against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import (
    FLOATS,
    Step,
    check_fields,
    check_rows,
    dispatched,
    on_ranks,
    require,
    round_trip,
    run_option,
    spread,
)

from epcomm.testing.routing import payload

#: (dtype, width) of tensors that share rows; together at most 80 bytes.
MIXED = (
    (torch.int64, 2), (torch.float8_e4m3fn, 5), (torch.bool, 1), (torch.complex64, 2), (torch.bfloat16, 7),
    (torch.uint16, 3), (torch.float64, 1),
)  # fmt: skip


def what_a_routing_and_its_handle_know(ep: Any, step: Step) -> None:
    index, exchange = step.exchange.indices[ep.rank], step.exchange
    routing = ep.route(index)
    assert (routing.num_tokens, routing.topk, routing.index_dtype) == (*index.shape, index.dtype)
    per_rank, per_expert = routing.send_counts
    wanted = [len(exchange.tokens_for(ep.rank, expert)) for expert in range(len(exchange.owner))]
    require("rows per expert", per_expert, torch.tensor(wanted, dtype=torch.int32))
    owner = torch.tensor([*exchange.owner, -1])  # of index -1 as well
    sent = [int((owner[index.long()] == rank).any(dim=1).sum()) for rank in range(ep.size)]
    require("tokens per rank", per_rank, torch.tensor(sent, dtype=torch.int32))
    require("local experts", ep.local_experts, torch.tensor(exchange.experts_of(ep.rank), dtype=torch.int64))
    assert all(num_bytes > 0 for num_bytes in ep.memory().values())


def dispatch_into_out(ep: Any, step: Step) -> None:
    shape, x = step.exchange.rows[ep.rank].source_token.shape, step.x()
    out = torch.full((*shape, step.case.hidden), 7, dtype=step.case.dtype)
    result = dispatched(ep, step, step.weights[ep.rank], out=out)
    assert result.x is out
    check_rows(step, ep.rank, out, x)
    check_fields(step, result, has_weights=True)


def dispatch_into_strided_out(ep: Any, step: Step) -> None:
    if step.case.layout != "padded":
        shape = step.exchange.rows[ep.rank].source_token.shape
        out = torch.empty(*shape, step.case.hidden + 5, dtype=step.case.dtype)[:, 2:-3]
        check_rows(step, ep.rank, dispatched(ep, step, out=out).x, step.x())


def dispatch_a_copy(ep: Any, step: Step) -> None:
    copies = [dispatched(ep, step, step.weights[ep.rank], copy=True) for _ in range(5)]
    for result in copies:
        check_rows(step, ep.rank, result.x, step.x())
        check_fields(step, result, has_weights=True)


def dispatch_several_tensors(ep: Any, step: Step) -> None:
    x = [step.x(dtype, width) for dtype, width in MIXED]
    routing = ep.route(step.exchange.indices[ep.rank])
    kept = []
    for as_given in (tuple, list):
        result = ep.dispatch(as_given(values[ep.rank] for values in x), routing)
        assert isinstance(result.x, tuple) and len(result.x) == len(MIXED)
        kept.append(result)
    shape = step.exchange.rows[ep.rank].source_token.shape
    out = tuple(torch.empty(*shape, width, dtype=dtype) for dtype, width in MIXED)
    kept.append(ep.dispatch(tuple(values[ep.rank] for values in x), routing, out=out))
    for result in kept:
        check_fields(step, result)
        for got, values in zip(result.x, x):
            check_rows(step, ep.rank, got, values)
    single = ep.dispatch((step.x()[ep.rank],), routing).x
    assert isinstance(single, tuple)
    check_rows(step, ep.rank, single[0], step.x())


def dispatch_any_dtype(ep: Any, step: Step) -> None:
    floats, others = (torch.float16, torch.float8_e5m2, torch.complex128), (torch.int8, torch.uint16, torch.bool)
    for dtype in (*floats, *others):
        width = 5 if dtype.itemsize == 16 else 9
        x = step.x(dtype, width)
        check_rows(step, ep.rank, ep.dispatch(x[ep.rank], ep.route(step.exchange.indices[ep.rank])).x, x)


def dispatch_rows_at_any_stride(ep: Any, step: Step) -> None:
    routing = ep.route(step.exchange.indices[ep.rank])
    x = step.x()
    own = x[ep.rank]
    wide = torch.cat([own, own, own], dim=1)[:, own.shape[1] : -own.shape[1]]
    for form in (spread(own), own.t().contiguous().t(), wide, torch.cat([own[:1], own])[1:], own.requires_grad_()):
        check_rows(step, ep.rank, ep.dispatch(form, routing).x, x)
    one = [values[:1].expand_as(values) for values in x]
    check_rows(step, ep.rank, ep.dispatch(one[ep.rank], routing).x, one)


def dispatch_marked_views(ep: Any, step: Step) -> None:
    """Views that hold other values than they show."""
    routing = ep.route(step.exchange.indices[ep.rank])
    x = step.x(torch.float32, 8)
    complex_x = [torch.view_as_complex(values.reshape(-1, 4, 2)) for values in x]
    check_rows(step, ep.rank, ep.dispatch(complex_x[ep.rank], routing).x, complex_x)
    conjugated = [values.conj().resolve_conj() for values in complex_x]
    check_rows(step, ep.rank, ep.dispatch(complex_x[ep.rank].conj(), routing).x, conjugated)
    negated = [-values.imag for values in complex_x]
    check_rows(step, ep.rank, ep.dispatch(complex_x[ep.rank].conj().imag, routing).x, negated)


def deliver_weights_of_any_float(ep: Any, step: Step) -> None:
    for dtype in FLOATS:
        weights = spread(step.weights[ep.rank].to(dtype))
        check_fields(step, dispatched(ep, step, weights), has_weights=True)


def dispatch_often_along_one_routing(ep: Any, step: Step) -> None:
    routing = ep.route(step.exchange.indices[ep.rank])
    x = [[payload(values.shape, values.dtype, turn, rank) for rank, values in enumerate(step.x())] for turn in range(4)]
    results = [ep.dispatch(values[ep.rank], routing) for values in x]
    for values, result in zip(x, results):
        check_rows(step, ep.rank, result.x, values)
        check_fields(step, result)


def less_than_the_handle_allows(ep: Any, step: Step) -> None:
    """Fewer slots, narrower rows, fewer tokens."""
    case = replace(step.case, topk=2, hidden=3, max_tokens=step.case.max_tokens)
    for tokens in ("one", "uneven"):
        round_trip(ep, Step(replace(case, tokens=tokens), step.size, step.number))
    case = replace(case, topk=1, hidden=10, dtype=torch.float32)
    round_trip(ep, Step(case, step.size, step.number))


OPTIONS = [
    what_a_routing_and_its_handle_know, dispatch_into_out, dispatch_into_strided_out, dispatch_a_copy,
    dispatch_several_tensors, dispatch_any_dtype, dispatch_rows_at_any_stride, dispatch_marked_views,
    deliver_weights_of_any_float, dispatch_often_along_one_routing, less_than_the_handle_allows,
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.__name__)
def test_option(option: Any, world: int) -> None:
    on_ranks(world, run_option, option, longest=0)
