"""Combine by rank, before anything travels back: the weighted sum of each token's rows on this rank.

The weights are the token's rank's: it pushes them to the arrivals of whoever has the rows. The sum is in slot order, in
float32 (float64 for float64), and rounded once to the dtype of y; or quantised, as float32.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import device, rounded, widened
from epcomm.device.gpu.memory import load32, load_float, store_float, word
from epcomm.kernels.gpu.counts import base_of
from epcomm.kernels.gpu.quantized_sums import sum_quantized
from epcomm.kernels.gpu.row_sum import TILE_BYTES, load_elements, store_elements
from epcomm.kernels.gpu.rows import arrivals_of, departing_row, departures, place, slot_weight
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def share_weights(ctx, state, routing, weights, share, shares, NETWORK: tl.constexpr):
    """Pushes the weights of every n-th token to the ranks that have its rows, or for other nodes to the departures."""
    topk = word(routing, protocol.TOPK)
    for token in range(share, word(routing, protocol.NUM_TOKENS), shares):
        for k in range(word(ctx, control.SIZE)):
            rank, row = place(ctx, state, routing, token, k, True)
            if rank >= 0:
                factors = arrivals_of(state, rank) + word(state, protocol.ARRIVED_FACTOR) + 4 * row * topk
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        departing = departing_row(ctx, state, routing, token, k, True)
                        factors = departures(ctx, state) + word(state, protocol.DEPARTING + protocol.R_FACTOR)
                        factors += 4 * departing * topk
                for slot in range(topk):  # those of other ranks' experts aren't read
                    store_float(factors + 4 * slot, slot_weight(routing, weights, token, slot))


@device
def _sum_row(state, routing, tensor, row, factors, out, has_weights, IN: tl.constexpr, WIDE: tl.constexpr):
    ACC: tl.constexpr = tl.float64 if IN == tl.float64 else tl.float32
    TILE: tl.constexpr = TILE_BYTES // IN.itemsize
    topk, elements = word(routing, protocol.TOPK), word(tensor, protocol.T_ELEMENTS)
    start = tl.cast(0, tl.int64)
    while start < elements:
        total = tl.zeros((TILE,), ACC)
        for slot in range(topk):
            there = load32(word(routing, protocol.PLACES) + 4 * (row * topk + slot)).to(tl.int64)
            if there >= 0:
                source = word(tensor, protocol.T_ADDRESS) + there * word(tensor, protocol.T_STRIDE)
                values = widened(load_elements(source, start, elements, IN, WIDE, TILE), ACC)
                if has_weights:
                    factor = load_float(factors + 4 * (row * topk + slot))
                    total = tl.fma(values, tl.full((TILE,), factor, ACC), total)
                else:
                    total += values
        store_elements(out, start, elements, rounded(total, IN), WIDE, TILE)
        start += TILE


@device
def sum_on_this_rank(ctx, args, state, routing, tensors, block, share, shares, IN: tl.constexpr,
                     SCALES: tl.constexpr):  # fmt: skip
    """Puts the sums of every n-th row that arrived into the output block."""
    factors = arrivals_of(state, word(ctx, control.RANK)) + word(state, protocol.ARRIVED_FACTOR)
    has_weights = word(args, protocol.HAS_WEIGHTS) != 0
    for row in range(share, word(routing, protocol.NUM_ARRIVED), shares):
        for i in tl.static_range(len(IN)):
            tensor = tensors + 8 * protocol.TENSOR_WORDS * i
            row_bytes = word(tensor, protocol.T_ROW_BYTES)
            out = block + word(tensor, protocol.T_OFFSET) + row * row_bytes
            if SCALES is not None:
                sum_quantized(routing, tensor, row, factors, out, has_weights, IN[i], SCALES)
            elif ((word(tensor, protocol.T_ADDRESS) | word(tensor, protocol.T_STRIDE) | row_bytes) & 15) == 0:
                _sum_row(state, routing, tensor, row, factors, out, has_weights, IN[i], True)
            else:
                _sum_row(state, routing, tensor, row, factors, out, has_weights, IN[i], False)
