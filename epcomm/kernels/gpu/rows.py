"""Where a token's rows are: the place at a rank that dispatch writes and combine reads, and the weight of each.

By rank a token has a row for each rank it goes to (`k` is the rank), else one for each expert (`k` is the slot).
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import load32, load64, load_float, word
from epcomm.kernels.gpu.counts import base_of, signal_word
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def is_dropped(state, row):
    """True for a row of a receive block past its limit, in a handle that drops those."""
    return (row >= word(state, protocol.ROW_LIMIT)) & (word(state, protocol.LAYOUT) != protocol.PADDED)


@device
def num_places(ctx, routing, by_rank):
    """How many rows a token can have: `k` below this."""
    places = word(routing, protocol.TOPK)
    if by_rank:
        places = word(ctx, control.SIZE)
    return places


@device
def place(ctx, state, routing, token, k, by_rank):
    """(rank, row there) of a token's k-th row; the rank is -1 if there is none, or it is dropped."""
    rank, row = tl.cast(-1, tl.int64), tl.cast(0, tl.int64)
    base = word(routing, protocol.BASE)
    if by_rank:
        size = word(ctx, control.SIZE)
        position = load32(word(routing, protocol.RANK_POSITION) + 4 * (token * size + k))
        if position >= 0:
            rank = tl.cast(k, tl.int64)
            row = (load32(base + 4 * (word(state, protocol.NUM_EXPERTS) + k)) + position).to(tl.int64)
            if word(state, protocol.LAYOUT) == protocol.FLAT:
                if is_dropped(state, row):
                    rank = tl.cast(-1, tl.int64)
    else:
        at = 4 * (token * word(routing, protocol.TOPK) + k)
        expert = load32(word(routing, protocol.EXPERT) + at).to(tl.int64)
        if expert >= 0:
            rank = load32(word(state, protocol.OWNER) + 4 * expert).to(tl.int64)
            row = (load32(base + 4 * expert) + load32(word(routing, protocol.POSITION) + at)).to(tl.int64)
            if is_dropped(state, row):
                rank = tl.cast(-1, tl.int64)
    return rank, row


@device
def departing_row(ctx, state, routing, token, k, by_rank):
    """The row, in the departures and in the returns, of a token's k-th row, which goes to another node."""
    departure = word(routing, protocol.DEPARTURE)
    row = tl.cast(0, tl.int64)
    if by_rank:
        size = word(ctx, control.SIZE)
        position = load32(word(routing, protocol.RANK_POSITION) + 4 * (token * size + k))
        row = (load32(departure + 4 * (word(state, protocol.NUM_EXPERTS) + k)) + position).to(tl.int64)
    else:
        at = 4 * (token * word(routing, protocol.TOPK) + k)
        expert = load32(word(routing, protocol.EXPERT) + at).to(tl.int64)
        row = (load32(departure + 4 * expert) + load32(word(routing, protocol.POSITION) + at)).to(tl.int64)
    return row


@device
def slot_weight(routing, weights, token, slot):
    """The weight of a (token, expert): its slot's and those of later slots that name the same expert."""
    topk = word(routing, protocol.TOPK)
    experts, given = word(routing, protocol.EXPERT) + 4 * token * topk, weights + 4 * token * topk
    total = load_float(given + 4 * slot)
    for later in range(slot + 1, topk):
        if load32(experts + 4 * later) == -2 - slot:
            total += load_float(given + 4 * later)
    return total


@device
def _block(ctx, state, kind, rank, num_blocks):
    """The block that `rank` named in its word of `kind`. This program has waited for that word, or for one that did."""
    named = load64(signal_word(ctx, state, kind, word(ctx, control.RANK), rank)) & protocol.PAYLOAD_MASK
    return tl.minimum(named, num_blocks - 1)  # it comes from a peer: never let it lead outside of the segment


@device
def own_block(ctx, state, block):
    """Address of receive block `block` of this rank."""
    own = base_of(state, word(ctx, control.RANK))
    return own + word(state, protocol.BLOCKS) + block * word(state, protocol.BLOCK_BYTES)


@device
def arrivals_of(state, rank):
    """Address of `rank`'s arrivals; their offset if load and store don't reach it: its base is 0."""
    return base_of(state, rank) + word(state, protocol.ARRIVALS)


@device
def granted_block(ctx, state, rank, epoch):
    """Address of the receive block that `rank` granted for this epoch; its offset if load and store don't reach it."""
    block = _block(ctx, state, protocol.GRANT + (epoch & 1), rank, word(state, protocol.NUM_BLOCKS))
    return base_of(state, rank) + word(state, protocol.BLOCKS) + block * word(state, protocol.BLOCK_BYTES)


@device
def destination(ctx, state, rank, epoch, EXPANDED: tl.constexpr):
    """Where rows for `rank` go: its arrivals, if it expands what arrives, else the block that it granted."""
    if EXPANDED:
        return arrivals_of(state, rank)
    else:
        return granted_block(ctx, state, rank, epoch)


@device
def departures(ctx, state):
    """Address of this rank's departures."""
    return base_of(state, word(ctx, control.RANK)) + word(state, protocol.DEPARTURES)


@device
def returns(ctx, state):
    """Address of this rank's returns."""
    return base_of(state, word(ctx, control.RANK)) + word(state, protocol.RETURNS)


@device
def output_block(ctx, state, rank, epoch):
    """Address of the output block that `rank` named in its READY of this epoch."""
    block = _block(ctx, state, protocol.READY + (epoch & 1), rank, word(state, protocol.NUM_OUTPUTS))
    return base_of(state, rank) + word(state, protocol.OUTPUTS) + block * word(state, protocol.OUTPUT_BYTES)
