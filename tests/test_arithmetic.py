"""The CPU kernels that compute: reductions and weighted row sums, bit by bit against torch and Python's numbers."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm.device.cpu import arithmetic
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.kernels.cpu.reduction import reduction
from epcomm.kernels.cpu.row_sum import row_sum
from epcomm.kernels.protocol.arithmetic import OPS, ROW_SUM_DTYPES, supported_ops

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *SIXTEEN_BITS)
INTEGERS = tuple(getattr(torch, f"{sign}int{bits}") for bits in (8, 16, 32, 64) for sign in ("", "u"))
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
GUARD = 128  # bytes around a destination that must stay as they are

# Compiling takes most of the time, so `make test` leaves out what is made of the same parts.
THOROUGH = (torch.float32, torch.bfloat16, torch.int32, torch.uint8)


def marks(dtype: torch.dtype, op: str) -> Any:
    return () if op == "sum" or dtype in THOROUGH else pytest.mark.slow


def all_reductions() -> list[Any]:
    return [
        pytest.param(dtype, op, id=f"{dtype}-{op}".removeprefix("torch."), marks=marks(dtype, op))
        for dtype in DTYPES
        for op in supported_ops(dtype)
    ]


def some(dtype: torch.dtype, length: int, seed: int) -> torch.Tensor:
    """Any bit patterns for integers; for floats mostly moderate numbers, a few of the extremes."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, (length,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(256, (length * dtype.itemsize,), generator=generator).to(torch.uint8).view(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(some(dtype.to_real(), 2 * length, seed).view(length, 2))
    x = torch.randn(length, generator=generator, dtype=torch.float64) * 4
    info = torch.finfo(dtype)
    extremes = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, info.max, info.min, info.tiny, -info.tiny / 4, 1.0],
        dtype=torch.float64,
    )
    where = torch.rand(length, generator=generator) < 0.1
    return torch.where(where, extremes[torch.randint(len(extremes), (length,), generator=generator)], x).to(dtype)


