"""Combine with rows that travel as float8 and float32 scales: how they are made, and the weighted sum of a token's.

The same arithmetic as on the CPU target (``kernels/cpu/float8_row_sum.py``): each number is a fused multiply-add of its
code and the product of scale and weight, in the order of places, in float32, rounded once.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device, rounded
from epcomm.device.gpu.memory import load32, load_float, word
from epcomm.kernels.gpu.counts import base_of
from epcomm.kernels.gpu.quantized_rows import (
    BLOCK,
    NARROW_TILE_BLOCKS,
    TILE_BLOCKS,
    columns_of,
    load_blocks,
    quantized,
    store_codes,
    store_scales,
)
from epcomm.kernels.gpu.rows import departing_row, output_block, place, returns, slot_weight
from epcomm.kernels.protocol import expert_parallel as protocol

_SCALES_ALIGNMENT = tl.constexpr(protocol.SCALES_ALIGNMENT)
_NAN_CODE = tl.constexpr(0x7F)
_MORE_BIAS = tl.constexpr(2.0 ** (15 - 7))  # of float16's exponents


@device
def decoded(codes):
    """float32 numbers of float8_e4m3fn codes, as uint8: by way of the float16s whose bits they are a part of."""
    bits = codes.to(tl.int16)
    magnitudes = bits & 0x7F
    halves = (((bits >> 7) << 15) | (magnitudes << 7)).to(tl.float16, bitcast=True)
    return tl.where(magnitudes == _NAN_CODE, float("nan"), halves.to(tl.float32) * _MORE_BIAS)


@device
def _scales_at(elements):
    """Where a row's scales start: see `protocol.quantized_row`."""
    return (elements + _SCALES_ALIGNMENT - 1) // _SCALES_ALIGNMENT * _SCALES_ALIGNMENT


