"""Rows for ranks on other nodes: where they lie in the departures, and how they get from there to where they belong.

Rows of a rank, and among them those of an expert, are consecutive where they are packed and where they arrive: each
such run is one put per tensor, and one per region that describes rows.

Edges
  WAR  departures of dispatch e - 1 arrived at a peer before it granted a block for e, which this rank waited for; the
       weights among them arrived before the peer raised READY of combine e - 1, which this rank waited for.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import load32, load_acquire, word
from epcomm.device.cpu.network import put
from epcomm.kernels.cpu.counts import base_of, signal_word
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def granted_offset(ctx, state, rank, epoch):
    """Offset of the block that `rank` granted for this epoch."""
    granted = load_acquire(
        signal_word(ctx, state, protocol.GRANT + (epoch & 1), word(ctx, control.RANK), rank)
    )
    # the number comes from a peer: never let it lead outside of the segment
    block = min(granted & protocol.PAYLOAD_MASK, word(state, protocol.NUM_BLOCKS) - 1)
    return word(state, protocol.BLOCKS) + block * word(state, protocol.BLOCK_BYTES)


@device
def departures(ctx, state):
    """Address of this rank's departures."""
    return base_of(state, word(ctx, control.RANK)) + word(state, protocol.DEPARTURES)


@device
def _put_region(ctx, state, rank, to, region, regions, row_bytes, to_row, from_row, num_rows):
    """Puts what describes rows; `to` is the offset of the block, `regions` the address of its regions' offsets."""
    source = word(state, protocol.DEPARTURES) + word(state, protocol.DEPARTING + region) + from_row * row_bytes
    put(ctx, word(state, protocol.WINDOW), rank, to + word(regions, region) + to_row * row_bytes, source,
        num_rows * row_bytes)  # fmt: skip


@device
def _put_rows(ctx, args, state, rank, to, to_row, from_row, num_rows):
    """Puts a run of rows into the block at offset `to`, with all that describes them."""
    routing, is_flat = word(args, protocol.ROUTING), word(state, protocol.LAYOUT) == protocol.FLAT
    topk, weighted = word(routing, protocol.TOPK), word(args, protocol.HAS_WEIGHTS)
    by_rank = word(args, protocol.BY_RANK)
    regions = state + 8 * (protocol.ARRIVED_TOKEN if by_rank and not is_flat else protocol.TOKEN_REGION)
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        source = word(state, protocol.DEPARTURES) + word(tensor, protocol.T_DEPARTURE) + from_row * num_bytes
        put(ctx, word(state, protocol.WINDOW), rank, to + word(tensor, protocol.T_OFFSET) + to_row * num_bytes, source,
            num_rows * num_bytes)  # fmt: skip
    _put_region(ctx, state, rank, to, protocol.R_TOKEN, regions, 4, to_row, from_row, num_rows)
    if by_rank:
        item = word(routing, protocol.INDEX_BYTES) if is_flat else 4
        _put_region(ctx, state, rank, to, protocol.R_INDEX, regions, item * topk, to_row, from_row, num_rows)
    if weighted:
        row_bytes = 4 * topk if by_rank else 4
        _put_region(ctx, state, rank, to, protocol.R_WEIGHT, regions, row_bytes, to_row, from_row, num_rows)


@device
def kept_rows(state, row, num_rows):
    """How many of a block's rows from `row` on are below the limit of a handle that drops the others."""
    if word(state, protocol.LAYOUT) == protocol.PADDED:
        return num_rows
    return max(0, min(num_rows, word(state, protocol.ROW_LIMIT) - row))


@device
def send_departures(ctx, args, state, epoch, rank):
    """Puts all rows of a dispatch for a rank on another node."""
    routing, num_experts = word(args, protocol.ROUTING), word(state, protocol.NUM_EXPERTS)
    base, departure = word(routing, protocol.BASE), word(routing, protocol.DEPARTURE)
    counts = word(routing, protocol.OWN_COUNTS)
    if word(args, protocol.BY_RANK):
        at = 4 * (num_experts + rank)
        row, num_rows, to = load32(base + at), load32(counts + at), word(state, protocol.ARRIVALS)
        if word(state, protocol.LAYOUT) == protocol.FLAT:
            to, num_rows = granted_offset(ctx, state, rank, epoch), kept_rows(state, row, num_rows)
        _put_rows(ctx, args, state, rank, to, row, load32(departure + at), num_rows)
        return
    order, order_start = word(state, protocol.ORDER), word(state, protocol.ORDER_START)
    to = granted_offset(ctx, state, rank, epoch)
    for place in range(load32(order_start + 4 * rank), load32(order_start + 4 * (rank + 1))):
        at = 4 * load32(order + 4 * place)
        row = load32(base + at)
        num_rows = kept_rows(state, row, load32(counts + at))
        if num_rows > 0:
            _put_rows(ctx, args, state, rank, to, row, load32(departure + at), num_rows)


@device
def send_weights(ctx, args, state, rank):
    """Puts combine's weights for the rows that a rank on another node has received by rank."""
    routing = word(args, protocol.ROUTING)
    at, regions = 4 * (word(state, protocol.NUM_EXPERTS) + rank), state + 8 * protocol.ARRIVED_TOKEN
    row, from_row = load32(word(routing, protocol.BASE) + at), load32(word(routing, protocol.DEPARTURE) + at)
    num_rows, row_bytes = load32(word(routing, protocol.OWN_COUNTS) + at), 4 * word(routing, protocol.TOPK)
    to = word(state, protocol.ARRIVALS)
    _put_region(ctx, state, rank, to, protocol.R_FACTOR, regions, row_bytes, row, from_row, num_rows)
