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
from epcomm.kernels.protocol.arithmetic import canonical_reduction, partial_dtype

TILE_BYTES = tl.constexpr(8192)  # 16-bit floats take twice as much in registers; twice of that was spilled
ITEM_TILE_ITEMS, BYTE_TILE_ITEMS = tl.constexpr(1024), tl.constexpr(256)


def reduction_constants(dtype: torch.dtype, op: str) -> dict[str, Any]:
    """The constants of a kernel that reduces."""
    dtype, op = canonical_reduction(dtype, op)
    return {"DTYPE": triton_dtype(dtype), "OP": op}


def partial_constants(dtype: torch.dtype, op: str, are_inputs: bool) -> dict[str, Any]:
    """Those of a kernel that reduces in two steps: DTYPE is (the inputs' and the result's, that of partial results).

    `are_inputs`: each partial result is one input, and nothing is rounded in between.
    """
    dtype, op = canonical_reduction(dtype, op)
    return {"DTYPE": (triton_dtype(dtype), triton_dtype(dtype if are_inputs else partial_dtype(dtype, op))), "OP": op}


@device
def reduce(ctx, to, own, staged, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Reduces all ranks' inputs into the array at `to`; whoever calls it has waited for the peers.

    This rank's input is at `own`, which may be `to`; a peer's at the offset `staged` of its control segment. All have
    `num_bytes`, a multiple of the item size, and any alignment.
    """
    num_items = num_bytes // (DTYPE.primitive_bitwidth // 8)
    _reduce(to, ctx, 0, own, staged, to | own | staged, num_items, 0, DTYPE, DTYPE, OP, False)


@device
def reduce_listed(to, sources, num_sources, num_items, divisor,
                  SOURCE: tl.constexpr, TARGET: tl.constexpr, OP: tl.constexpr):  # fmt: skip
    """The same of the arrays, of `num_items` of SOURCE, whose addresses are the words at `sources`, in their order.

    The result is in TARGET. ``avg`` divides by `divisor`. The program's threads have passed a barrier since the words
    were written, and pass one before they are written again.
    """
    addresses = to
    for index in range(num_sources):
        addresses = addresses | word(sources, index)
    _reduce(to, sources, num_sources, to, to, addresses, num_items, divisor, SOURCE, TARGET, OP, True)


@device
def reduce_two(to, first, second, num_items, divisor, is_first_partial, is_second_partial, is_partial,
               DTYPE: tl.constexpr, OP: tl.constexpr):  # fmt: skip
    """Two arrays into one. Each of the three is of 16-bit floats, DTYPE, at any address, or partial: of float32, at a
    multiple of 16. ``avg`` divides what isn't partial by `divisor`.
    """
    addresses, num_wide = to | first | second, tl.cast(0, tl.int64)
    if addresses & 15 == 0:
        num_wide = num_items // 8 * 8
    _reduce_two_tiles(to, first, second, 0, num_wide, divisor, is_first_partial, is_second_partial, is_partial,
                      DTYPE, OP, WIDE, WIDE, TILE_BYTES // 4)  # fmt: skip
    if addresses & 1 == 0:
        _reduce_two_tiles(to, first, second, num_wide, num_items, divisor, is_first_partial, is_second_partial,
                          is_partial, DTYPE, OP, 2, 4, ITEM_TILE_ITEMS)  # fmt: skip
    else:
        _reduce_two_tiles(to, first, second, num_wide, num_items, divisor, is_first_partial, is_second_partial,
                          is_partial, DTYPE, OP, 1, 4, BYTE_TILE_ITEMS)  # fmt: skip


@device
def _reduce_two_tiles(to, first, second, start, end, divisor, is_first_partial, is_second_partial, is_partial,
                      DTYPE: tl.constexpr, OP: tl.constexpr, ACCESS: tl.constexpr, PARTIAL_ACCESS: tl.constexpr,
                      TILE: tl.constexpr):  # fmt: skip
    """Items [start, end) of the same."""
    at = tl.cast(start, tl.int64)
    while at < end:
        num_items = tl.minimum(end - at, TILE)
        total = _load_either(first, at, num_items, is_first_partial, DTYPE, ACCESS, PARTIAL_ACCESS, TILE)
        other = _load_either(second, at, num_items, is_second_partial, DTYPE, ACCESS, PARTIAL_ACCESS, TILE)
        total = _combine(total, other, OP)
        if is_partial:
            store_items(to + at * 4, total, num_items, tl.float32, PARTIAL_ACCESS, TILE)
        else:
            if OP == "avg":
                total = _divide(total, divisor)
            store_items(to + at * 2, total, num_items, DTYPE, ACCESS, TILE)
        at += TILE


@device
def _load_either(address, at, num_items, is_partial, DTYPE: tl.constexpr, ACCESS: tl.constexpr,
                 PARTIAL_ACCESS: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    if is_partial:
        items = load_items(address + at * 4, num_items, tl.float32, PARTIAL_ACCESS, TILE)
    else:
        items = load_items(address + at * 2, num_items, DTYPE, ACCESS, TILE)
    return items


@device
def _reduce(to, sources, num_sources, own, staged, addresses, num_items, divisor,
            SOURCE: tl.constexpr, TARGET: tl.constexpr, OP: tl.constexpr, LISTED: tl.constexpr):  # fmt: skip
    """A reduction of arrays that `_source` finds; `addresses` are the bits in any of their addresses, and of `to`."""
    IN: tl.constexpr = SOURCE.primitive_bitwidth // 8
    OUT: tl.constexpr = TARGET.primitive_bitwidth // 8
    SMALLER: tl.constexpr = IN if IN < OUT else OUT
    LARGER: tl.constexpr = OUT if IN < OUT else IN
    num_wide = tl.cast(0, tl.int64)
    if addresses & 15 == 0:
        num_wide = num_items // (16 // SMALLER) * (16 // SMALLER)
    _reduce_tiles(to, sources, num_sources, own, staged, 0, num_wide, divisor,
                  SOURCE, TARGET, OP, LISTED, WIDE, WIDE, TILE_BYTES // IN)  # fmt: skip
    if addresses & (LARGER - 1) == 0:
        _reduce_tiles(to, sources, num_sources, own, staged, num_wide, num_items, divisor,
                      SOURCE, TARGET, OP, LISTED, IN, OUT, ITEM_TILE_ITEMS)  # fmt: skip
    else:
        _reduce_tiles(to, sources, num_sources, own, staged, num_wide, num_items, divisor,
                      SOURCE, TARGET, OP, LISTED, 1, 1, BYTE_TILE_ITEMS)  # fmt: skip


@device
def _reduce_tiles(to, sources, num_sources, own, staged, start, end, divisor,
                  SOURCE: tl.constexpr, TARGET: tl.constexpr, OP: tl.constexpr, LISTED: tl.constexpr,
                  LOADS: tl.constexpr, STORES: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Items [start, end) of a reduction."""
    IN: tl.constexpr = SOURCE.primitive_bitwidth // 8
    OUT: tl.constexpr = TARGET.primitive_bitwidth // 8
    if not LISTED:  # read here: held from before the other branches they would be spilled
        num_sources = word(sources, control.SIZE)
        divisor = num_sources
    at = tl.cast(start, tl.int64)
    while at < end:
        num_items = tl.minimum(end - at, TILE)
        total = load_items(_source(sources, 0, own, staged, LISTED) + at * IN, num_items, SOURCE, LOADS, TILE)
        for index in range(1, num_sources):
            source = _source(sources, index, own, staged, LISTED) + at * IN
            total = _combine(total, load_items(source, num_items, SOURCE, LOADS, TILE), OP)
        if OP == "avg":
            total = _divide(total, divisor)
        store_items(to + at * OUT, total, num_items, TARGET, STORES, TILE)
        at += TILE


@device
def _source(sources, index, own, staged, LISTED: tl.constexpr):
    """Address of an array: listed; else, `sources` being the context, a rank's input, of which its own isn't staged."""
    if LISTED:
        address = word(sources, index)
    else:
        address = peer(sources, index) + staged
        if index == word(sources, control.RANK):
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