@device
def _store_quantized(row, start, elements, values, SCALES: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Stores columns from `start` on of a quantised row, given as float32 [BLOCKS, 128]."""
    codes, scales = quantized(values, SCALES)
    left = tl.minimum(elements - start, BLOCK * BLOCKS)
    store_codes(row + start, codes, left, WIDE, BLOCKS)
    num_bytes = (left + BLOCK - 1) // BLOCK * 4
    store_scales(row + _scales_at(elements) + start // BLOCK * 4, scales, left, num_bytes, SCALES, BLOCKS)


@device
def _stage_row(source, to, elements, X: tl.constexpr, SCALES: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    start = tl.cast(0, tl.int64)
    while start < elements:
        left = tl.minimum(elements - start, BLOCK * BLOCKS)
        values = load_blocks(source + start * X.itemsize, left, X, WIDE, BLOCKS)
        _store_quantized(to, start, elements, values, SCALES, WIDE, BLOCKS)
        start += BLOCK * BLOCKS


@device
def _reads_wide(tensor):
    """True if the rows that are quantised can be read, and their codes written, in 16-byte accesses."""
    bits = word(tensor, protocol.T_ADDRESS) | word(tensor, protocol.T_STRIDE) | word(tensor, protocol.T_ELEMENTS)
    return (bits & 15) == 0


@device
def stage_quantized(tensor, block, row, X: tl.constexpr, SCALES: tl.constexpr):
    """Puts row `row` of y, of X, into the output block."""
    elements, row_bytes = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_ROW_BYTES)
    source = word(tensor, protocol.T_ADDRESS) + row * word(tensor, protocol.T_STRIDE)
    to = block + word(tensor, protocol.T_OFFSET) + row * row_bytes
    if _reads_wide(tensor):
        _stage_row(source, to, elements, X, SCALES, True, TILE_BLOCKS)
    else:
        _stage_row(source, to, elements, X, SCALES, False, NARROW_TILE_BLOCKS)


@device
def _sum_arrived(routing, tensor, row, factors, out, has_weights, X: tl.constexpr, SCALES: tl.constexpr,
                 WIDE: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    topk, elements = word(routing, protocol.TOPK), word(tensor, protocol.T_ELEMENTS)
    start = tl.cast(0, tl.int64)
    while start < elements:
        left = tl.minimum(elements - start, BLOCK * BLOCKS)
        total = tl.zeros((BLOCKS, BLOCK), tl.float32)
        for slot in range(topk):
            there = load32(word(routing, protocol.PLACES) + 4 * (row * topk + slot)).to(tl.int64)
            if there >= 0:
                source = word(tensor, protocol.T_ADDRESS) + there * word(tensor, protocol.T_STRIDE)
                values = load_blocks(source + start * X.itemsize, left, X, WIDE, BLOCKS)
                if has_weights:
                    factor = load_float(factors + 4 * (row * topk + slot))
                    total = tl.fma(values, tl.full((BLOCKS, BLOCK), factor, tl.float32), total)
                else:
                    total += values
        _store_quantized(out, start, elements, total, SCALES, WIDE, BLOCKS)
        start += BLOCK * BLOCKS


@device
def sum_quantized(routing, tensor, row, factors, out, has_weights, X: tl.constexpr, SCALES: tl.constexpr):
    """Puts the sum of arrived row `row`'s rows on this rank, of X, quantised, where it travels from."""
    if _reads_wide(tensor):
        _sum_arrived(routing, tensor, row, factors, out, has_weights, X, SCALES, True, TILE_BLOCKS)
    else:
        _sum_arrived(routing, tensor, row, factors, out, has_weights, X, SCALES, False, NARROW_TILE_BLOCKS)


@device
def _load_quantized(row, start, elements, weight, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """(codes' numbers, scales times the weight) of columns from `start` on: float32 [BLOCKS, 128] and [BLOCKS, 1]."""
    left = tl.minimum(elements - start, BLOCK * BLOCKS)
    pointer = (row + start).to(tl.pointer_type(tl.uint8))
    if WIDE:
        at, is_inside = columns_of(left, BLOCKS, 16)
        codes = tl.load(tl.multiple_of(pointer, 16) + at, mask=is_inside, other=0)
    else:
        at, is_inside = columns_of(left, BLOCKS, 1)
        codes = tl.load(pointer + at, mask=is_inside, other=0)
    blocks = tl.arange(0, BLOCKS)
    pointer = (row + _scales_at(elements) + start // BLOCK * 4).to(tl.pointer_type(tl.float32))
    scales = tl.load(pointer + blocks, mask=blocks * BLOCK < left, other=0)
    return decoded(codes), (scales * weight)[:, None]


@device
def _store_numbers(out, start, elements, values, OUT: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Stores columns from `start` on of a result."""
    left = tl.minimum(elements - start, BLOCK * BLOCKS)
    pointer = (out + start * OUT.itemsize).to(tl.pointer_type(OUT))
    if WIDE:
        at, is_inside = columns_of(left, BLOCKS, 16)
        tl.store(tl.multiple_of(pointer, 16) + at, rounded(values, OUT), mask=is_inside)
    else:
        at, is_inside = columns_of(left, BLOCKS, 1)
        tl.store(pointer + at, rounded(values, OUT), mask=is_inside)


@device
def _sum_token(ctx, state, routing, weights, tensor, token, places, by_rank, epoch,
               OUT: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr,
               NETWORK: tl.constexpr):  # fmt: skip
    elements, offset = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_OFFSET)
    row_bytes = word(tensor, protocol.T_ROW_BYTES)
    out = word(tensor, protocol.T_OUT) + token * word(tensor, protocol.T_OUT_STRIDE)
    start = tl.cast(0, tl.int64)
    while start < elements:
        total = tl.zeros((BLOCKS, BLOCK), tl.float32)
        for k in range(places):
            rank, row = place(ctx, state, routing, token, k, by_rank)
            if rank >= 0:
                source = output_block(ctx, state, rank, epoch) + offset + row * row_bytes
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        returned = departing_row(ctx, state, routing, token, k, by_rank)
                        source = returns(ctx, state) + word(tensor, protocol.T_RETURN) + returned * row_bytes
                weight = tl.cast(1.0, tl.float32)
                if weights != 0:
                    weight = slot_weight(routing, weights, token, k)
                values, factors = _load_quantized(source, start, elements, weight, WIDE, BLOCKS)
                total = tl.fma(values, tl.broadcast_to(factors, values.shape), total)
        _store_numbers(out, start, elements, total, OUT, WIDE, BLOCKS)
        start += BLOCK * BLOCKS


@device
def _write_slots(ctx, state, routing, weights, tensor, token, places, epoch,
                 OUT: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr,
               NETWORK: tl.constexpr):  # fmt: skip
    elements, offset = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_OFFSET)
    row_bytes = word(tensor, protocol.T_ROW_BYTES)
    for slot in range(places):
        at = token * places + slot
        out = word(tensor, protocol.T_OUT) + at * word(tensor, protocol.T_OUT_STRIDE)
        expert = load32(word(routing, protocol.EXPERT) + 4 * at).to(tl.int64)
        first = tl.where(expert < -1, -2 - expert, slot)  # the slot that first named the same expert
        rank, row = place(ctx, state, routing, token, first, False)
        weight = tl.cast(1.0, tl.float32)
        if weights != 0:
            weight = load_float(weights + 4 * at)
        start = tl.cast(0, tl.int64)
        while start < elements:
            values = tl.zeros((BLOCKS, BLOCK), tl.float32)
            if rank >= 0:
                source = output_block(ctx, state, rank, epoch) + offset + row * row_bytes
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        returned = departing_row(ctx, state, routing, token, first, False)
                        source = returns(ctx, state) + word(tensor, protocol.T_RETURN) + returned * row_bytes
                numbers, factors = _load_quantized(source, start, elements, weight, WIDE, BLOCKS)
                values = numbers * factors
            _store_numbers(out, start, elements, values, OUT, WIDE, BLOCKS)
            start += BLOCK * BLOCKS


@device
def combine_quantized_token(ctx, state, routing, weights, tensor, token, places, by_rank, epoch, reduce,
                            OUT: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr,
                            NETWORK: tl.constexpr):  # fmt: skip
    """out[token] = the weighted sum of the token's rows, or out[token, slot] = each, times its weight."""
    if reduce:
        _sum_token(ctx, state, routing, weights, tensor, token, places, by_rank, epoch, OUT, WIDE, BLOCKS, NETWORK)
    else:
        _write_slots(ctx, state, routing, weights, tensor, token, places, epoch, OUT, WIDE, BLOCKS, NETWORK)