def reduced(op: str, sources: Sequence[torch.Tensor]) -> torch.Tensor:
    """The definition: 16-bit floats in float32 and rounded once; integers as numbers, then reduced to their width."""
    dtype, num_sources = sources[0].dtype, len(sources)
    if dtype.is_complex:  # by components: torch's own sum multiplies by 1 + 0i, which makes NaN of infinities
        return torch.view_as_complex(reduced(op, [torch.view_as_real(source) for source in sources]))
    if dtype.is_floating_point:
        wide = torch.float32 if dtype in SIXTEEN_BITS else dtype
        combine = {"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
        result = functools.reduce(combine, [source.to(wide) for source in sources])
        return (result / num_sources if op == "avg" else result).to(dtype)
    if dtype is torch.bool:
        name = {"sum": "bor", "max": "bor", "prod": "band", "min": "band"}.get(op, op)
        combine = {"bor": torch.logical_or, "band": torch.logical_and, "bxor": torch.logical_xor}[name]
        return functools.reduce(combine, sources)
    return torch.from_numpy(np.array(integers_reduced(op, sources), dtype=object).astype(numpy_dtype(dtype)))


def numpy_dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


def integers_reduced(op: str, sources: Sequence[torch.Tensor]) -> list[int]:
    """On Python's integers of any size, wrapped to the width of the dtype at the end."""
    dtype, num_sources = sources[0].dtype, len(sources)
    bits, signed = 8 * dtype.itemsize, dtype.is_signed
    columns = zip(*(source.numpy().tolist() for source in sources))

    def wrap(x: int) -> int:
        x &= (1 << bits) - 1
        return x - (1 << bits) if signed and x >> (bits - 1) else x

    def average(column: tuple[int, ...]) -> int:
        total = wrap(sum(column))
        return total // num_sources if total >= 0 else -(-total // num_sources)

    combine = {
        "sum": lambda column: wrap(sum(column)),
        "avg": average,
        "min": min,
        "max": max,
        "prod": lambda column: wrap(functools.reduce(int.__mul__, column)),
        "band": lambda column: functools.reduce(int.__and__, column),
        "bor": lambda column: functools.reduce(int.__or__, column),
        "bxor": lambda column: functools.reduce(int.__xor__, column),
    }[op]
    return [combine(column) for column in columns]


def bits_of(x: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(x) if x.is_complex() else x
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return real.view(signed[real.dtype.itemsize])


def assert_same(got: torch.Tensor, wanted: torch.Tensor, *, signed_zeros: bool = True) -> None:
    """Equal bits, except that a NaN may be any NaN."""
    if got.is_complex():
        got, wanted = torch.view_as_real(got), torch.view_as_real(wanted)
    if got.is_floating_point():
        assert torch.equal(got.isnan(), wanted.isnan())
        got, wanted = (x.where(~x.isnan(), 0.0) for x in (got, wanted))
        if not signed_zeros:
            got, wanted = got + 0.0, wanted + 0.0
    assert torch.equal(bits_of(got), bits_of(wanted))


class Placed:
    """A copy of a tensor's bytes at an address that is `misaligned` bytes past a multiple of 64, between guards."""

    def __init__(self, x: torch.Tensor, misaligned: int = 0):
        self.dtype, self.num_bytes = x.dtype, x.numel() * x.itemsize
        self.memory = torch.full((GUARD + 64 + misaligned + self.num_bytes + GUARD,), 0xA5, dtype=torch.uint8)
        self.start = GUARD + (-self.memory.data_ptr() - GUARD) % 64 + misaligned
        self.address = self.memory.data_ptr() + self.start
        self._bytes[:] = x.contiguous().view(torch.uint8)

    @property
    def _bytes(self) -> torch.Tensor:
        return self.memory[self.start : self.start + self.num_bytes]

    @property
    def value(self) -> torch.Tensor:
        return self._bytes.clone().view(self.dtype)

    def assert_guards_untouched(self) -> None:
        assert bool((self.memory[: self.start] == 0xA5).all())
        assert bool((self.memory[self.start + self.num_bytes :] == 0xA5).all())


@functools.cache
def callable_reduction(dtype: torch.dtype, op: str) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(reduction(dtype, op).address)


@functools.cache
def callable_row_sum(input_dtype: torch.dtype, output_dtype: torch.dtype) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)(row_sum(input_dtype, output_dtype).address)


def reduce(
    op: str, sources: Sequence[torch.Tensor], *, misaligned: int = 0, streaming: int = 0, in_place: int | None = None
) -> torch.Tensor:
    """Source k lies `misaligned * k` bytes off, the destination `misaligned` or, in place, where that source is."""
    placed = [Placed(source, misaligned * k % 64) for k, source in enumerate(sources)]
    out = Placed(torch.zeros_like(sources[0]), misaligned) if in_place is None else placed[in_place]
    table = np.array([source.address for source in placed], dtype=np.int64)
    call = callable_reduction(sources[0].dtype, op)
    assert call(out.address, table.ctypes.data, len(sources), out.num_bytes, len(sources), streaming) == 0
    for array in (out, *placed):
        array.assert_guards_untouched()
    for k, source in enumerate(sources):
        assert k == in_place or torch.equal(bits_of(placed[k].value), bits_of(source))
    return out.value


def sum_rows(
    sources: Sequence[torch.Tensor],
    output_dtype: torch.dtype,
    *,
    length: int,
    weights: torch.Tensor | None = None,
    input_dtype: torch.dtype | None = None,
    misaligned: int = 0,
    streaming: int = 0,
) -> torch.Tensor:
    placed = [Placed(source, misaligned * k % 64) for k, source in enumerate(sources)]
    out = Placed(torch.full((length,), 7.0, dtype=output_dtype), misaligned)
    table = np.array([source.address for source in placed], dtype=np.int64)
    call = callable_row_sum(input_dtype or sources[0].dtype, output_dtype)
    weights_address = 0 if weights is None else weights.data_ptr()
    assert call(out.address, table.ctypes.data, weights_address, len(sources), length, streaming) == 0
    out.assert_guards_untouched()
    return out.value


# ---- reductions


@pytest.mark.parametrize("dtype, op", all_reductions())
def test_reduction_is_the_definition(dtype: torch.dtype, op: str) -> None:
    size = dtype.itemsize
    edges = [at // size + change for at in (64, 256, 512, 1024) for change in (-1, 0, 1)]
    for case, length in enumerate([0, 1, 3, *edges, 2 * 1024 // size + 7]):
        for num_sources in (1, 2, 3, 7, 8, 9):
            sources = [some(dtype, length, 1000 * case + k) for k in range(num_sources)]
            wanted = reduced(op, sources)
            same = functools.partial(assert_same, wanted=wanted, signed_zeros=op not in ("min", "max"))
            same(reduce(op, sources))
            same(reduce(op, sources, misaligned=size, streaming=1))
            same(reduce(op, sources, misaligned=1 + case, streaming=case % 2, in_place=case % num_sources))


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8]),
    num_sources=st.integers(1, 40),
    length=st.integers(0, 3000),
    misaligned=st.integers(0, 63),
    streaming=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sum_of_anything_anywhere(
    dtype: torch.dtype, num_sources: int, length: int, misaligned: int, streaming: bool, in_place: bool, seed: int
) -> None:
    sources = [some(dtype, length, seed + k) for k in range(num_sources)]
    where = seed % num_sources if in_place else None
    got = reduce("sum", sources, misaligned=misaligned, streaming=int(streaming), in_place=where)
    assert_same(got, reduced("sum", sources))


def test_sums_are_taken_in_the_order_of_the_sources() -> None:
    big, small = torch.full((300,), 2.0**24), torch.ones(300)
    assert reduce("sum", [big, small, small])[0] == 2.0**24
    assert reduce("sum", [small, small, big])[0] == 2.0**24 + 2


def test_average_of_many_narrow_integers_divides_by_their_number() -> None:
    sources = [torch.full((100,), -1, dtype=torch.int8)] * 130  # more than an int8 can count
    assert torch.equal(reduce("avg", sources), torch.zeros(100, dtype=torch.int8))  # the sum wraps to 126: 126 / 130
    sources = [torch.full((100,), -1, dtype=torch.int16)] * 130
    assert torch.equal(reduce("avg", sources), torch.full((100,), -1, dtype=torch.int16))


def test_kernels_that_two_processes_cached_stay_apart(tmp_path: Path) -> None:
    """Numba names machine code after a counter of the process, which is the same in the first two of these three."""
    for ops in (["sum"], ["avg"], ["sum", "avg"]):
        code = "import torch, numpy as np, ctypes\nfrom epcomm.kernels.cpu.reduction import reduction\n"
        code += "call = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 6)\n"
        code += "x = np.ones(100, dtype=np.float32)\ntable = np.array([x.ctypes.data] * 2)\n"
        for op in ops:
            code += f"out = np.zeros_like(x); run = call(reduction(torch.float32, {op!r}).address)\n"
            code += "run(out.ctypes.data, table.ctypes.data, 2, 400, 2, 0)\n"
            code += f"assert (out == {2 if op == 'sum' else 1}).all(), ({op!r}, out)\n"
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_is_supported_or_refused(dtype: torch.dtype) -> None:
    for op in OPS:
        if op in supported_ops(dtype):
            assert reduction(dtype, op) is reduction(dtype, op)
        else:
            with pytest.raises(UnsupportedError, match=rf"{op} of {dtype}.*supports {', '.join(supported_ops(dtype))}"):
                reduction(dtype, op)


def test_ops_of_each_kind() -> None:
    arithmetic_ops = ("sum", "avg", "min", "max", "prod")
    assert supported_ops(torch.float16) == arithmetic_ops
    assert supported_ops(torch.uint16) == (*arithmetic_ops, "band", "bor", "bxor")
    assert supported_ops(torch.bool) == ("sum", "min", "max", "prod", "band", "bor", "bxor")
    assert supported_ops(torch.complex64) == ("sum", "avg")
    assert supported_ops(torch.float8_e4m3fn) == ()


def test_refusals_say_what_was_asked() -> None:
    with pytest.raises(UnsupportedError, match=r"sum of torch.float8_e4m3fn"):
        reduction(torch.float8_e4m3fn, "sum")
    with pytest.raises(ConfigError, match=r"one of sum, .*bxor; got 'mean'"):
        reduction(torch.float32, "mean")
    with pytest.raises(UnsupportedError, match=r"bfloat16.*got torch.int32"):
        row_sum(torch.int32, torch.float32)


def test_float16_needs_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "cpu_features", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(arithmetic.platform, "machine", lambda: "x86_64")
    with pytest.raises(UnsupportedError, match="F16C"):
        reduction.__wrapped__(torch.float16, "sum")
    with pytest.raises(UnsupportedError, match="F16C"):
        row_sum.__wrapped__(torch.float32, torch.float16)


# ---- conversions, by sums of one row


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return sum_rows([x], dtype, length=len(x))


def float32s_near_ties(dtype: torch.dtype) -> torch.Tensor:
    """Every upper half with lower parts at, next to and far from a tie, and bit patterns at random."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF] if dtype is torch.bfloat16 else [0, 0xFFF, 0x1000, 0x1001, 0x3000]
    patterns = torch.cat([*(upper + low for low in lower), torch.randint(1 << 32, (1 << 20,), dtype=torch.int64)])
    return patterns.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_float32_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    x = float32s_near_ties(dtype)
    assert_same(converted(x, dtype), x.to(dtype))
    for length in (1, 7, 31):  # by items instead of vectors
        for part in x[: 1 << 12].split(length):
            assert_same(converted(part, dtype), part.to(dtype))


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_every_16_bit_float_survives(dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    for output in (dtype, torch.float32, torch.float64):
        assert_same(converted(x, output), x.to(output))


def nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64s rounded once, by comparison with the neighbours of a guess; torch rounds to float32 on the way."""
    guess = x.to(dtype)
    bits = guess.view(torch.int16)
    finite = torch.finfo(dtype)
    best, best_distance = guess, torch.full_like(x, torch.inf)
    for change in (-1, 0, 1):
        candidate = (bits + change).to(torch.int16)
        value = candidate.view(dtype).double()
        distance = (value.clamp(finite.min, finite.max) - x).abs()
        even = candidate & 1 == 0
        better = value.isfinite() & ((distance < best_distance) | ((distance == best_distance) & even))
        best = torch.where(better, candidate.view(dtype), best)
        best_distance = torch.where(better, distance, best_distance)
    return best


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_float64_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    edge = torch.finfo(dtype)
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).double()
    numbers = numbers[numbers.isfinite() & (numbers.abs() < edge.max)]
    above = torch.nextafter(numbers.to(dtype), torch.tensor(torch.inf, dtype=dtype)).double()
    ties = (numbers + above) / 2
    hair = ties.abs() * 2.0**-40  # less than a float32 can tell from the tie
    x = torch.cat([ties, ties + hair, ties - hair, torch.randn(100_000, dtype=torch.float64) * 50])
    x = x[x.abs() < edge.max]
    assert not torch.equal(x.to(dtype), nearest(x, dtype))  # the cases where a second rounding shows are there
    assert_same(converted(x, dtype), nearest(x, dtype))
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300, -1e300, 1e-300, -1e-300, 0.0, -0.0]).double()
    special = torch.cat([special, torch.tensor([1e300, -1e300, 1e-300, -1e-300], dtype=torch.float64)]).repeat(11)
    assert_same(converted(special, dtype), special.to(dtype))


