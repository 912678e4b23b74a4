"""Inputs of collectives that tell ranks, elements and calls apart, and what each collective makes of them.

Every rank can make every rank's input, so each checks its own result. Reductions are done in float64 or in integers on
values for which the exact result is representable before its last rounding; so results are compared bit by bit.
"""

from __future__ import annotations

import functools
import operator

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ARITHMETIC = ("sum", "avg", "min", "max", "prod")
BITWISE = ("band", "bor", "bxor")

#: Representative (dtype, op) pairs: every op, every dtype, the wrapping ones included.
REDUCTIONS = (
    [(torch.float32, op) for op in ARITHMETIC]
    + [(torch.bfloat16, op) for op in ("sum", "avg", "max")]
    + [(torch.float16, "sum"), (torch.float64, "sum"), (torch.float64, "prod")]
    + [(torch.int64, op) for op in ARITHMETIC + BITWISE]
    + [(torch.int8, op) for op in ("sum", "avg", "prod", "min")]
    + [(dtype, "sum") for dtype in (torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64)]
    + [(torch.uint8, "max"), (torch.int32, "bxor")]
    + [(torch.bool, op) for op in ("sum", "prod", "bxor")]
    + [(torch.complex64, "sum"), (torch.complex64, "avg"), (torch.complex128, "sum")]
)

#: Dtypes of 1, 2, 4, 8 and 16 bytes, some of which can only be moved.
MOVED = (torch.float32, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex128, torch.uint16)

_SIGNED_VALUES = {"prod": (1, 2, -1, 3)}
_UNSIGNED_VALUES = {"prod": (1, 2, 3, 5)}


def _raw(rank: int, shape: tuple[int, ...], call: int) -> torch.Tensor:
    """Pseudo-random int64 from 0 to 2**31, different for each rank, element and call."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    mixed = (index * 2654435761 + rank * 40503 + call * 69069 + 12345) & 0xFFFFFFFF
    return ((mixed * 1103515245 + (mixed >> 7)) & 0x7FFFFFFF).reshape(shape)


def addend(rank: int, shape: tuple[int, ...], dtype: torch.dtype, op: str, call: int, world: int) -> torch.Tensor:
    """One rank's input of a reduction."""
    raw = _raw(rank, shape, call) >> 8
    if dtype is torch.bool:
        return (raw % 3 == 0) if op in ("sum", "max", "bor", "bxor") else (raw % 3 != 0)
    if dtype.is_complex:
        parts = [addend(rank, shape, torch.float64, op, call + part, world) for part in (0, 1)]
        return torch.complex(*parts).to(dtype)
    signed = dtype.is_floating_point or dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
    choices = (_SIGNED_VALUES if signed else _UNSIGNED_VALUES).get(op)
    if choices is not None:
        values = torch.tensor(choices)[raw % len(choices)]
    elif op == "avg" and not dtype.is_floating_point:  # the sum of 7 must not wrap in 8 bits
        values = raw % 35 - (17 if signed else 0)
    elif op in ("min", "max") and not signed:
        values = raw % 201
    else:
        values = raw % 201 - 100
        if op == "avg":
            values = values * world  # so that the quotient is exact
    return values.to(dtype)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of all ranks' inputs, rounded once."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        how = {"sum": operator.or_, "max": operator.or_, "bor": operator.or_, "bxor": operator.xor}
        return functools.reduce(how.get(op, operator.and_), inputs)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stacked = torch.stack([x.to(wide) for x in inputs])
    if op == "sum":
        result = stacked.sum(0)
    elif op == "avg":
        result = stacked.sum(0)
        result = result / len(inputs) if wide is not torch.int64 else result.div(len(inputs), rounding_mode="trunc")
    elif op in ("min", "max"):
        result = stacked.amin(0) if op == "min" else stacked.amax(0)
    elif op == "prod":
        result = stacked.prod(0)
    else:
        how = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}
        result = functools.reduce(how[op], stacked.unbind(0))
    return result.to(dtype)


def payload(rank: int, shape: tuple[int, ...], dtype: torch.dtype, call: int) -> torch.Tensor:
    """Bytes that are only to be moved."""
    if dtype is torch.bool:
        return _raw(rank, shape, call) >> 8 & 1 == 1
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return (_raw(rank, (num_bytes,), call) >> 8).to(torch.uint8).view(dtype).reshape(shape)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory with gaps."""
    spread = torch.zeros((*x.shape, 2), dtype=torch.uint8 if x.element_size() == 1 else x.dtype)
    if x.element_size() == 1:
        spread = spread.view(x.dtype)
    spread[..., 0] = x
    return spread[..., 0]


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values from an address one item past the start of an allocation."""
    memory = torch.empty((x.numel() + 1) * x.element_size(), dtype=torch.uint8)
    view = memory.view(x.dtype)[1:].view(x.shape)
    return view.copy_(x)


FORMS = {"contiguous": torch.clone, "strided": strided, "unaligned": unaligned}


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """True if shape, dtype and every bit agree."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat = [torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)) for x in (a, b)]
    return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))
