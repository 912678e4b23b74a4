"""What the arguments of combine mean, in every layout and mode, against the definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ep_cases import FLOATS, Step, check_combined, check_rows, dispatched, on_ranks, require, run_option, spread

from epcomm.testing.oracle import combined
from epcomm.testing.routing import payload


def combine_into_any_float(ep: Any, step: Step) -> None:
    result = dispatched(ep, step)
    for dtype, out_dtype in itertools.product(FLOATS, FLOATS):
        y = step.y(dtype, 10)
        out = torch.full((len(step.x()[ep.rank]), 10), torch.nan, dtype=out_dtype)
        assert ep.combine(y[ep.rank], result, out=out) is out
        check_combined(f"{dtype} to {out_dtype}", out, combined(step.exchange, ep.rank, y), out_dtype)
    wide = torch.full((len(out), 16), torch.nan)
    ep.combine(y[ep.rank], result, out=wide[:, 3:13])
    check_combined("strided out", wide[:, 3:13], combined(step.exchange, ep.rank, y), torch.float32)
    assert wide[:, :3].isnan().all() and wide[:, 13:].isnan().all()


def combine_with_weights(ep: Any, step: Step) -> None:
    if step.case.layout == "flat":
        return
    result, own = dispatched(ep, step), step.weights[ep.rank]
    for dtype in FLOATS:
        y = step.y(dtype, 10)
        for weights in (own, -own, own * 0, spread(own.double()), own.bfloat16().t().contiguous().t()):
            wanted = combined(step.exchange, ep.rank, y, weights)
            check_combined(f"{step}: {dtype}", ep.combine(y[ep.rank], result, weights), wanted, dtype)


def combine_with_bias(ep: Any, step: Step) -> None:
    result, y = dispatched(ep, step), step.y()
    bias = payload((len(step.x()[ep.rank]), step.case.hidden), step.case.dtype, 5, ep.rank)
    weights = None if step.case.layout == "flat" else step.weights[ep.rank]
    for addend, factors in ((bias, None), (spread(bias), None), (bias, weights)):
        wanted = combined(step.exchange, ep.rank, y, factors, addend)
        check_combined(f"{step}: bias", ep.combine(y[ep.rank], result, factors, bias=addend), wanted, step.case.dtype)
    # what a rank adds to its own result is no affair of its peers
    bias = bias if ep.rank == 0 else None
    wanted = combined(step.exchange, ep.rank, y, None, bias)
    check_combined(f"{step}: bias on one", ep.combine(y[ep.rank], result, bias=bias), wanted, step.case.dtype)


def combine_without_sum(ep: Any, step: Step) -> None:
    if step.case.layout == "flat":
        return
    result, y = dispatched(ep, step), step.y()
    for weights in (None, step.weights[ep.rank]):
        wanted = combined(step.exchange, ep.rank, y, weights, reduce=False)
        got = ep.combine(y[ep.rank], result, weights, reduce=False)
        check_combined(f"{step}: reduce=False", got, wanted, step.case.dtype)
        out = torch.empty(wanted.exact.shape)
        assert ep.combine(y[ep.rank], result, weights, reduce=False, out=out) is out
        check_combined(f"{step}: reduce=False, out", out, wanted, torch.float32)


def combine_several_tensors(ep: Any, step: Step) -> None:
    result = dispatched(ep, step)
    kinds = ((torch.bfloat16, 7), (torch.float64, 3), (torch.float32, 9), (torch.float16, 1))
    y = [step.y(dtype, width) for dtype, width in kinds]
    own = tuple(values[ep.rank] for values in y)
    num_tokens = len(step.x()[ep.rank])
    bias = tuple(payload((num_tokens, width), dtype, 3, ep.rank) for dtype, width in kinds)
    outs = tuple(torch.empty(num_tokens, width, dtype=torch.float32) for _, width in kinds)
    weights = None if step.case.layout == "flat" else step.weights[ep.rank]
    for addends, out in ((None, None), (bias, None), (None, outs)):
        got = ep.combine(own, result, weights, bias=addends, out=out)
        assert isinstance(got, tuple) and len(got) == len(kinds)
        for i, (dtype, _) in enumerate(kinds):
            wanted = combined(step.exchange, ep.rank, y[i], weights, addends and addends[i])
            check_combined(f"{step}: tensor {i}", got[i], wanted, dtype if out is None else torch.float32)


def combine_rows_at_any_stride(ep: Any, step: Step) -> None:
    result, y = dispatched(ep, step), step.y()
    own, wanted = y[ep.rank], combined(step.exchange, ep.rank, y)
    forms = [spread(own), torch.cat([own, own], dim=-1)[..., : own.shape[-1]], own.mT.contiguous().mT]
    if own.dim() == 3:
        forms += [own.transpose(0, 1).contiguous().transpose(0, 1), torch.cat([own, own], dim=1)[:, : own.shape[1]]]
    for number, form in enumerate(forms):
        check_combined(f"{step}: form {number}", ep.combine(form, result), wanted, step.case.dtype)


def combine_along_a_routing(ep: Any, step: Step) -> None:
    """As gradients go: the gradient of dispatch is a combine, that of combine a dispatch."""
    routing = ep.route(step.exchange.indices[ep.rank])
    x, y = step.x(), step.y()
    if step.case.mode == "latency" or step.case.wire == "rank":
        ep.dispatch(x[ep.rank], routing)
    check_combined(f"{step}", ep.combine(y[ep.rank], routing), combined(step.exchange, ep.rank, y), step.case.dtype)
    check_rows(step, ep.rank, ep.dispatch(x[ep.rank], routing).x, x)
    check_combined(f"{step}", ep.combine(y[ep.rank], routing), combined(step.exchange, ep.rank, y), step.case.dtype)


def combine_in_place(ep: Any, step: Step) -> None:
    x, y = step.x(torch.float32, 20), step.y(torch.float32, 20)
    result = ep.dispatch(x[ep.rank], ep.route(step.exchange.indices[ep.rank]))
    output = result.output_buffer()
    assert output.shape == result.x.shape and output.dtype == result.x.dtype
    output.copy_(y[ep.rank])
    wanted = combined(step.exchange, ep.rank, y)
    check_combined(f"{step}", ep.combine(output, result), wanted, torch.float32)
    # another kind of rows in such memory
    narrow = result.output_buffer().view(torch.bfloat16)[..., :20]
    y = step.y(torch.bfloat16, 20)
    wanted = combined(step.exchange, ep.rank, y)
    check_combined(f"{step}: a part", ep.combine(narrow.copy_(y[ep.rank]), result), wanted, torch.bfloat16)


def combine_several_in_place(ep: Any, step: Step) -> None:
    kinds = ((torch.bfloat16, 7), (torch.float32, 9))
    x, y = [step.x(*kind) for kind in kinds], [step.y(*kind) for kind in kinds]
    result = ep.dispatch(tuple(values[ep.rank] for values in x), ep.route(step.exchange.indices[ep.rank]))
    outputs = result.output_buffer()
    for output, values in zip(outputs, y):
        output.copy_(values[ep.rank])
    for got, values, (dtype, _) in zip(ep.combine(outputs, result), y, kinds):
        check_combined(f"{step}", got, combined(step.exchange, ep.rank, values), dtype)


def identity_experts(ep: Any, step: Step) -> None:
    """What was received goes straight back: every token returns once per row."""
    result = dispatched(ep, step)
    outputs = [rows.gather(step.x()) for rows in step.exchange.rows]
    wanted = combined(step.exchange, ep.rank, outputs)
    check_combined(f"{step}", ep.combine(result.x, result), wanted, step.case.dtype)


def arbitrary_numbers(ep: Any, step: Step) -> None:
    """Sums that need rounding stay within the bound of the formats, and have the same bits every time."""
    result = dispatched(ep, step)
    weights = None if step.case.layout == "flat" else torch.randn(step.weights[ep.rank].shape)
    for dtype, out_dtype in itertools.product(FLOATS, FLOATS):
        generator = torch.Generator().manual_seed(step.number)
        shapes = [rows.source_token.shape for rows in step.exchange.rows]
        y = [torch.randn(*shape, 10, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
        wanted = combined(step.exchange, ep.rank, y, weights)
        out = torch.empty(wanted.exact.shape, dtype=out_dtype)
        again = torch.empty_like(out)
        ep.combine(y[ep.rank], result, weights, out=out)
        ep.combine(y[ep.rank], result, weights, out=again)
        require(f"{step}: run to run", again, out)
        error = (out.double() - wanted.exact).abs()
        bound = wanted.bound(dtype, out_dtype)
        assert (error <= bound).all(), f"{step}: {dtype} to {out_dtype}: {(error / bound).max()} times the bound"


OPTIONS = [
    combine_into_any_float, combine_with_weights, combine_with_bias, combine_without_sum, combine_several_tensors,
    combine_rows_at_any_stride, combine_along_a_routing, combine_in_place, combine_several_in_place, identity_experts,
    arbitrary_numbers,
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.__name__)
def test_option(option: Any, world: int) -> None:
    on_ranks(world, run_option, option, longest=0)
