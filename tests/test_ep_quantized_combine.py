"""Combine with rows that travel as float8: sums of what torch's definition makes of them, and how far they are off."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ep_cases import FLOATS, Case, Step, check_combined, check_raised, in_all_kinds, on_ranks, require, spread

import epcomm
from epcomm import MXFP8, NVFP4, Float8
from epcomm.errors import CapacityError, ConfigError, MismatchError, UnsupportedError
from epcomm.kernels.cpu.float8_row_sum import float8_row_sum
from epcomm.testing.oracle import Combined, combined

OPTIONS = (Float8(), Float8(round_scales_to_power_of_two=True))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASE = Case(hidden=300, gate="holes_and_duplicates", tokens="uneven", alignment=4, max_tokens=6)

# ---- the definition


def numbers(rows: torch.Tensor, options: Float8) -> torch.Tensor:
    """float64: what rows are once they were quantised."""
    codes, scales = options.quantized(rows.flatten(0, -2))
    factors = scales.double().repeat_interleave(128, dim=1)[:, : rows.shape[-1]]
    return (codes.double() * factors).view(rows.shape)


def bound_of(rows: torch.Tensor, options: Float8) -> torch.Tensor:
    return options.error_bound(rows, options.quantized(rows)[1])


def partial_sums(step: Step, rank: int, y: Sequence[torch.Tensor], weights: Any) -> list[torch.Tensor]:
    """float64: of the token's rows on each rank."""
    whole = replace(step.exchange, wire="expert")
    return [
        combined(whole, rank, [rows if source == here else rows * 0 for source, rows in enumerate(y)], weights).exact
        for here in range(len(y))
    ]


def is_summed_first(step: Step, reduce: bool) -> bool:
    return step.exchange.wire == "rank" and reduce


def defined(
    step: Step, rank: int, y: Sequence[torch.Tensor], weights: Any, options: Float8, reduce: bool = True
) -> Combined:
    """What combine returns, if it doesn't round. Where rows are summed before they travel, these sums must be exact."""
    if not is_summed_first(step, reduce):
        exchange = replace(step.exchange, wire="expert")
        return combined(exchange, rank, [numbers(rows, options) for rows in y], weights, reduce=reduce)
    parts = [numbers(part.float(), options) for part in partial_sums(step, rank, y, weights)]
    magnitude = torch.stack(parts).abs().sum(0)
    return Combined(torch.stack(parts).sum(0), magnitude, magnitude * 0, len(parts) + 1)


def check(what: Any, got: torch.Tensor, wanted: Combined, options: Float8) -> None:
    """Powers of two leave sums of these values exact; else factors and sums are rounded to float32."""
    if options.round_scales_to_power_of_two:
        check_combined(what, got, wanted, got.dtype)
        return
    assert got.shape == wanted.exact.shape
    bound = wanted.bound(torch.float32, got.dtype) + 2.0**-23 * wanted.magnitude
    error = (got.double() - wanted.exact).abs()
    assert (error <= bound).all(), f"{what}: {(error / bound).max()} times the bound"


# ---- on ranks


def weights_of(step: Step, rank: int) -> torch.Tensor | None:
    return None if step.case.layout == "flat" or step.number % 2 else step.weights[rank]


def combine_any_float(ep: Any, step: Step) -> None:
    rank = ep.rank
    received = ep.dispatch(step.x()[rank], ep.route(step.exchange.indices[rank]))
    weights = weights_of(step, rank)
    for width, dtype, options in itertools.product((1, 129, 300), DTYPES, OPTIONS):
        y = step.y(dtype, width)
        wanted, what = defined(step, rank, y, weights, options), f"{step}: {dtype} x {width}, {options}"
        result = ep.combine(y[rank], received, weights, quantize=options)
        assert result.dtype == dtype
        check(what, result, wanted, options)
        require(f"{what}: again", ep.combine(spread(y[rank]), received, weights, quantize=options), result)
        for out_dtype in FLOATS:
            out = torch.full((len(result), width + 2), torch.nan, dtype=out_dtype)
            assert ep.combine(y[rank], received, weights, quantize=options, out=out[:, 1:-1]).dtype == out_dtype
            check(f"{what}: to {out_dtype}", out[:, 1:-1], wanted, options)
            assert out[:, 0].isnan().all() and out[:, -1].isnan().all()


