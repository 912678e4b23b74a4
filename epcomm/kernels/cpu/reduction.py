"""The element-wise reduction of several arrays into one, in the order in which they are listed.

One rank's program runs it over memory that other ranks wrote; whoever calls it has waited for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import types

from epcomm.device import control
from epcomm.device.cpu.arithmetic import (
    F64,
    FORMATS,
    Format,
    call_intrinsic,
    is_float,
    size_of,
    splat_like,
    with_element,
)
from epcomm.device.cpu.compile import Kernel, kernel
from epcomm.device.cpu.fold import Fold, make_fold
from epcomm.kernels.protocol.arithmetic import canonical_reduction, has_finish, partial_dtype, sum_of

#: ``int64 f(int64 destination, int64 sources, int64 num_sources, int64 num_bytes, int64 divisor, int64 streaming)``
REDUCTION_SIGNATURE = types.int64(*[types.int64] * 6)

#: Are they partial results: the first array, the second, the result; by these three as bits.
WIDTHS = [(bits & 1 > 0, bits & 2 > 0, bits & 4 > 0) for bits in range(8)]


@functools.cache
def reduction(dtype: torch.dtype, op: str) -> Kernel:
    """The kernel that writes ``op`` over k of ``sources[k][i]`` to ``destination[i]``, in the order of k.

    `sources` is the address of `num_sources` (at least 1) addresses. All arrays have `num_bytes`, a multiple of the
    item size, and any alignment; the destination may be one of the sources. With `streaming` the stores bypass the
    caches, and the caller fences before it signals.

    16-bit floats are computed in float32 and rounded once, to nearest even. ``min`` and ``max`` of a NaN are NaN,
    integers wrap, and ``avg`` is the sum divided by `divisor`, truncated toward zero for integers. For bool,
    ``sum`` and ``max`` are or, ``prod`` and ``min`` are and. Complex numbers are reduced by components.
    """
    return _compile(dtype, op, False, False, False)


def partial_reduction(dtype: torch.dtype, op: str) -> Kernel:
    """The first step of a reduction in two: of some ranks' inputs, in `partial_dtype`. `num_bytes` are an input's."""
    return _compile(dtype, sum_of(op), False, False, True)


def final_reduction(dtype: torch.dtype, op: str) -> Kernel:
    """The second step: of partial results, which it rounds, if at all, as `reduction`. `num_bytes` are the result's."""
    return _compile(dtype, op, True, True, False)


def reduction_of_two(dtype: torch.dtype, op: str, first: bool, second: bool, result: bool) -> Kernel:
    """Of two arrays, each an input or a partial result, to either: a result that isn't partial is rounded and finished.

    `num_bytes` are those of an array that isn't partial.
    """
    return _compile(dtype, sum_of(op) if result else op, first, second, result)


def _compile(dtype: torch.dtype, op: str, first: bool, others: bool, result: bool) -> Kernel:
    """`op` of `dtype`, of arrays each of which is in that dtype or a partial result: the first, all others."""
    canonical, op = canonical_reduction(dtype, op)
    FORMATS[canonical].check_available()
    wide = partial_dtype(canonical, op)
    return _compile_canonical(canonical, op, *(wide if is_wide else canonical for is_wide in (first, others, result)))


@functools.cache
def _compile_canonical(
    dtype: torch.dtype, op: str, first: torch.dtype, others: torch.dtype, result: torch.dtype
) -> Kernel:
    fmt, formats = FORMATS[dtype], [FORMATS[each] for each in (first, others, result)]
    finish = functools.partial(_divide, fmt) if has_finish(op) else None
    widths = "".join("n" if each is dtype else "w" for each in (first, others, result))
    name = f"reduction-{str(dtype).removeprefix('torch.')}-{op}-{widths}"
    fold = make_fold(name, Fold(formats[1], formats[2], _combine(fmt, op), finish, first=formats[0]))
    item_bytes = fmt.item_bytes

    def reduce(destination, sources, num_sources, num_bytes, divisor, streaming):
        fold(destination, sources, 0, divisor, num_sources, num_bytes // item_bytes, streaming)
        return control.OK

    reduce.__qualname__ = name  # as in make_fold
    return kernel(name, REDUCTION_SIGNATURE)(reduce)


def _combine(fmt: Format, op: str) -> Callable[..., Any]:
    sign = "s" if fmt.signed else "u"

    def combine(builder: Any, accumulator: Any, value: Any, weight: Any) -> Any:
        if accumulator is None:
            return value
        real = is_float(value)
        if op in ("sum", "avg"):
            return (builder.fadd if real else builder.add)(accumulator, value)
        if op == "prod":
            return (builder.fmul if real else builder.mul)(accumulator, value)
        if op in ("min", "max"):
            name = f"{op}imum" if real else f"{sign}{op}"  # llvm.minimum: NaN stays, and -0 is less than 0
            return call_intrinsic(builder, name, accumulator, value)
        return {"band": builder.and_, "bor": builder.or_, "bxor": builder.xor}[op](accumulator, value)

    return combine


def _divide(fmt: Format, builder: Any, value: Any, divisor: Any) -> Any:
    """`value / divisor`. An integer of up to 32 bits is divided as a float64, whose quotient truncates exactly."""
    element = fmt.accumulator
    if is_float(value):
        return builder.fdiv(value, splat_like(builder, builder.sitofp(divisor, element), value))
    if size_of(element) == 8:
        return (builder.sdiv if fmt.signed else builder.udiv)(value, splat_like(builder, divisor, value))
    wide = splat_like(builder, builder.sitofp(divisor, F64), value)
    as_float = (builder.sitofp if fmt.signed else builder.uitofp)(value, with_element(value, F64))
    # the quotient fits in 64 signed bits whatever the sign of the format
    quotient = builder.fptosi(builder.fdiv(as_float, wide), with_element(value, ir.IntType(64)))
    return builder.trunc(quotient, value.type)
