"""Formats of quantised rows: torch's definition against tables of all codes, and the CPU's kernels against torch."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epcomm.device.cpu import arithmetic
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.kernels.cpu.quantize_rows import quantize_row
from epcomm.moe.quantize import MXFP8, NVFP4, X_DTYPES, Float8, Quantizer, column_major

FLOAT8 = [
    Float8(),
    Float8(round_scales_to_power_of_two=True),
    Float8(round_scales_to_power_of_two=True, packed_ue8m0=True),
]
GLOBAL_SCALES = (1.0, 0.0137, 2.0**-118, 2.0**116)
QUANTIZERS: list[Quantizer] = [*FLOAT8, MXFP8(), *(NVFP4(g) for g in GLOBAL_SCALES)]
IDS = ["float32", "power_of_two", "packed", "mxfp8", *(f"nvfp4-{g:.3g}" for g in GLOBAL_SCALES)]
WIDTHS = (1, 15, 16, 33, 129)
GUARD = 64  # bytes around a result that must stay as they are

each_quantizer = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=IDS)
each_dtype = pytest.mark.parametrize("dtype", X_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))

# ---- the formats, from the meaning of their bits

#: numbers of e4m3fn's codes 0 to 126, of e2m1's codes 0 to 7
E4M3 = np.array([(code & 7) / 512 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10) for code in range(127)])
E2M1 = np.array([(code & 1) / 2 if code < 2 else (2 + (code & 1)) * 2.0 ** ((code >> 1) - 2) for code in range(8)])


def nearest(magnitudes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The code of the nearest number of a table for each of [n], by looking at all of them; of two the even code."""
    distances = np.abs(table - np.minimum(magnitudes.astype(np.float64), table[-1])[:, None])
    is_odd = np.arange(len(table)) % 2
    return np.lexsort((np.broadcast_to(is_odd, distances.shape), distances))[:, 0].astype(np.uint8)