def combine_in_any_way(ep: Any, step: Step) -> None:
    """Outputs in memory that combine could have read in place, in halves, without a sum, and plain ones in between."""
    rank, options = ep.rank, OPTIONS[step.number % 2]
    y, weights = step.y(), weights_of(step, rank)
    wanted = defined(step, rank, y, weights, options)
    received = ep.dispatch(step.x()[rank], ep.route(step.exchange.indices[rank]), quantize=options)
    in_place = received.output_buffer().copy_(y[rank])
    check(f"{step}: in place", ep.combine(in_place, received, weights, quantize=options), wanted, options)
    plain = combined(step.exchange, rank, y, weights)
    check_combined(f"{step}: plain", ep.combine(in_place, received, weights), plain, step.case.dtype)
    sent = ep.combine(y[rank], received, weights, quantize=options, split=True)
    check(f"{step}: split", sent.finish(), wanted, options)
    work = ep.combine(y[rank], received, weights, quantize=options, async_op=True)
    check(f"{step}: async", work.result(), wanted, options)
    if step.case.layout != "flat":
        slots = defined(step, rank, y, weights, options, reduce=False)
        got = ep.combine(y[rank], received, weights, quantize=options, reduce=False)
        check(f"{step}: reduce=False", got, slots, options)


def arbitrary_numbers(ep: Any, step: Step) -> None:
    """Against the sum of the rows as they were: each term is off by the format's bound, times its weight."""
    rank, options = ep.rank, OPTIONS[step.number % 2]
    received = ep.dispatch(step.x()[rank], ep.route(step.exchange.indices[rank]))
    weights = None if step.case.layout == "flat" else torch.randn(step.weights[rank].shape)
    for dtype in DTYPES:
        generator = torch.Generator().manual_seed(step.number)
        shapes = [rows.source_token.shape for rows in step.exchange.rows]
        y = [torch.randn(*shape, 150, generator=generator).exp().mul_(0.01).to(dtype) for shape in shapes]
        wanted = combined(replace(step.exchange, wire="expert"), rank, y, weights)
        if is_summed_first(step, True):
            parts = [part.float() for part in partial_sums(step, rank, y, weights)]
            lost = sum(bound_of(part, options) for part in parts)
            # another sum, within its rounding, may have other codes
            lost = lost * (1 + 2.0**-10) + 2.0**-20 * wanted.magnitude
        else:
            bounds = [bound_of(rows.flatten(0, -2), options).view(rows.shape) for rows in y]
            exchange = replace(step.exchange, wire="expert")
            lost = combined(exchange, rank, bounds, None if weights is None else weights.abs()).exact
        out = torch.empty(wanted.exact.shape)
        ep.combine(y[rank], received, weights, quantize=options, out=out)
        error = (out.double() - wanted.exact).abs()
        rounded = wanted.bound(dtype, torch.float32) + 2.0**-20 * wanted.magnitude
        assert (error <= lost + rounded).all(), f"{step}: {(error / (lost + rounded)).max()} times the bound"
        assert not len(error) or not wanted.magnitude.any() or error.any()


def run(comm: epcomm.Communicator, cases: list[Case], option: Callable[[Any, Step], None], num_steps: int) -> None:
    for case in cases:
        ep = case.handle(comm)
        for number in range(num_steps):
            option(ep, Step(case, comm.size, number))
        ep.close()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "option", [combine_any_float, combine_in_any_way, arbitrary_numbers], ids=lambda option: option.__name__
)
def test_option(option: Any, world: int) -> None:
    on_ranks(world, run, list(in_all_kinds([CASE])), option, 3, longest=0)


def test_no_tokens_anywhere() -> None:
    cases = [replace(CASE, gate="none"), replace(CASE, tokens="none_on_even_ranks"), replace(CASE, max_tokens=0)]
    on_ranks(2, run, list(in_all_kinds(cases)), combine_in_any_way, 2, longest=0)


def test_large_rows() -> None:
    """Such that streaming starts, and there are several tiles."""
    case = Case(hidden=7168, num_experts=16, topk=8, max_tokens=64)
    on_ranks(2, run, list(in_all_kinds([case])), combine_in_any_way, 2, longest=0, timeout=120)


@pytest.mark.parametrize("world, kernels", [(1, "triton"), (2, "triton"), (3, "mixed")])
def test_interpreted(world: int, kernels: str) -> None:
    """Rows that move in bytes and in vectors, of one tile and of two."""
    few = [replace(CASE, max_tokens=4), replace(CASE, hidden=4352, max_tokens=2, tokens="full")]
    cases = [case for case in in_all_kinds(few) if (case.mode, case.layout) != ("latency", "contiguous")]
    cases = cases if world == 3 else cases[::2]
    on_ranks(world, run, cases, combine_in_any_way, 2, longest=0, kernels=kernels, timeout=120)


