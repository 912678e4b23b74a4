"""Quantised dispatch: the numbers against the format's definition, and what arrives against the numbers, bit by bit."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ep_cases import (
    KIND_IDS,
    KINDS,
    KINDS_BY_RANK,
    Case,
    Step,
    check_combined,
    check_fields,
    check_raised,
    check_rows,
    in_all_kinds,
    on_ranks,
    require,
    spread,
)

import epcomm
from epcomm import MXFP8, NVFP4, Float8
from epcomm.errors import CapacityError, ConfigError, MismatchError
from epcomm.moe.quantize import Quantizer, column_major
from epcomm.testing.oracle import combined

OPTIONS = [
    Float8(),
    Float8(round_scales_to_power_of_two=True),
    Float8(round_scales_to_power_of_two=True, packed_ue8m0=True),
]
OPTION_IDS = ["float32", "power_of_two", "packed"]
#: all formats
FORMATS: list[Quantizer] = [*OPTIONS, MXFP8(), NVFP4(0.0137), Float8(scale_layout="column"),
                            Float8(128, True, True, scale_layout="column")]  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HIDDEN = (1, 96, 128, 130, 384, 7168)

# ---- the definition, in numpy

#: magnitudes of the codes 0 to 126 of e4m3fn: subnormals are eighths of 2^-6
CODES = np.array([(code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
                  for code in range(127)])  # fmt: skip
NAN = 127


def defined_codes(quotients: np.ndarray) -> np.ndarray:
    """The codes nearest to float32 numbers; of two the even one."""
    magnitudes = np.minimum(np.abs(quotients.astype(np.float64)), CODES[-1])
    above = np.searchsorted(CODES, magnitudes).clip(max=126)
    below = np.maximum(above - 1, 0)
    to_above, to_below = CODES[above] - magnitudes, magnitudes - CODES[below]
    takes_above = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.where(takes_above, above, below).astype(np.uint8) | (np.signbit(quotients).astype(np.uint8) << 7)


def defined(x: torch.Tensor, options: Float8) -> tuple[np.ndarray, np.ndarray]:
    """Codes (uint8) and scales (float32, before they are packed), block by block."""
    rows = x.float().numpy()
    codes = np.zeros(rows.shape, np.uint8)
    scales = np.zeros((len(rows), -(-rows.shape[1] // 128)), np.float32)
    for token, block in np.ndindex(*scales.shape):
        values = rows[token, 128 * block : 128 * block + 128]
        is_finite = np.isfinite(values)
        amax = np.abs(values[is_finite]).max(initial=np.float32(0))
        scale = max(amax / np.float32(448), np.float32(2.0**-126)) if amax else np.float32(1)
        if options.round_scales_to_power_of_two:
            mantissa, exponent = np.frexp(scale)
            scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
        quotients = np.where(is_finite, values, 0) / np.float32(scale)
        assert quotients.dtype == np.float32
        scales[token, block] = scale
        codes[token, 128 * block : 128 * block + 128] = np.where(is_finite, defined_codes(quotients), NAN)
    return codes, scales


def samples(num_tokens: int, hidden: int, dtype: torch.dtype, seed: int, is_finite: bool = False) -> torch.Tensor:
    """Rows with blocks of ordinary, huge, tiny, subnormal and zero numbers, and unless `is_finite` inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-hidden // 128)
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    magnitudes = torch.tensor([1.0, 1.0, 17.5, 2.0**-9, largest / 8, smallest * 40, smallest / 16, 0.0])
    kinds = torch.randint(len(magnitudes), (num_tokens, num_blocks), generator=generator)
    factors = magnitudes[kinds].repeat_interleave(128, dim=1)[:, :hidden]
    rows = torch.randn(num_tokens, hidden, generator=generator).clamp_(-7, 7) * factors
    rows[torch.rand(num_tokens, hidden, generator=generator) < 0.05] *= 2.0**-8
    if not is_finite and num_tokens:
        places = torch.rand(num_tokens, hidden, generator=generator)
        rows[places < 0.01], rows[places > 0.99], rows[(places - 0.5).abs() < 0.005] = torch.inf, -torch.inf, torch.nan
    return rows.to(dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_numbers_are_the_defined_ones(hidden: int, options: Float8) -> None:
    for dtype in DTYPES:
        x = samples(3 if hidden > 1000 else 40, hidden, dtype, hidden)
        rows, scales = options.quantized(x)
        codes, wanted_scales = defined(x, options)
        assert rows.dtype == torch.float8_e4m3fn and rows.is_contiguous() and scales.is_contiguous()
        require(f"{dtype}: codes", rows.view(torch.uint8), torch.from_numpy(codes))
        if options.packed_ue8m0:
            exponents = np.zeros((len(x), -(-wanted_scales.shape[1] // 4) * 4), np.uint8)
            exponents[:, : wanted_scales.shape[1]] = 126 + np.frexp(wanted_scales)[1]
            require("scales", scales, torch.from_numpy(exponents.view("<i4")))
        else:
            require("scales", scales, torch.from_numpy(wanted_scales))
        like = options.result_like(x)
        assert [(t.shape, t.dtype) for t in like] == [(t.shape, t.dtype) for t in (rows, scales)]


def every_code() -> torch.Tensor:
    """float32 rows with a scale of 1: each code, the numbers half way to the next, and the float32 next to them."""
    middles = torch.from_numpy((CODES[1:] + CODES[:-1]) / 2).float()
    points = torch.cat([torch.from_numpy(CODES).float(), middles])
    points = torch.cat([points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-1.0))])
    points = torch.cat([points, -points])
    points = points[points.abs() <= 448]
    rows = torch.nn.functional.pad(points, (0, -len(points) % 127)).view(-1, 127)
    return torch.cat([rows, torch.full((len(rows), 1), 448.0)], dim=1)


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_every_code_and_what_lies_between(options: Float8) -> None:
    x = every_code()
    rows, scales = options.quantized(x)
    codes, wanted = defined(x, options)
    assert (wanted == 1).all()
    require("codes", rows.view(torch.uint8), torch.from_numpy(codes))
    assert set(codes.flatten().tolist()) == {*range(127), *range(128, 255)}
    require("values", options.dequantized(rows, scales), rows.float())


@pytest.mark.parametrize("options", OPTIONS, ids=OPTION_IDS)
def test_error_bound(options: Float8) -> None:
    """In float64, for a code * scale that isn't rounded."""
    for dtype, hidden in itertools.product(DTYPES, HIDDEN):
        x = samples(20, hidden, dtype, hidden + 1, is_finite=True)
        rows, _ = options.quantized(x)
        scales = torch.from_numpy(defined(x, options)[1]).double().repeat_interleave(128, dim=1)[:, :hidden]
        error = (rows.double() * scales - x.double()).abs()
        bound = torch.maximum(x.double().abs() * 2.0**-4, scales * (2.0**-10 * (1 + 2.0**-20)))
        assert (error <= bound).all()
        assert (rows[x == 0].float() == 0).all()


def test_infinities_and_nans_leave_their_block_alone() -> None:
    x = torch.tensor([[1.0, -2.0, 448.0, 0.0]])
    spoilt = torch.cat([x, torch.tensor([[torch.inf, -torch.inf, torch.nan, -torch.nan]])], dim=1)
    for options in OPTIONS:
        rows, scales = options.quantized(spoilt)
        require("scales", scales, options.quantized(x)[1])
        require("codes", rows.view(torch.uint8)[:, :4], options.quantized(x)[0].view(torch.uint8))
        assert (rows.view(torch.uint8)[:, 4:] == NAN).all()
        assert options.dequantized(rows, scales)[:, 4:].isnan().all()
        rows, scales = options.quantized(spoilt[:, 4:])  # nothing else in the block
        assert options.dequantized(rows, scales).isnan().all()
        assert Float8().quantized(spoilt[:, 4:])[1].item() == 1


def test_dequantized_takes_any_shape_and_gives_any_dtype() -> None:
    x = samples(6, 300, torch.bfloat16, 1, is_finite=True)
    for options in OPTIONS:
        rows, scales = options.quantized(x)
        flat = options.dequantized(rows, scales)
        shaped = options.dequantized(rows.view(2, 3, -1), scales.view(2, 3, -1), torch.bfloat16)
        require("values", shaped, flat.bfloat16().view(2, 3, -1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"block": 64}, "`block`: wanted 128, got 64"),
        ({"block": "128"}, "`block`: wanted 128, got '128'"),
        ({"round_scales_to_power_of_two": 1}, "`round_scales_to_power_of_two`: wanted True or False, got 1"),
        ({"packed_ue8m0": None}, "`packed_ue8m0`: wanted True or False, got None"),
        ({"packed_ue8m0": True}, "`packed_ue8m0`: wanted round_scales_to_power_of_two=True"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Float8(**arguments)


# ---- on ranks


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """A copy: a tensor with one column counts as contiguous whatever its stride, but has no view as bytes."""
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def case_of(hidden: int, **changes: Any) -> Case:
    """A handle with room for rows of `hidden` and their scales."""
    return Case(hidden=hidden + 8, alignment=4, max_tokens=5, **changes)


def dispatch_and_check(ep: Any, step: Step, hidden: int, dtype: torch.dtype, options: Quantizer, **more: Any) -> Any:
    """One quantised dispatch along a new routing, compared with every rank's numbers."""
    rank, indices = ep.rank, step.exchange.indices
    x = [samples(len(index), hidden, dtype, 100 * step.number + source) for source, index in enumerate(indices)]
    pairs = [options.quantized(rows) for rows in x]
    weighted = step.number % 2 == 1
    routing = ep.route(indices[rank])
    split = step.number == 2
    received = ep.dispatch(
        x[rank], routing, step.weights[rank] if weighted else None, quantize=options, split=split, **more
    )
    received = received.finish() if split else received
    if isinstance(options, Float8) and options.scale_layout == "column":
        assert received.x[1].stride() == column_major(received.x[1]).stride()
    assert isinstance(received.x, tuple) and len(received.x) == 2
    for part, got in enumerate(received.x):
        got = got.clone(memory_format=torch.contiguous_format)
        check_rows(step, rank, got, [pair[part] for pair in pairs])
    check_fields(step, received, weighted)
    return received


def quantized_round_trip(ep: Any, step: Step, hidden: int, dtype: torch.dtype, options: Quantizer) -> None:
    rank = ep.rank
    received = dispatch_and_check(ep, step, hidden, dtype, options)
    y = step.y(dtype, hidden)
    rows = y[rank]
    if step.number % 3 != 0 and dtype.itemsize == step.case.dtype.itemsize:
        rows = received.output_buffer().copy_(rows)
    check_combined("combine", ep.combine(rows, received), combined(step.exchange, rank, y, None), dtype)


def run_quantized(comm: epcomm.Communicator, traffic: list[tuple[Case, int, torch.dtype, Quantizer]]) -> None:
    """Three steps on a handle per case."""
    for case, hidden, dtype, options in traffic:
        ep = case.handle(comm)
        for number in range(3):
            quantized_round_trip(ep, Step(case, comm.size, number), hidden, dtype, options)
        ep.close()


def traffic_of(
    hiddens: tuple[int, ...], kind: tuple[str, str], wire: str = "auto"
) -> Iterator[tuple[Case, int, torch.dtype, Quantizer]]:
    """A case per row width; dtypes, options, gates and numbers of tokens take turns."""
    turn = KINDS.index(kind)
    for hidden in hiddens:
        dtype = DTYPES[turn % 3]
        case = case_of(hidden, dtype=dtype, tokens=("full", "uneven", "none_on_odd_ranks")[turn // 3 % 3],
                       gate=("uniform", "holes_and_duplicates", "one_rank", "zipf")[turn % 4])  # fmt: skip
        yield replace(case, mode=kind[0], layout=kind[1], wire=wire), hidden, dtype, FORMATS[turn % len(FORMATS)]
        turn += 1


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=KIND_IDS)
def test_traffic(kind: tuple[str, str], world: int) -> None:
    on_ranks(world, run_quantized, list(traffic_of(HIDDEN, kind)))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS_BY_RANK, ids=[layout for _, layout in KINDS_BY_RANK])
def test_traffic_by_rank(kind: tuple[str, str], world: int) -> None:
    on_ranks(world, run_quantized, list(traffic_of(HIDDEN, kind, "rank")))


def run_formats(comm: epcomm.Communicator) -> None:
    """Every format, of every dtype, on one handle of each kind."""
    for case in in_all_kinds([case_of(300, dtype=torch.float32, gate="holes_and_duplicates", tokens="uneven")]):
        ep = case.handle(comm)
        for number, (options, dtype) in enumerate(itertools.product(FORMATS, DTYPES)):
            quantized_round_trip(ep, Step(case, comm.size, number), 257 + number, dtype, options)
        ep.close()


@pytest.mark.parametrize("world", [1, 3])
def test_formats(world: int) -> None:
    on_ranks(world, run_formats, longest=0)


def run_large_rows(comm: epcomm.Communicator) -> None:
    """More than the caches hold, so that copies go past them."""
    for case in in_all_kinds([Case(hidden=7168, num_experts=16, topk=8, max_tokens=64)]):
        ep = case.handle(comm)
        for number, options in enumerate(FORMATS):
            dispatch_and_check(ep, Step(case, comm.size, number), 7168, torch.bfloat16, options)
        ep.close()


def test_large_rows() -> None:
    on_ranks(2, run_large_rows, longest=0)


def run_without_sync(comm: epcomm.Communicator) -> None:
    """Results of fixed shape, and rows that are dropped: as if torch had quantised."""
    case = case_of(260, host_sync=False, zero_tail=True, overflow="drop", max_recv_rows=11)
    for layout, wire in (("contiguous", "expert"), ("contiguous", "rank"), ("flat", "auto")):
        ep = replace(case, layout=layout, wire=wire).handle(comm)
        for number, options in enumerate(FORMATS):
            routing = ep.route(Step(case, comm.size, number).exchange.indices[comm.rank])
            x = samples(5, 260, torch.bfloat16, number * comm.size + comm.rank)
            wanted = ep.dispatch(options.quantized(x), routing, copy=True)
            received = ep.dispatch(x, routing, quantize=options)
            for part, got, reference in zip(("codes", "scales"), received.x, wanted.x):
                require(f"{options}: {part}", as_bytes(got), as_bytes(reference))
            require("source_token", received.source_token, wanted.source_token)
        ep.close()


def test_without_sync() -> None:
    on_ranks(2, run_without_sync, longest=0)


def run_quantized_already(comm: epcomm.Communicator, wire: str) -> None:
    """Rows that the caller has quantised travel as they are, whatever their widths and dtypes."""
    cases = [case_of(200, layout="contiguous"), case_of(200, layout="flat"), case_of(200, mode="latency")]
    for case in cases:
        ep = replace(case, wire="auto" if case.layout == "flat" else wire).handle(comm)
        for number, (width, scale_width, dtype) in enumerate(
            [(199, 7, torch.uint8), (131, 2, torch.float32), (1, 1, torch.int32), (64, 3, torch.float8_e8m0fnu)]
        ):
            step = Step(replace(case, layout=ep.config.layout), comm.size, number)
            generator = torch.Generator().manual_seed(number)
            payload = [[], []]  # of all ranks: codes, scales
            for index in step.exchange.indices:
                for part, (columns, kind) in zip(payload, ((width, torch.float8_e4m3fn), (scale_width, dtype))):
                    data = torch.randint(256, (len(index), columns * kind.itemsize), generator=generator)
                    part.append(data.to(torch.uint8).view(kind))
            routing = ep.route(step.exchange.indices[comm.rank])
            received = ep.dispatch(tuple(part[comm.rank] for part in payload), routing)
            assert isinstance(received.x, tuple)
            for got, part in zip(received.x, payload):
                check_rows(step, comm.rank, got, part)
        ep.close()


@pytest.mark.parametrize("wire", ["expert", "rank"])
def test_rows_that_are_quantised_already(wire: str) -> None:
    on_ranks(3, run_quantized_already, wire, longest=0)


def run_unread_rows(comm: epcomm.Communicator) -> None:
    """Rows of tokens without any expert are in memory that nobody may read."""
    page, num_tokens = mmap.PAGESIZE, 4
    memory = mmap.mmap(-1, num_tokens * page)
    x = torch.frombuffer(memory, dtype=torch.bfloat16).view(num_tokens, -1)
    x.copy_(samples(*x.shape, torch.bfloat16, comm.rank))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    indices = torch.tensor([[0, 1], [-1, -1], [1, 1], [-1, -1]])
    for layout, wire in (("contiguous", "expert"), ("contiguous", "rank"), ("flat", "auto")):
        ep = comm.expert_parallel(num_experts=2, topk=2, hidden=x.shape[1], max_tokens=4, layout=layout, wire=wire)
        routing = ep.route(indices)
        wanted = ep.dispatch(x, routing, quantize=OPTIONS[0], copy=True)
        for token in (1, 3):
            assert protect(x[token].data_ptr(), page, 0) == 0
        received = ep.dispatch(x, routing, quantize=OPTIONS[0])
        for token in (1, 3):
            assert protect(x[token].data_ptr(), page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        for got, reference in zip(received.x, wanted.x):
            require(layout, as_bytes(got), as_bytes(reference))
        ep.close()


def test_tokens_without_experts_are_not_read() -> None:
    on_ranks(2, run_unread_rows, longest=0)


def run_out_in_columns(comm: epcomm.Communicator) -> None:
    for layout in ("contiguous", "padded"):
        case = case_of(300, layout=layout)
        ep, step, options = case.handle(comm), Step(case, comm.size, 0), FORMATS[5]
        routing, x = ep.route(step.exchange.indices[comm.rank]), samples(5, 300, torch.bfloat16, comm.rank)
        wanted = ep.dispatch(x, routing, quantize=OPTIONS[0], copy=True)
        copied = ep.dispatch(x, routing, quantize=options, copy=True)
        like = [torch.empty_strided(part.shape, part.stride(), dtype=part.dtype) for part in copied.x]
        for out in (tuple(like), [torch.empty_like(part) for part in wanted.x]):
            received = ep.dispatch(x, routing, quantize=options, out=out)
            assert received.x[1] is out[1]
            real = received.source_rank >= 0
            for result in (received, copied, ep.dispatch(x, routing, quantize=options)):
                for got, reference in zip(result.x, wanted.x):
                    require(layout, as_bytes(got)[real], as_bytes(reference)[real])
        ep.close()


def test_out_in_columns() -> None:
    on_ranks(2, run_out_in_columns, longest=0)


def run_forms_of_x(comm: epcomm.Communicator, kinds: list[tuple[str, str]]) -> None:
    """Rows with gaps, results in memory of the caller, plain dispatches in between."""
    for mode, layout in kinds:
        case = case_of(260, mode=mode, layout=layout)
        ep, step = case.handle(comm), Step(case, comm.size, 0)
        routing, x = ep.route(step.exchange.indices[comm.rank]), samples(5, 256, torch.bfloat16, comm.rank)
        wanted = ep.dispatch(OPTIONS[0].quantized(x), routing, copy=True)  # the wire format is that of two tensors
        apart = torch.cat([x, x], dim=1)
        for form in (x, spread(x), apart[:, 256:], x.t().contiguous().t(), x.clone().requires_grad_()):
            with torch.no_grad():
                received = ep.dispatch(form, routing, quantize=OPTIONS[0])
                require_same_rows(case, wanted, received)
                require_same_rows(case, wanted, ep.dispatch(form, routing, quantize=OPTIONS[0], copy=True))
            received = ep.dispatch(x[:, :9], routing)
            assert received.x.shape[-1] == 9 and received.output_buffer().shape[-1] == 9
        out = tuple(torch.empty_like(part) for part in wanted.x)
        assert ep.dispatch(x, routing, quantize=OPTIONS[0], out=out).x is out
        require_same_rows(case, wanted, ep.dispatch(x, routing, quantize=OPTIONS[0]))
        ep.close()


def require_same_rows(case: Case, wanted: Any, got: Any) -> None:
    real = wanted.source_rank >= 0 if case.layout == "padded" else slice(None)
    for part, reference in zip(got.x, wanted.x):
        require("rows", as_bytes(part)[real], as_bytes(reference)[real])
    shape = (*got.x[0].shape[:-1], 256)
    buffer = got.output_buffer()
    assert (buffer.shape, buffer.dtype) == (shape, torch.bfloat16)


@pytest.mark.parametrize("kernels, kinds", [("numba", KINDS), ("mixed", KINDS[1:3])], ids=["numba", "mixed"])
def test_forms_of_x(kernels: str, kinds: list[tuple[str, str]]) -> None:
    on_ranks(2, run_forms_of_x, kinds, kernels=kernels, longest=0)


def run_wrong_arguments(comm: epcomm.Communicator) -> None:
    case = Case(hidden=16, tokens="full")  # rows of 32 bytes
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    good = torch.ones(7, 16, dtype=torch.bfloat16)
    for x, quantize, error, texts in (
        (good.double(), OPTIONS[0], ConfigError, ("`x`", "bfloat16 or torch.float16 or torch.float32", "float64")),
        (good.to(torch.float8_e4m3fn), OPTIONS[0], ConfigError, ("`x`", "float8_e4m3fn")),
        ((good, good), OPTIONS[0], ConfigError, ("`x`", "tuple")),
        (good[:-1], OPTIONS[0], ConfigError, ("`x`", "(6, 16)")),
        (torch.ones(7, 29, dtype=torch.bfloat16), OPTIONS[0], CapacityError, ("`x`", "at most 32", "got 33")),
        (good, "float8", ConfigError, ("`quantize`", "None or an epcomm.Float8, MXFP8 or NVFP4, got str")),
        (good, [OPTIONS[0]], ConfigError, ("`quantize`", "list")),
        (good, Float8, ConfigError, ("`quantize`", "the class Float8")),
    ):
        def call(x: Any = x, quantize: Any = quantize) -> None:
            mine = (x, quantize) if comm.rank == 1 else (good, OPTIONS[0])
            ep.dispatch(mine[0], ep.route(step.exchange.indices[comm.rank]), quantize=mine[1])

        check_raised(comm, call, error, *texts)
        quantized_round_trip(ep, step, 16, torch.bfloat16, OPTIONS[0])
    if comm.size > 1:
        out = torch.empty(1, 16)
        routing = ep.route(step.exchange.indices[comm.rank])
        given = {"out": out} if comm.rank == 1 else {}
        check_raised(comm, lambda: ep.dispatch(good, routing, quantize=OPTIONS[0], **given), ConfigError, "`out`")
    wide = torch.ones(7, 28, dtype=torch.bfloat16)  # 28 + 4 bytes fit, expert outputs of 56 don't
    received = ep.dispatch(wide, ep.route(step.exchange.indices[comm.rank]), quantize=OPTIONS[0])
    received.output_buffer().fill_(1)
    quantized_round_trip(ep, step, 16, torch.bfloat16, OPTIONS[0])
    ep.close()


@pytest.mark.parametrize("kernels", ["numba", "mixed"])
def test_wrong_arguments(kernels: str) -> None:
    on_ranks(2, run_wrong_arguments, longest=0, kernels=kernels)


def run_disagreements(comm: epcomm.Communicator) -> None:
    case = Case(hidden=256)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    x = torch.ones(7, 256, dtype=torch.bfloat16)
    for other, texts in (
        ({"quantize": OPTIONS[1]}, ("round_scales_to_power_of_two=False", "round_scales_to_power_of_two=True")),
        ({"quantize": OPTIONS[2]}, ("packed_ue8m0=False", "packed_ue8m0=True")),
        ({}, ("torch.bfloat16 x 256", "torch.float8_e4m3fn x 256, torch.float32 x 2")),
    ):
        routing = ep.route(step.exchange.indices[comm.rank])
        with pytest.raises(MismatchError) as raised:
            ep.dispatch(x, routing, **({"quantize": OPTIONS[0]} if comm.rank == 0 else other))
        assert all(text in str(raised.value) for text in (*texts, "quantize=Float8(block=128")), raised.value
        comm.reset()
        quantized_round_trip(ep, step, 256, torch.bfloat16, OPTIONS[0])
    ep.close()


@pytest.mark.parametrize("kernels", ["numba", "mixed"])
def test_disagreements(kernels: str) -> None:
    on_ranks(2, run_disagreements, longest=0, kernels=kernels)


# ---- interpreted kernels, which quantise as they send


@pytest.mark.parametrize("world, kernels", [(1, "triton"), (2, "triton"), (3, "mixed")])
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], KINDS[5]], ids=[KIND_IDS[0], KIND_IDS[4], KIND_IDS[5]])
def test_interpreted_traffic(kind: tuple[str, str], world: int, kernels: str) -> None:
    """Rows that move in bytes (1, 1030) and in vectors, of one tile and of two (1030, 4352)."""
    on_ranks(world, run_quantized, list(traffic_of((1, 144, 1030, 4352), kind)), kernels=kernels, longest=0)


def run_every_code(comm: epcomm.Communicator) -> None:
    x = every_code()
    ep = comm.expert_parallel(num_experts=1, topk=1, hidden=256, max_tokens=len(x))
    routing = ep.route(torch.zeros(len(x), 1, dtype=torch.int64))
    for options, factor in itertools.product(OPTIONS, (1.0, 3.0, 0.7)):
        rows, scales = ep.dispatch(x * factor, routing, quantize=options).x
        wanted_rows, wanted_scales = options.quantized(x * factor)
        require("codes", rows.view(torch.uint8), wanted_rows.view(torch.uint8))
        require("scales", scales, wanted_scales)
    ep.close()


def test_interpreted_kernels_make_every_code() -> None:
    on_ranks(1, run_every_code, kernels="triton", longest=0)
