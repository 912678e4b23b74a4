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
from epcomm.errors import ConfigError, UnsupportedError

OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
_ARITHMETIC = ("sum", "avg", "min", "max", "prod")
_BITWISE = ("band", "bor", "bxor")

#: ``int64 f(int64 destination, int64 sources, int64 num_sources, int64 num_bytes, int64 streaming)``
REDUCTION_SIGNATURE = types.int64(*[types.int64] * 5)

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_AS_UNSIGNED = dict(zip(_SIGNED, _UNSIGNED, strict=True))
_BOOL_OPS = {"sum": "bor", "max": "bor", "bor": "bor", "prod": "band", "min": "band", "band": "band", "bxor": "bxor"}


def supported_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that exist for a dtype; none for a dtype that can only be moved."""
    if dtype in _FLOATS:
        return _ARITHMETIC
    if dtype in _SIGNED or dtype in _UNSIGNED:
        return _ARITHMETIC + _BITWISE
    if dtype is torch.bool:
        return tuple(op for op in OPS if op in _BOOL_OPS)
    return ("sum", "avg") if dtype in _COMPLEX else ()


@functools.cache
def reduction(dtype: torch.dtype, op: str) -> Kernel:
    """The kernel that writes ``op`` over k of ``sources[k][i]`` to ``destination[i]``, in the order of k.

    `sources` is the address of `num_sources` (at least 1) addresses. All arrays have `num_bytes`, a multiple of the
    item size, and any alignment; the destination may be one of the sources. With `streaming` the stores bypass the
    caches, and the caller fences before it signals.

    16-bit floats are computed in float32 and rounded once, to nearest even. ``min`` and ``max`` of a NaN are NaN,
    integers wrap, and ``avg`` is the sum divided by `num_sources`, truncated toward zero for integers. For bool,
    ``sum`` and ``max`` are or, ``prod`` and ``min`` are and. Complex numbers are reduced by components.
    """
    if op not in OPS:
        raise ConfigError(f"reduction op must be one of {', '.join(OPS)}; got {op!r}")
    if op not in supported_ops(dtype):
        wanted = ", ".join(supported_ops(dtype)) or "no reductions, only operations that move data"
        raise UnsupportedError(f"{op} of {dtype} is not supported; {dtype} supports {wanted}")
    canonical = _same_bits(dtype, op)
    return _compile(*canonical) if canonical == (dtype, op) else reduction(*canonical)


def _same_bits(dtype: torch.dtype, op: str) -> tuple[torch.dtype, str]:
    """The dtype and op whose kernel serves this one, since the bits are the same."""
    if dtype in _COMPLEX:
        return _COMPLEX[dtype], op
    if dtype is torch.bool:
        return torch.uint8, _BOOL_OPS[op]
    if dtype in _AS_UNSIGNED and op not in ("avg", "min", "max"):
        return _AS_UNSIGNED[dtype], op
    return dtype, op


def _compile(dtype: torch.dtype, op: str) -> Kernel:
    fmt = FORMATS[dtype]
    fmt.check_available()
    finish = functools.partial(_divide, fmt) if op == "avg" else None
    name = f"reduction-{str(dtype).removeprefix('torch.')}-{op}"
    fold = make_fold(name, Fold(fmt, fmt, _combine(fmt, op), finish))
    item_bytes = fmt.item_bytes

    def reduce(destination, sources, num_sources, num_bytes, streaming):
        fold(destination, sources, 0, num_sources, num_bytes // item_bytes, streaming)
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


def _divide(fmt: Format, builder: Any, value: Any, num_sources: Any) -> Any:
    """`value / num_sources`. An integer of up to 32 bits is divided as a float64, whose quotient truncates exactly."""
    element = fmt.accumulator
    if is_float(value):
        return builder.fdiv(value, splat_like(builder, builder.sitofp(num_sources, element), value))
    if size_of(element) == 8:
        return (builder.sdiv if fmt.signed else builder.udiv)(value, splat_like(builder, num_sources, value))
    divisor = splat_like(builder, builder.sitofp(num_sources, F64), value)
    as_float = (builder.sitofp if fmt.signed else builder.uitofp)(value, with_element(value, F64))
    # the quotient fits in 64 signed bits whatever the sign of the format
    quotient = builder.fptosi(builder.fdiv(as_float, divisor), with_element(value, ir.IntType(64)))
    return builder.trunc(quotient, value.type)