def run_wrong_arguments(comm: epcomm.Communicator) -> None:
    case = Case(hidden=64, tokens="full")
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    y = step.y()[comm.rank]
    tokens = len(step.exchange.indices[comm.rank])
    for given, error, texts in (
        ({"quantize": MXFP8()}, UnsupportedError, ("`quantize`", "wanted Float8() or Float8(round", "MXFP8")),
        ({"quantize": NVFP4()}, UnsupportedError, ("`quantize`", "NVFP4")),
        ({"quantize": Float8(128, True, True)}, UnsupportedError, ("`quantize`", "packed_ue8m0=True")),
        ({"quantize": "float8"}, ConfigError, ("`quantize`", "an epcomm.Float8", "str")),
        ({"bias": torch.zeros(tokens, 64).bfloat16()}, ConfigError, ("`bias`", "None with quantize")),
        ({"y": (y, y)}, ConfigError, ("`y`", "one tensor", "got 2")),
        ({"y": y.double()}, ConfigError, ("`y`", "bfloat16 or torch.float16 or torch.float32", "float64")),
        ({"y": y[..., :1].expand(*y.shape[:-1], 130)}, CapacityError, ("`y`", "at most 128", "got 160")),
    ):

        def call(given: Any = given) -> None:
            received = ep.dispatch(step.x()[comm.rank], ep.route(step.exchange.indices[comm.rank]))
            options = {"y": y, "quantize": OPTIONS[0]} | (given if comm.rank == 1 else {})
            ep.combine(options.pop("y"), received, **options)

        check_raised(comm, call, error, *texts)
        combine_in_any_way(ep, step)
    ep.close()


@pytest.mark.parametrize("kernels", ["numba", "mixed"])
def test_wrong_arguments(kernels: str) -> None:
    on_ranks(2, run_wrong_arguments, longest=0, kernels=kernels)


def run_disagreements(comm: epcomm.Communicator) -> None:
    case = Case(hidden=64)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    for other in (None, OPTIONS[1]):
        received = ep.dispatch(step.x()[comm.rank], ep.route(step.exchange.indices[comm.rank]))
        with pytest.raises(MismatchError, match="quantize=Float8"):
            ep.combine(step.y()[comm.rank], received, quantize=OPTIONS[0] if comm.rank else other)
        comm.reset()
        combine_in_any_way(ep, step)
    ep.close()


def test_disagreements() -> None:
    on_ranks(2, run_disagreements, longest=0)


# ---- the kernel of one sum


def sum_rows(
    codes: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor | None, out: torch.Tensor, streaming: int = 0
) -> None:
    """out [columns] = what the kernel makes of codes [rows, columns] and scales [rows, blocks]."""
    at = -(-codes.shape[1] // 16) * 16
    rows = torch.full((len(codes), at + 4 * scales.shape[1]), 0x7F, dtype=torch.uint8)
    for row, row_codes, row_scales in zip(rows, codes, scales):
        row[: len(row_codes)], row[at:] = row_codes, row_scales.clone().view(torch.uint8)
    sources = np.array([row.data_ptr() for row in rows] or [0], dtype=np.int64)
    call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(float8_row_sum(out.dtype).address)
    factors = 0 if weights is None else weights.data_ptr()
    assert call(out.data_ptr(), sources.ctypes.data, factors, len(codes), len(out), streaming) == 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_code(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    for shift in (0, 1, 77):  # in vectors, and behind them one by one
        shown = codes.roll(shift)[None, : 256 - shift]
        out = torch.empty(256 - shift, dtype=dtype)
        sum_rows(shown, torch.ones(1, 2), None, out)
        wanted = shown[0].view(torch.float8_e4m3fn).to(dtype)
        assert torch.equal(out.nan_to_num(1000), wanted.nan_to_num(1000))
        assert torch.equal(out.signbit()[~out.isnan()], wanted.signbit()[~out.isnan()])


@pytest.mark.parametrize("streaming", [0, 1])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums(dtype: torch.dtype, streaming: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for width, num_rows in itertools.product((1, 63, 64, 127, 128, 129, 384, 1000, 7168), (0, 1, 2, 9)):
        codes = torch.randint(0, 127, (num_rows, width), generator=generator).to(torch.uint8)
        scales = torch.rand(num_rows, -(-width // 128), generator=generator) + 0.5
        weights = torch.randn(num_rows, generator=generator)
        for given in (weights, None):
            out = torch.full((width + 64,), 5, dtype=dtype)
            sum_rows(codes, scales, given, out[:width], streaming)
            values = codes.view(torch.float8_e4m3fn).double() * scales.double().repeat_interleave(128, 1)[:, :width]
            values = values * (1 if given is None else given.double()[:, None])
            exact, magnitude = values.sum(0), values.abs().sum(0)
            bound = Combined(exact, magnitude, exact * 0, num_rows + 1).bound(torch.float32, dtype)
            bound += 2.0**-23 * magnitude
            assert ((out[:width].double() - exact).abs() <= bound).all()
            assert (out[width:] == 5).all()
