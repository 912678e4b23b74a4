"""The weighted sum of a token's rows, which other ranks' experts left in their output blocks.

The same arithmetic as on the CPU target: products added in the order of places, in float32 (float64 for float64), the
bias last, rounded once.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device, rounded, widened
from epcomm.device.gpu.memory import load_float, word
from epcomm.kernels.gpu.counts import base_of
from epcomm.kernels.gpu.rows import departing_row, output_block, place, returns, slot_weight
from epcomm.kernels.protocol import expert_parallel as protocol

# Of a row: its sum, in float32, is held in registers. Each of 256 threads has at least 16 bytes of the result, too.
TILE_BYTES = tl.constexpr(8192)


@device
def load_elements(address, start, num_elements, DTYPE: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Elements [start, start + TILE) of a row; WIDE: in 16-byte accesses, address and length are multiples of that."""
    pointer, at = address.to(tl.pointer_type(DTYPE)), start + tl.arange(0, TILE)
    if WIDE:
        return tl.load(tl.multiple_of(pointer, 16) + at, mask=at < _whole(num_elements, DTYPE), other=0)
    else:
        return tl.load(pointer + at, mask=at < num_elements, other=0)


@device
def store_elements(address, start, num_elements, values, WIDE: tl.constexpr, TILE: tl.constexpr):
    """The counterpart of `load_elements`."""
    pointer, at = address.to(tl.pointer_type(values.dtype)), start + tl.arange(0, TILE)
    if WIDE:
        tl.store(tl.multiple_of(pointer, 16) + at, values, mask=at < _whole(num_elements, values.dtype))
    else:
        tl.store(pointer + at, values, mask=at < num_elements)


@device
def _whole(num_elements, DTYPE: tl.constexpr):
    """`num_elements`, which fill 16-byte vectors, so that Triton knows it. (It forgets `multiple_of` an argument.)"""
    VECTOR: tl.constexpr = 16 // DTYPE.itemsize
    return num_elements // VECTOR * VECTOR


@device
def sum_token(ctx, state, routing, weights, tensor, token, places, by_rank, epoch,
              IN: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """out[token] = the weighted sum of the token's rows of one tensor, and its bias."""
    ACC: tl.constexpr = tl.float64 if IN == tl.float64 else tl.float32
    TILE: tl.constexpr = TILE_BYTES // (IN.itemsize if IN.itemsize <= 2 * OUT.itemsize else 2 * OUT.itemsize)
    elements, offset = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_OFFSET)
    row_bytes, bias = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_BIAS)
    out = word(tensor, protocol.T_OUT) + token * word(tensor, protocol.T_OUT_STRIDE)
    start = tl.cast(0, tl.int64)
    while start < elements:
        total = tl.zeros((TILE,), ACC)
        for k in range(places):
            rank, row = place(ctx, state, routing, token, k, by_rank)
            if rank >= 0:
                source = output_block(ctx, state, rank, epoch) + offset + row * row_bytes
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        returned = departing_row(ctx, state, routing, token, k, by_rank)
                        source = returns(ctx, state) + word(tensor, protocol.T_RETURN) + returned * row_bytes
                values = widened(load_elements(source, start, elements, IN, WIDE, TILE), ACC)
                if weights != 0:
                    total = tl.fma(values, tl.full((TILE,), slot_weight(routing, weights, token, k), ACC), total)
                else:
                    total += values
        if bias != 0:
            addend = bias + token * word(tensor, protocol.T_BIAS_STRIDE)
            total += widened(load_elements(addend, start, elements, IN, WIDE, TILE), ACC)
        store_elements(out, start, elements, rounded(total, OUT), WIDE, TILE)
        start += TILE


@device
def write_slots(ctx, state, routing, weights, tensor, token, places, epoch,
                IN: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """out[token, slot] = the slot's row of one tensor, times its weight; zeros for a slot without expert."""
    ACC: tl.constexpr = tl.float64 if IN == tl.float64 else tl.float32
    TILE: tl.constexpr = TILE_BYTES // (IN.itemsize if IN.itemsize <= 2 * OUT.itemsize else 2 * OUT.itemsize)
    elements, offset = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_OFFSET)
    row_bytes = word(tensor, protocol.T_ROW_BYTES)
    for slot in range(places):
        at = token * places + slot
        out = word(tensor, protocol.T_OUT) + at * word(tensor, protocol.T_OUT_STRIDE)
        expert = tl.load((word(routing, protocol.EXPERT) + 4 * at).to(tl.pointer_type(tl.int32))).to(tl.int64)
        first = tl.where(expert < -1, -2 - expert, slot)  # the slot that first named the same expert
        rank, row = place(ctx, state, routing, token, first, False)
        start = tl.cast(0, tl.int64)
        while start < elements:
            values = tl.zeros((TILE,), ACC)
            if rank >= 0:
                source = output_block(ctx, state, rank, epoch) + offset + row * row_bytes
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        returned = departing_row(ctx, state, routing, token, first, False)
                        source = returns(ctx, state) + word(tensor, protocol.T_RETURN) + returned * row_bytes
                values = widened(load_elements(source, start, elements, IN, WIDE, TILE), ACC)
                if weights != 0:
                    values *= load_float(weights + 4 * at).to(ACC)
            store_elements(out, start, elements, rounded(values, OUT), WIDE, TILE)
            start += TILE
