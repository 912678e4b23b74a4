"""The element-wise reduction of all ranks' inputs into one array, in rank order: the same bits as on the CPU target.

16-bit floats are computed in float32 and rounded once, to nearest even. ``min`` and ``max`` of a NaN are NaN, and -0 is
less than 0; integers wrap, and their ``avg`` truncates toward zero.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.dtypes import triton_dtype
from epcomm.device.gpu.items import WIDE, load_items, store_items
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import word
from epcomm.device.gpu.waiting import peer
from epcomm.kernels.protocol.arithmetic import canonical_reduction

TILE_BYTES = tl.constexpr(8192)  # 16-bit floats take twice as much in registers; twice of that was spilled
#: values of the constants that stand for no reduction
NO_REDUCTION = {"DTYPE": tl.uint8, "OP": "none"}

ITEM_TILE_ITEMS, BYTE_TILE_ITEMS = tl.constexpr(1024), tl.constexpr(256)


def reduction_constants(dtype: torch.dtype, op: str) -> dict[str, Any]:
    """The constants of a kernel that reduces."""
    dtype, op = canonical_reduction(dtype, op)
    return {"DTYPE": triton_dtype(dtype), "OP": op}


@device
def reduce(ctx, to, own, staged, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Reduces all ranks' inputs into the array at `to`; whoever calls it has waited for the peers.

    This rank's input is at `own`, which may be `to`; a peer's at the offset `staged` of its control segment. All have
    `num_bytes`, a multiple of the item size, and any alignment.
    """
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    addresses = to | own | staged
    wide_bytes = tl.cast(0, tl.int64)
    if addresses & 15 == 0:
        wide_bytes = num_bytes // 16 * 16
    _reduce_tiles(ctx, to, own, staged, 0, wide_bytes, DTYPE, OP, WIDE, TILE_BYTES // ITEM)
    if addresses & (ITEM - 1) == 0:
        _reduce_tiles(ctx, to, own, staged, wide_bytes, num_bytes, DTYPE, OP, ITEM, ITEM_TILE_ITEMS)
    else:
        _reduce_tiles(ctx, to, own, staged, wide_bytes, num_bytes, DTYPE, OP, 1, BYTE_TILE_ITEMS)


@device
def _reduce_tiles(ctx, to, own, staged, start, end,
                  DTYPE: tl.constexpr, OP: tl.constexpr, ACCESS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Bytes [start, end) of a reduction."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    size = word(ctx, control.SIZE)
    at = tl.cast(start, tl.int64)
    while at < end:
        num_items = tl.minimum(end - at, TILE * ITEM) // ITEM
        total = load_items(_source(ctx, 0, own, staged) + at, num_items, DTYPE, ACCESS, TILE)
        for rank in range(1, size):
            source = _source(ctx, rank, own, staged) + at
            total = _combine(total, load_items(source, num_items, DTYPE, ACCESS, TILE), OP)
        if OP == "avg":
            total = _divide(total, size)
        store_items(to + at, total, num_items, DTYPE, ACCESS, TILE)
        at += TILE * ITEM


@device
def reduce_two(to, a, b, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Reduces two arrays at any addresses into a third, which may be one of them; an average is only summed."""
    _apply(to, a, b, num_bytes, 1, DTYPE, OP, False)


@device
def finish(to, num_bytes, size, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Makes the result of a reduction of `size` inputs of what `reduce_two` has accumulated, in place."""
    _apply(to, to, to, num_bytes, size, DTYPE, OP, True)


@device
def _apply(to, a, b, num_bytes, size, DTYPE: tl.constexpr, OP: tl.constexpr, IS_FINISH: tl.constexpr):
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    addresses = to | a | b
    wide_bytes = tl.cast(0, tl.int64)
    if addresses & 15 == 0:
        wide_bytes = num_bytes // 16 * 16
    _apply_tiles(to, a, b, 0, wide_bytes, size, DTYPE, OP, IS_FINISH, WIDE, TILE_BYTES // ITEM)
    if addresses & (ITEM - 1) == 0:
        _apply_tiles(to, a, b, wide_bytes, num_bytes, size, DTYPE, OP, IS_FINISH, ITEM, ITEM_TILE_ITEMS)
    else:
        _apply_tiles(to, a, b, wide_bytes, num_bytes, size, DTYPE, OP, IS_FINISH, 1, BYTE_TILE_ITEMS)


@device
def _apply_tiles(to, a, b, start, end, size, DTYPE: tl.constexpr, OP: tl.constexpr, IS_FINISH: tl.constexpr,
                 ACCESS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Bytes [start, end) of `_apply`."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    at = tl.cast(start, tl.int64)
    while at < end:
        num_items = tl.minimum(end - at, TILE * ITEM) // ITEM
        total = load_items(a + at, num_items, DTYPE, ACCESS, TILE)
        if IS_FINISH:
            total = _divide(total, size)
        else:
            total = _combine(total, load_items(b + at, num_items, DTYPE, ACCESS, TILE), OP)
        store_items(to + at, total, num_items, DTYPE, ACCESS, TILE)
        at += TILE * ITEM


@device
def _source(ctx, rank, own, staged):
    """Address of a rank's input: this rank's own isn't staged."""
    address = peer(ctx, rank) + staged
    if rank == word(ctx, control.RANK):
        address = own
    return address


@device
def _combine(a, b, OP: tl.constexpr):
    if OP == "sum" or OP == "avg":
        return a + b
    elif OP == "prod":
        return a * b
    elif OP == "band":
        return a & b
    elif OP == "bor":
        return a | b
    elif OP == "bxor":
        return a ^ b
    elif a.dtype.is_floating():
        return _extreme(a, b, OP)
    elif OP == "min":
        return tl.minimum(a, b)
    else:
        return tl.maximum(a, b)


@device
def _extreme(a, b, OP: tl.constexpr):
    """The minimum or maximum of floats. (Those of Triton's interpreter don't order zeros.)"""
    BITS: tl.constexpr = tl.int64 if a.dtype == tl.float64 else tl.int32
    a_bits, b_bits = a.to(BITS, bitcast=True), b.to(BITS, bitcast=True)
    if OP == "min":
        chosen, equal = tl.where((a < b) | (a != a), a, b), a_bits | b_bits
    else:
        chosen, equal = tl.where((a > b) | (a != a), a, b), a_bits & b_bits
    return tl.where(a == b, equal.to(a.dtype, bitcast=True), chosen)  # only zeros are equal and differ


@device
def _divide(total, size):
    """`total / size`, correctly rounded; of integers truncated toward zero."""
    if total.dtype == tl.float64:
        return total / size.to(tl.float64)
    elif total.dtype == tl.float32:
        return tl.div_rn(total, size.to(tl.float32))
    else:
        # as magnitudes: Triton's interpreter and its compiler divide negative numbers differently
        SIGNED: tl.constexpr = tl.int64 if total.dtype.primitive_bitwidth == 64 else tl.int32
        UNSIGNED: tl.constexpr = tl.uint64 if total.dtype.primitive_bitwidth == 64 else tl.uint32
        if total.dtype.is_int_unsigned():
            return (total.to(UNSIGNED) // size.to(UNSIGNED)).to(total.dtype)
        else:
            number = total.to(SIGNED)
            magnitude = tl.where(number < 0, 0 - number, number).to(UNSIGNED)
            quotient = (magnitude // size.to(UNSIGNED)).to(SIGNED)
            return tl.where(number < 0, 0 - quotient, quotient).to(total.dtype)