# ---- row sums


def weighted_sum(sources: Sequence[torch.Tensor], weights: torch.Tensor | None, length: int) -> torch.Tensor:
    """In float32 (float64 for float64), one rounding per addition; the weights must be powers of two."""
    wide = torch.float64 if sources and sources[0].dtype is torch.float64 else torch.float32
    factors = torch.ones(len(sources)) if weights is None else weights
    products = [source.to(wide) * factor.to(wide) for source, factor in zip(sources, factors)]
    return functools.reduce(torch.add, products) if products else torch.zeros(length)


@pytest.mark.parametrize("input_dtype", ROW_SUM_DTYPES, ids=str)
@pytest.mark.parametrize("output_dtype", ROW_SUM_DTYPES, ids=str)
def test_row_sum_is_the_definition(input_dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    for length in (0, 1, 31, 32, 33, 127, 256, 257, 1000):
        for num_sources in (0, 1, 2, 3, 8, 9, 300):
            sources = [torch.randn(length).to(input_dtype) for _ in range(num_sources)]
            weights = 2.0 ** torch.randint(-3, 4, (num_sources + 1,))[:num_sources]
            run = functools.partial(sum_rows, sources, output_dtype, length=length, input_dtype=input_dtype)
            for factors in (None, weights):
                wanted = weighted_sum(sources, factors, length)
                # a float64 sum is kept to be rounded once
                once = nearest if wanted.dtype is torch.float64 and output_dtype in SIXTEEN_BITS else torch.Tensor.to
                wanted = once(wanted, output_dtype)
                assert_same(run(weights=factors), wanted)
                assert_same(run(weights=factors, misaligned=2 * length % 64, streaming=1), wanted)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from(ROW_SUM_DTYPES),
    num_sources=st.integers(1, 40),
    length=st.integers(1, 3000),
    misaligned=st.integers(0, 63),
    streaming=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_row_sum_with_any_weights_is_within_the_bound(
    dtype: torch.dtype, num_sources: int, length: int, misaligned: int, streaming: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(length, generator=generator).to(dtype) for _ in range(num_sources)]
    weights = torch.randn(num_sources, generator=generator)
    got = sum_rows(
        sources, dtype, length=length, weights=weights, misaligned=misaligned, streaming=int(streaming)
    ).double()
    terms = torch.stack(sources).double() * weights.double()[:, None]
    accumulator = torch.float64 if dtype is torch.float64 else torch.float32
    # each step's rounding, the last one's, and what this oracle's own sum loses
    steps = (num_sources + 1) * (torch.finfo(accumulator).eps + torch.finfo(torch.float64).eps)
    exact, size = terms.sum(0), terms.abs().sum(0)
    smallest = torch.finfo(dtype).smallest_normal
    bound = steps * size + torch.finfo(dtype).eps * (exact.abs() + steps * size) / 2 + smallest * torch.finfo(dtype).eps
    assert bool(((got - exact).abs() <= bound).all())


def test_products_are_fused_into_the_sum() -> None:
    factor = 1 + 2.0**-12
    rows = [torch.full((100,), -1.0), torch.full((100,), factor)]
    got = sum_rows(rows, torch.float32, length=100, weights=torch.tensor([factor * factor, factor]))
    rounded = float(torch.tensor(factor * factor))  # what the first weight is
    assert torch.equal(got, torch.full((100,), factor * factor - rounded))


def test_one_row_with_weight_one_is_a_copy() -> None:
    x = some(torch.bfloat16, 1001, seed=5)
    assert_same(sum_rows([x], torch.bfloat16, length=1001), x)
    assert_same(sum_rows([x], torch.bfloat16, length=1001, weights=torch.ones(1)), x)


@pytest.mark.parametrize("length", [0, 1, 50, 1000, 7168])
def test_streaming_fetches_the_next_rows_ahead(length: int) -> None:
    """The address of the next call's sources changes nothing that can be seen, even where they aren't memory."""
    for num_sources in (1, 2, 8, 100):
        sources = [torch.randn(length).to(torch.bfloat16) for _ in range(num_sources)]
        following = [sources[k].data_ptr() if k % 2 else 8 * k for k in range(num_sources)]
        table = np.array(following, dtype=np.int64)
        got = sum_rows(sources, torch.bfloat16, length=length, streaming=table.ctypes.data)
        assert_same(got, sum_rows(sources, torch.bfloat16, length=length))