def defined_block(values: np.ndarray, quantizer: Quantizer) -> tuple[np.ndarray, float, int]:
    """(codes with their signs, factor, scale as it is stored) of one block of float32s."""
    finite = np.isfinite(values)
    amax = np.abs(values[finite]).max(initial=np.float32(0))
    magnitudes, signs = np.abs(values), np.signbit(values).astype(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        if isinstance(quantizer, NVFP4):
            g, one = np.float32(quantizer.global_scale), np.float32(1)
            wanted = amax * (one / (np.float32(6) * g))
            stored = int(nearest(np.maximum(wanted, 2.0**-8)[None], E4M3)[0])
            step = np.float32(E4M3[stored]) * g
            quotients = magnitudes * (one / step)
            assert quotients.dtype == np.float32
            codes = nearest(np.where(np.isnan(quotients), np.inf, quotients), E2M1)
            return (
                codes | np.where(np.isnan(values), 0, signs << 3).astype(np.uint8),
                float(E4M3[stored]) * float(g),
                stored,
            )
        if quantizer.form == "float32":
            scale = float(max(amax / np.float32(448), np.float32(2.0**-126)) if amax else 1.0)
            stored = int(np.float32(scale).view(np.int32))
        else:
            exponent = max(math.ceil(math.log2(float(amax) / 448)), -126) if amax else 0  # exact near powers of two:
            while 448 * 2.0**exponent < amax:
                exponent += 1
            while exponent > -126 and amax and 448 * 2.0 ** (exponent - 1) >= amax:
                exponent -= 1
            scale, stored = 2.0**exponent, exponent + 127
            stored = stored << 23 if quantizer.form == "power_of_two" else stored
        codes = nearest(magnitudes[finite] / np.float32(scale), E4M3)
    result = np.full(len(values), 0x7F, np.uint8)
    result[finite] = codes | signs[finite] << 7
    return result, scale, stored


def defined(x: torch.Tensor, quantizer: Quantizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bytes of the codes, bytes of the scales, each column's factor) of x, block by block."""
    block, rows = quantizer.block, x.float().numpy()
    num_blocks = -(-rows.shape[1] // block)
    codes, factors = np.zeros(rows.shape, np.uint8), np.zeros(rows.shape)
    stored = np.zeros((len(rows), num_blocks), np.int64)
    for token, number in np.ndindex(*stored.shape):
        columns = slice(block * number, block * (number + 1))
        codes[token, columns], factors[token, columns], stored[token, number] = defined_block(
            rows[token, columns], quantizer
        )
    if quantizer.form == "nvfp4":
        codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    if quantizer.form == "packed":
        stored = np.pad(stored, ((0, 0), (0, -num_blocks % 4)))
    dtype = np.int32 if quantizer.form in ("float32", "power_of_two") else np.uint8
    return codes, stored.astype(dtype).view(np.uint8), factors


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def require(name: str, got: torch.Tensor, wanted: torch.Tensor | np.ndarray) -> None:
    """Equality of bytes."""
    wanted = torch.from_numpy(wanted) if isinstance(wanted, np.ndarray) else as_bytes(wanted)
    got = as_bytes(got)
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    where = (got != wanted).nonzero()
    if len(where):
        at = tuple(where[0].tolist())
        raise AssertionError(f"{name}: {len(where)} bytes differ, first at {at}: {got[at]:#x}, wanted {wanted[at]:#x}")


def samples(num_tokens: int, hidden: int, dtype: torch.dtype, seed: int, is_finite: bool = False) -> torch.Tensor:
    """Numbers of all magnitudes, alike in blocks of 16, from subnormal to huge; zeros; and inf and NaN."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    least, most = math.log2(info.smallest_normal) - 6, math.log2(info.max)
    num_blocks = -(-hidden // 16)
    exponents = torch.rand(num_tokens, num_blocks, generator=generator, dtype=torch.float64) * (most - least) + least
    moderate = torch.randn(num_tokens, num_blocks, generator=generator, dtype=torch.float64) * 3
    exponents = torch.where(torch.rand(exponents.shape, generator=generator) < 0.6, moderate, exponents)
    factors = torch.exp2(exponents).masked_fill_(torch.rand(exponents.shape, generator=generator) < 0.05, 0)
    rows = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)
    rows *= factors.repeat_interleave(16, dim=1)[:, :hidden]
    rows[torch.rand(rows.shape, generator=generator) < 0.1] *= 2.0**-7
    rows.clamp_(info.min, info.max)
    if not is_finite:
        places = torch.rand(rows.shape, generator=generator)
        rows[places < 0.01], rows[places > 0.99], rows[(places - 0.5).abs() < 0.005] = torch.inf, -torch.inf, torch.nan
    return rows.to(dtype)


@each_dtype
@each_quantizer
def test_numbers_are_the_defined_ones(quantizer: Quantizer, dtype: torch.dtype) -> None:
    for hidden in WIDTHS:
        x = samples(60, hidden, dtype, hidden)
        rows, scales = quantizer.quantized(x)
        assert rows.is_contiguous() and scales.is_contiguous()
        like = quantizer.result_like(x)
        assert [(t.shape, t.dtype) for t in like] == [(t.shape, t.dtype) for t in (rows, scales)]
        codes, stored, _ = defined(x, quantizer)
        require(f"scales of {hidden}", scales, stored)
        require(f"codes of {hidden}", rows, codes)


@each_dtype
@each_quantizer
def test_error_bound(quantizer: Quantizer, dtype: torch.dtype) -> None:
    closest = 0.0
    for hidden in WIDTHS:
        x = samples(200, hidden, dtype, hidden + 1, is_finite=True)
        codes, _, factors = defined(x, quantizer)
        rows, scales = quantizer.quantized(x)
        if quantizer.form == "nvfp4":
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)[:, :hidden]
            numbers = E2M1[codes & 7] * np.where(codes & 8, -1, 1)
        else:
            numbers = E4M3[codes & 127] * np.where(codes & 128, -1, 1)
        exact = x.double().numpy()
        error, sizes = np.abs(numbers * factors - exact), np.abs(exact)
        if isinstance(quantizer, NVFP4):
            parts = (sizes / 5, factors / 4, sizes - 2688 * quantizer.global_scale)
            bound = np.maximum.reduce(parts) * (1 + 2.0**-19)
        elif isinstance(quantizer, MXFP8):
            bound = np.maximum(sizes / 17, factors * 2.0**-10)
        else:
            bound = np.maximum(sizes * 2.0**-4, factors * (2.0**-10 * (1 + 2.0**-20)))
        assert (error <= bound).all()
        stated = quantizer.error_bound(x, scales)
        np.testing.assert_allclose(stated.numpy(), bound, rtol=2.0**-23)
        closest = max(closest, (error[bound > 0] / bound[bound > 0]).max())
        values = quantizer.dequantized(rows, scales, torch.float64, hidden=hidden).numpy()
        fits = (
            np.abs(numbers * factors) <= torch.finfo(torch.float32).max
        )  # the largest of all may be rounded up to 2^128
        values, numbers, factors = values[fits], numbers[fits], factors[fits]
        np.testing.assert_allclose(values, numbers * factors, rtol=2.0**-22, atol=2.0**-149)
        assert (values[exact[fits] == 0] == 0).all()
    assert closest > 0.9 or dtype == torch.float16 and quantizer == NVFP4(2.0**116)  # it isn't loose


@each_quantizer
def test_zeros(quantizer: Quantizer) -> None:
    for hidden in WIDTHS:
        for x in (torch.zeros(3, hidden), -torch.zeros(3, hidden)):
            rows, scales = quantizer.quantized(x)
            assert (quantizer.dequantized(rows, scales, hidden=hidden) == 0).all()
            require("codes", rows, defined(x, quantizer)[0])
        empty = quantizer.quantized(torch.zeros(0, hidden))
        assert [len(part) for part in empty] == [0, 0]


@each_quantizer
def test_what_is_not_finite_leaves_its_block_alone(quantizer: Quantizer) -> None:
    x = torch.tensor([[1.0, -2.0, 448.0, 0.0]]) * getattr(quantizer, "global_scale", 1.0)
    spoilt = torch.cat([x, torch.tensor([[torch.inf, -torch.inf, torch.nan, -torch.nan]])], dim=1)
    (clean_rows, clean_scales), (rows, scales) = quantizer.quantized(x), quantizer.quantized(spoilt)
    require("scales", scales, clean_scales)
    require("codes", rows[:, : clean_rows.shape[1]], clean_rows)
    values = quantizer.dequantized(rows, scales)[0, 4:]
    if isinstance(quantizer, NVFP4):
        largest = quantizer.dequantized(torch.full_like(rows, 0x77), scales)[0, 0].item()
        assert values.tolist() == [largest, -largest, largest, largest]
    else:
        assert values.isnan().all()
    only = quantizer.quantized(spoilt[:, 4:])
    assert as_bytes(only[1]).any()  # no scale of 0
    require("codes", only[0], rows[:, clean_rows.shape[1] :])


def test_every_float4_and_what_lies_between() -> None:
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    points = torch.from_numpy(np.concatenate([E2M1, middles])).float()
    points = torch.cat([points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-1.0))])
    points = torch.cat([points, -points]).clamp(-6, 6)
    rows = torch.nn.functional.pad(points, (0, -len(points) % 15)).view(-1, 15)
    x = torch.cat([torch.full((len(rows), 1), 6.0), rows], dim=1)  # a scale of 1
    codes, scales = NVFP4().quantized(x)
    assert (scales.float() == 1).all()
    require("codes", codes, defined(x, NVFP4())[0])
    ties = NVFP4().dequantized(*NVFP4().quantized(torch.tensor([[6.0, *middles]])))[0, 1:]
    assert ties.tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert torch.equal(NVFP4().dequantized(*NVFP4().quantized(torch.from_numpy(E2M1)[None].float()))[0].double(),
                       torch.from_numpy(E2M1))  # fmt: skip
    require("order", NVFP4().quantized(torch.tensor([[6.0, -0.5, 3.0]]))[0], np.array([[0x97, 0x05]], np.uint8))


def test_scales_of_microscaling() -> None:
    """The least power of two that 448 times is enough; at least 2^-126."""
    bits = torch.arange(0, 256, dtype=torch.int32)[:, None] << 23
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF], dtype=torch.int32)
    amax = (bits | mantissas).view(torch.float32).flatten()[:, None]
    amax = amax[amax.isfinite()][:, None]
    scales = MXFP8().quantized(amax)[1]
    require("scales", scales, defined(amax, MXFP8())[1])
    power = torch.exp2(scales.double() - 127)
    assert (amax <= 448 * power).all() and ((amax > 224 * power) | (scales <= 1) | (amax == 0)).all()
    assert scales.min() == 1 and scales.max() == 247 and (scales[amax == 0] == 127).all()
    assert MXFP8().quantized(torch.tensor([[449.0]]))[1].item() == 128  # the specification's own has 127, and clamps


def test_every_scale_of_microscaling_is_understood() -> None:
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    values = MXFP8().dequantized(torch.ones(256, 1).to(torch.float8_e4m3fn), scales)[:, 0]
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)] and values[255].isnan()


def test_global_scale() -> None:
    x = samples(20, 64, torch.float32, 3, is_finite=True)
    large = x.abs().max().item()
    fitted = NVFP4(large / 2688)
    rows, scales = fitted.quantized(x)
    assert scales.float().max() > 400 and fitted.dequantized(rows, scales).abs().max() > large * 0.9
    with_one = NVFP4().dequantized(*NVFP4().quantized(torch.tensor([[1e6, -1e6, 2.0]])))
    assert with_one.tolist() == [[2688, -2688, 0, 0]]
    assert NVFP4(1) == NVFP4(1.0) and repr(NVFP4(1)) == repr(NVFP4(1.0)) and hash(NVFP4(1)) == hash(NVFP4(1.0))
    assert repr(NVFP4(0.1)) != repr(NVFP4(0.2)) and NVFP4(0.1) == NVFP4(float(np.float32(0.1)))
    assert ctypes.c_float.from_buffer(ctypes.c_int32(NVFP4(0.1).kernel_argument)).value == NVFP4(0.1).global_scale


@pytest.mark.parametrize("value", [0, -1.0, 2.0**-119, 2.0**117, math.inf, math.nan, True, "1", None], ids=repr)
def test_wrong_global_scale(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"NVFP4: argument `global_scale`: wanted a number from .* got"):
        NVFP4(value)


def test_texts_tell_formats_apart() -> None:
    everything = [*QUANTIZERS, Float8(scale_layout="column")]
    assert len({repr(quantizer) for quantizer in everything}) == len(everything)
    with pytest.raises(ConfigError, match="`scale_layout`: wanted 'row' or 'column', got 'rows'"):
        Float8(scale_layout="rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_column_major(dtype: torch.dtype) -> None:
    aligned = 16 // dtype.itemsize
    for shape in ((0, 3), (1, 1), (5, 3), (16, 7), (2, 5, 3), (3, 17, 2), (2, 0, 4)):
        scales = torch.randint(0, 100, shape).to(dtype)
        columns = column_major(scales)
        assert (columns.shape, columns.dtype) == (scales.shape, dtype)
        require("numbers", columns, scales)
        if scales.numel():
            rows, width = shape[-2:]
            stride = -(-rows // aligned) * aligned
            assert columns.stride()[-2:] == (1, stride) and columns.data_ptr() % 16 == 0
            assert len(shape) == 2 or columns.stride(0) == width * stride


@pytest.mark.parametrize("options", FLOAT8, ids=IDS[:3])
def test_scale_layouts_mean_the_same(options: Float8) -> None:
    column = Float8(128, options.round_scales_to_power_of_two, options.packed_ue8m0, "column")
    x = samples(6, 700, torch.bfloat16, 4, is_finite=True)
    (rows, scales), wanted = column.quantized(x), options.quantized(x)
    require("scales on their way", scales, wanted[1])
    delivered = column.delivered(scales)
    assert delivered.stride() == (1, 8) and options.delivered(scales) is scales
    require("values", column.dequantized(rows, delivered), options.dequantized(*wanted))
    by_expert = column.delivered(scales.view(2, 3, -1))
    assert by_expert.stride()[1:] == (1, 4)
    require("values", column.dequantized(rows.view(2, 3, -1), by_expert).flatten(0, 1), options.dequantized(*wanted))


# ---- a row at a time, in Numba


@functools.cache
def compiled(dtype: torch.dtype, form: str) -> Callable[..., int]:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(quantize_row(dtype, form).address)


def by_kernel(x: torch.Tensor, quantizer: Quantizer, misaligned: int = 0) -> list[torch.Tensor]:
    """Bytes of codes and of scales of x, which lies `misaligned` items (its results: bytes) from where it might."""
    run = compiled(x.dtype, quantizer.form)
    results = []
    for like in quantizer.result_like(x):
        results.append(torch.full((len(x), 2 * GUARD + misaligned + like.shape[1] * like.dtype.itemsize), 0xA5))
        results[-1] = results[-1].to(torch.uint8)
    for token, row in enumerate(x):
        source = torch.cat([torch.full((misaligned,), torch.nan, dtype=x.dtype), row, torch.full_like(row[:1], 1e4)])
        at = [result[token].data_ptr() + GUARD + misaligned for result in results]
        address = source.data_ptr() + misaligned * x.itemsize
        assert run(address, *at, len(row), quantizer.kernel_argument) == 0
    for result in results:
        assert (result[:, : GUARD + misaligned] == 0xA5).all() and (result[:, -GUARD:] == 0xA5).all()
    return [result[:, GUARD + misaligned : -GUARD] for result in results]


def require_same_as_torch(x: torch.Tensor, quantizer: Quantizer, misaligned: int = 0) -> None:
    for name, got, wanted in zip(("codes", "scales"), by_kernel(x, quantizer, misaligned), quantizer.quantized(x)):
        require(f"{name} of {list(x.shape)} {x.dtype}", got, wanted)


@each_dtype
@each_quantizer
def test_kernel_has_the_bits_of_the_definition(quantizer: Quantizer, dtype: torch.dtype) -> None:
    for number, hidden in enumerate((*WIDTHS, 2, 17, 31, 32, 127, 128, 130, 300, 511, 512, 640, 1111, 7168)):
        x = samples(4 if hidden > 1000 else 12, hidden, dtype, hidden + 2)
        require_same_as_torch(x, quantizer, misaligned=number % 8)


@pytest.mark.parametrize("dtype", X_DTYPES[:2], ids=["bfloat16", "float16"])
@each_quantizer
def test_kernel_on_every_16_bit_number(quantizer: Quantizer, dtype: torch.dtype) -> None:
    """In order, so that a block's are alike; and shuffled. Without its sign, one number more."""
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    require_same_as_torch(torch.stack([x, shuffled]), quantizer)


@each_quantizer
def test_kernel_on_every_tie(quantizer: Quantizer) -> None:
    """float32s at, and right beside, all codes and the middles between them, with scales that round and don't."""
    for table in (E4M3, E2M1):
        points = torch.from_numpy(np.concatenate([table, (table[1:] + table[:-1]) / 2])).float()
        points = torch.cat([points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-1.0))])
        points = torch.cat([points, -points])
        block = quantizer.block
        rows = torch.nn.functional.pad(points, (0, -len(points) % (block - 1))).view(-1, block - 1)
        x = torch.cat([torch.full((len(rows), 1), float(table[-1])), rows], dim=1)
        for factor in (1.0, 3.0, 0.7, 1.0000001):
            require_same_as_torch(x * factor * getattr(quantizer, "global_scale", 1.0), quantizer)


@each_dtype
@each_quantizer
def test_kernel_on_quotients_next_to_ties(quantizer: Quantizer, dtype: torch.dtype) -> None:
    """Numbers within some last places of a scale times the middle of two codes: there an inexact quotient would show.

    Scales of all kinds, and those whose product with such a middle is next to the middle of two float32s.
    """
    generator = torch.Generator().manual_seed(5)
    near = (torch.arange(8, 16)[:, None] << 20) + torch.arange(-24, 25)
    mantissas = torch.cat([near.flatten(), torch.randint(1 << 23, 1 << 24, (800,), generator=generator)])
    exponents = torch.randint(-20, 12, mantissas.shape, generator=generator)
    largest = (448.0 * torch.ldexp(mantissas.double(), exponents - 23)).float()[:, None]
    middles = torch.cat([torch.arange(17, 32, 2) * 2.0**-4, torch.arange(1, 16, 2) * 2.0**-10]).double()
    steps = torch.arange(-3, 4)
    products = (largest.double() / 448 * middles).float()
    values = (products.view(torch.int32)[..., None] + steps).view(torch.float32).flatten(1)
    x = torch.cat([largest, values, largest, -largest], dim=1)
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    require_same_as_torch(x.flatten()[None], quantizer)


@each_dtype
@each_quantizer
def test_kernel_on_chunks_with_anything_else(quantizer: Quantizer, dtype: torch.dtype) -> None:
    """Blocks that can't be done the quick way, at each place among those that can, and at both ends of what can."""
    base = samples(1, 128 * 20, torch.float32, 6, is_finite=True).clamp(-1e4, 1e4)
    for value in (torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal,
                  2.0**-60, 2.0**-61, 2.0**-59, 0.0):  # fmt: skip
        x = base.repeat(20, 1).view(20, 20, 128)
        for row in range(20):
            if value in (torch.inf, -torch.inf) or value != value:
                x[row, row, 5 * row] = value
            else:
                x[row, row] = torch.linspace(-1, 1, 128) * value
        require_same_as_torch(x.flatten(1).to(dtype), quantizer)


def test_kernels_are_made_once() -> None:
    assert quantize_row(torch.bfloat16, "mxfp8") is quantize_row(torch.bfloat16, "mxfp8")


def test_float16_needs_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "cpu_features", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    quantize_row.cache_clear()
    with pytest.raises(UnsupportedError, match="F16C"):
        quantize_row(torch.float16, "mxfp8")
    quantize_row.cache_clear()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names CPUs of x86-64")
@pytest.mark.parametrize("cpu, features", [("x86-64", "+sse2"), ("haswell", "+avx2,+f16c,+fma")])
def test_kernels_on_other_cpus(cpu: str, features: str, tmp_path: Path) -> None:
    """Without vectors of 64 bytes, the same bits."""
    if not all(arithmetic.cpu_features() >= {name[1:]} for name in features.split(",")):
        pytest.skip(f"this CPU can't run what is compiled for {cpu}")
    code = "import torch, test_quantize_formats as t\n"
    code += "for q in t.QUANTIZERS[:5:2]:\n"
    code += (
        "    for hidden in (33, 300, 1111): t.require_same_as_torch(t.samples(8, hidden, torch.bfloat16, 9), q, 1)\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100, cwd=Path(__file__).parent)
