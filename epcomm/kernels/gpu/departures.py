"""Rows for ranks on other nodes: how they get from the departures, where they were packed, to where they belong.

Rows of a rank, and among them those of an expert, are consecutive where they are packed and where they arrive: each
such run is one put per tensor, and one per region that describes rows. One program does all puts of a launch.

Edges
  WAR  departures of dispatch e - 1 arrived at a peer before it granted a block for e, which this rank waited for; the
       weights among them arrived before the peer raised READY of combine e - 1, which this rank waited for.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import load32, word
from epcomm.device.gpu.network import start_put
from epcomm.kernels.gpu.rows import destination
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def kept_rows(state, row, num_rows):
    """How many of a block's rows from `row` on are below the limit of a handle that drops the others."""
    kept = num_rows
    if word(state, protocol.LAYOUT) != protocol.PADDED:
        kept = tl.maximum(tl.minimum(num_rows, word(state, protocol.ROW_LIMIT) - row), 0)
    return kept


@device
def _put_region(ctx, state, rank, to, region, regions, row_bytes, to_row, from_row, num_rows, NETWORK: tl.constexpr):
    """Puts what describes rows; `to` is the offset of the block, `regions` the address of its regions' offsets."""
    source = word(state, protocol.DEPARTURES) + word(state, protocol.DEPARTING + region) + from_row * row_bytes
    target = to + word(regions, region) + to_row * row_bytes
    start_put(ctx, word(state, protocol.WINDOW), rank, target, source, num_rows * row_bytes, NETWORK)


@device
def _put_rows(ctx, args, state, routing, tensors, weights, rank, to, to_row, from_row, num_rows,
              EXPANDED: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Puts a run of rows into the block at offset `to`, with all that describes them."""
    topk, by_rank = word(routing, protocol.TOPK), word(state, protocol.IS_BY_RANK) != 0
    regions = state + 8 * (protocol.ARRIVED_TOKEN if EXPANDED else protocol.TOKEN_REGION)
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = tensors + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        source = word(state, protocol.DEPARTURES) + word(tensor, protocol.T_DEPARTURE) + from_row * num_bytes
        target = to + word(tensor, protocol.T_OFFSET) + to_row * num_bytes
        start_put(ctx, word(state, protocol.WINDOW), rank, target, source, num_rows * num_bytes, NETWORK)
    _put_region(ctx, state, rank, to, protocol.R_TOKEN, regions, 4, to_row, from_row, num_rows, NETWORK)
    if by_rank:
        item = tl.cast(4, tl.int64)
        if not EXPANDED:
            item = word(routing, protocol.INDEX_BYTES)
        _put_region(ctx, state, rank, to, protocol.R_INDEX, regions, item * topk, to_row, from_row, num_rows, NETWORK)
    if weights != 0:
        row_bytes = tl.cast(4, tl.int64)
        if by_rank:
            row_bytes = 4 * topk
        _put_region(ctx, state, rank, to, protocol.R_WEIGHT, regions, row_bytes, to_row, from_row, num_rows, NETWORK)


@device
def send_departures(ctx, args, state, routing, tensors, weights, epoch, rank, EXPANDED: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    """Puts all rows of a dispatch for a rank on another node."""
    num_experts, counts = word(state, protocol.NUM_EXPERTS), word(routing, protocol.OWN_COUNTS)
    base, departure = word(routing, protocol.BASE), word(routing, protocol.DEPARTURE)
    to = destination(ctx, state, rank, epoch, EXPANDED)
    if word(state, protocol.IS_BY_RANK):
        at = 4 * (num_experts + rank)
        row, num_rows = load32(base + at).to(tl.int64), load32(counts + at).to(tl.int64)
        if not EXPANDED:
            num_rows = kept_rows(state, row, num_rows)
        if num_rows > 0:
            from_row = load32(departure + at).to(tl.int64)
            _put_rows(
                ctx, args, state, routing, tensors, weights, rank, to, row, from_row, num_rows, EXPANDED, NETWORK
            )
    else:
        starts = word(state, protocol.ORDER_START)
        for place in range(load32(starts + 4 * rank), load32(starts + 4 * (rank + 1))):
            at = 4 * load32(word(state, protocol.ORDER) + 4 * tl.cast(place, tl.int64)).to(tl.int64)
            row = load32(base + at).to(tl.int64)
            num_rows = kept_rows(state, row, load32(counts + at).to(tl.int64))
            if num_rows > 0:
                from_row = load32(departure + at).to(tl.int64)
                _put_rows(
                    ctx, args, state, routing, tensors, weights, rank, to, row, from_row, num_rows, EXPANDED, NETWORK
                )


@device
def send_weights(ctx, state, routing, rank, NETWORK: tl.constexpr):
    """Puts combine's weights for the rows that a rank on another node has received by rank."""
    at, regions = 4 * (word(state, protocol.NUM_EXPERTS) + rank), state + 8 * protocol.ARRIVED_TOKEN
    row = load32(word(routing, protocol.BASE) + at).to(tl.int64)
    from_row = load32(word(routing, protocol.DEPARTURE) + at).to(tl.int64)
    num_rows = load32(word(routing, protocol.OWN_COUNTS) + at).to(tl.int64)
    row_bytes, to = 4 * word(routing, protocol.TOPK), word(state, protocol.ARRIVALS)
    if num_rows > 0:
        _put_region(
            ctx, state, rank, to, protocol.R_FACTOR, regions, row_bytes, row, from_row, num_rows, NETWORK
        )
