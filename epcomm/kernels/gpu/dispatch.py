"""Dispatch: every rank grants its peers a receive block, then each row is copied to its final place there.

Roles and phases, by program
  1  the first: grant a block to every peer (in latency mode with this rank's counts); wait for every peer's grant.
  2  all others but the last: copy the rows of every n-th token, read once for all their places (or quantise them on the
     way: SCALES says to which scales, X what they are), and zero the padding of every n-th local expert in this rank's
     own block; the last of them to finish raises ROWS at every peer.
  3  the last: wait for every peer's ROWS, and for DONE of the last combine.

Edges
  WAR  GRANT: the receiver's block is free. It carries the block's number.
  RAW  GRANT, latency mode: the peer's counts are in the table (its parity: see counts.py).
  RAW  ROWS: the peer's rows for this rank are delivered.
  WAR  DONE: the peer has read the output blocks of earlier combines; they may be written again.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import (
    NARROW_TILE_BYTES,
    TILE_BYTES,
    is_wide,
    load32,
    load_float,
    load_tile,
    set_word,
    store32,
    store_float,
    store_tile,
    word,
    zero_bytes,
)
from epcomm.device.gpu.waiting import enter, leave, meet_everyone, wait_for_everyone
from epcomm.kernels.gpu.counts import base_of, place_rows, push_counts, raise_everywhere, signal_word
from epcomm.kernels.gpu.phases import announce, arrive, follow
from epcomm.kernels.gpu.quantized_rows import NARROW_TILE_BLOCKS, TILE_BLOCKS, send_quantized_row
from epcomm.kernels.gpu.rows import granted_block, num_places, place, slot_weight
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _meet_peers(ctx, fingerprint, state, routing, block, latency, epoch, EXPERTS: tl.constexpr, RANKS: tl.constexpr):
    """Phase 1. In latency mode the counts ride along."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    kind = protocol.GRANT + (epoch & 1)
    if latency:
        for distance in range(size):
            push_counts(ctx, state, routing, (me + distance) % size, epoch)
    value, granted = epoch << protocol.PAYLOAD_BITS, signal_word(ctx, state, kind, me, 0)
    raise_everywhere(ctx, state, kind, value | block, RANKS)
    status = meet_everyone(ctx, fingerprint, granted, value, sites.DISPATCH_GRANT, RANKS)  # WAR; RAW of counts
    if latency:
        if status == control.OK:
            status = place_rows(ctx, state, routing, epoch, EXPERTS, RANKS)
    return status


@device
def _is_wide(tensor):
    """True if a tensor's rows can be read and delivered in 16-byte accesses."""
    address, stride = word(tensor, protocol.T_ADDRESS), word(tensor, protocol.T_STRIDE)
    return is_wide(address, stride, word(tensor, protocol.T_ROW_BYTES))


@device
def _send_row(ctx, state, routing, tensor, token, places, epoch, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Copies a token's row of one tensor to all its places."""
    num_bytes, offset = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_OFFSET)
    source = word(tensor, protocol.T_ADDRESS) + token * word(tensor, protocol.T_STRIDE)
    start = tl.cast(0, tl.int64)
    while start < num_bytes:
        left = tl.minimum(num_bytes - start, TILE)
        tile = load_tile(source + start, 0, left, WIDE, TILE)
        for k in range(places):
            rank, row = place(ctx, state, routing, token, k)
            if rank >= 0:
                to = granted_block(ctx, state, rank, epoch) + offset + row * num_bytes
                store_tile(to + start, 0, left, tile, WIDE, TILE)
        start += TILE


@device
def _describe_slots(ctx, state, routing, weights, token, rank, row, block):
    """Flat layout: the token's slots on that rank, as local expert numbers and weights."""
    topk = word(routing, protocol.TOPK)
    experts = word(routing, protocol.EXPERT) + 4 * token * topk
    index_bytes = word(routing, protocol.INDEX_BYTES)
    index = block + word(state, protocol.INDEX_REGION) + index_bytes * row * topk
    weight = block + word(state, protocol.WEIGHT_REGION) + 4 * row * topk
    for slot in range(topk):
        expert = load32(experts + 4 * slot)
        if expert < -1:
            expert = load32(experts + 4 * (-2 - expert).to(tl.int64))
        number, given = tl.cast(-1, tl.int32), tl.cast(0.0, tl.float32)
        if expert >= 0:
            if load32(word(state, protocol.OWNER) + 4 * expert.to(tl.int64)) == rank:
                number = load32(word(state, protocol.LOCAL) + 4 * expert.to(tl.int64))
                if weights != 0:
                    given = load_float(weights + 4 * (token * topk + slot))
        if index_bytes == 8:
            set_word(index, slot, number)
        else:
            store32(index + 4 * slot, number)
        if weights != 0:
            store_float(weight + 4 * slot, given)


@device
def _describe_rows(ctx, state, routing, weights, token, places, epoch):
    """Writes what goes with a token's rows: which token it is, weights, and in flat layout the slots."""
    layout = word(state, protocol.LAYOUT)
    for k in range(places):
        rank, row = place(ctx, state, routing, token, k)
        if rank >= 0:
            block = granted_block(ctx, state, rank, epoch)
            store32(block + word(state, protocol.TOKEN_REGION) + 4 * row, token)
            if layout == protocol.FLAT:
                _describe_slots(ctx, state, routing, weights, token, rank, row, block)
            elif layout == protocol.CONTIGUOUS:
                if weights != 0:
                    weight = slot_weight(routing, weights, token, k)
                    store_float(block + word(state, protocol.WEIGHT_REGION) + 4 * row, weight)


@device
def _zero_padding(state, routing, tensors, num_tensors, me, size, at, block):
    """Contiguous layout: zeroes the rows between the last one of an expert of this rank and its aligned end."""
    num_experts, alignment = word(state, protocol.NUM_EXPERTS), word(state, protocol.ALIGNMENT)
    table = word(routing, protocol.TABLE)
    expert = load32(word(state, protocol.ORDER) + 4 * at).to(tl.int64)
    row = load32(word(routing, protocol.BASE) + 4 * expert).to(tl.int64)  # of this rank's own first row
    count = tl.cast(0, tl.int64)
    for source in range(size):
        rows = load32(table + 4 * (source * (num_experts + size) + expert)).to(tl.int64)
        count += rows
        if source >= me:
            row += rows
    padding = (alignment - count % alignment) % alignment
    for i in range(num_tensors):
        tensor = tensors + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        zero_bytes(block + word(tensor, protocol.T_OFFSET) + row * num_bytes, padding * num_bytes)
    zero_bytes(block + word(state, protocol.WEIGHT_REGION) + 4 * row, 4 * padding)
    for i in range(padding):
        store32(block + word(state, protocol.TOKEN_REGION) + 4 * (row + i), -1)


@device
def _send(ctx, args, state, routing, tensors, weights, block, epoch, share, shares,
          X: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Phase 2 of one program."""
    me, size, num_tensors = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.NUM_TENSORS)
    places = num_places(ctx, state, routing)
    for token in range(share, word(routing, protocol.NUM_TOKENS), shares):
        if SCALES is None:
            for i in range(num_tensors):
                tensor = tensors + 8 * protocol.TENSOR_WORDS * i
                if _is_wide(tensor):
                    _send_row(ctx, state, routing, tensor, token, places, epoch, True, TILE_BYTES)
                else:
                    _send_row(ctx, state, routing, tensor, token, places, epoch, False, NARROW_TILE_BYTES)
        elif _is_wide(tensors):
            send_quantized_row(ctx, state, routing, tensors, token, places, epoch, X, SCALES, True, TILE_BLOCKS)
        else:
            send_quantized_row(ctx, state, routing, tensors, token, places, epoch, X, SCALES, False, NARROW_TILE_BLOCKS)
        _describe_rows(ctx, state, routing, weights, token, places, epoch)
    if word(state, protocol.LAYOUT) == protocol.CONTIGUOUS:
        if word(state, protocol.ALIGNMENT) > 1:
            own = base_of(state, me) + word(state, protocol.BLOCKS) + block * word(state, protocol.BLOCK_BYTES)
            starts = word(state, protocol.ORDER_START)
            first, end = load32(starts + 4 * me), load32(starts + 4 * (me + 1))
            for at in range(first + share, end, shares):
                _zero_padding(state, routing, tensors, num_tensors, me, size, tl.cast(at, tl.int64), own)


@device
def _finish(ctx, fingerprint, state, epoch, RANKS: tl.constexpr):
    """Phase 3."""
    me, combined = word(ctx, control.RANK), word(state, protocol.COMBINE_EPOCH)
    if combined == word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
        combined = tl.cast(0, tl.int64)  # there was no combine in this generation
    delivered, done = signal_word(ctx, state, protocol.ROWS, me, 0), signal_word(ctx, state, protocol.DONE, me, 0)
    status = wait_for_everyone(ctx, fingerprint, delivered, epoch, sites.DISPATCH_ROWS, RANKS)  # RAW
    if status == control.OK:
        status = wait_for_everyone(ctx, fingerprint, done, combined, sites.DISPATCH_READ, RANKS)  # WAR
    return status


@kernel("dispatch", programs=lambda shares: shares + 2, reports=True)
def dispatch(ctx, args, fingerprint, routing, tensors, weights, block, c4, c5,
             EXPERTS: tl.constexpr, RANKS: tl.constexpr, X: tl.constexpr, SCALES: tl.constexpr):  # fmt: skip
    """Ends with CAPACITY on all ranks, before any row is sent, if some rank's rows are too many."""
    program, status = enter(ctx, fingerprint)
    state, shares = word(args, protocol.STATE), tl.num_programs(0) - 2
    me, epoch = word(ctx, control.RANK), word(state, protocol.DISPATCH_EPOCH) + 1
    if program == 0:
        if status == control.OK:
            latency = word(args, protocol.LATENCY) != 0
            status = _meet_peers(ctx, fingerprint, state, routing, block, latency, epoch, EXPERTS, RANKS)
        announce(state, protocol.DISPATCH_PHASE, epoch, status)
    elif status == control.OK:
        status = follow(ctx, fingerprint, state, protocol.DISPATCH_PHASE, epoch, me, sites.DISPATCH_GRANT)
        if status == control.OK:
            if program <= shares:
                _send(ctx, args, state, routing, tensors, weights, block, epoch, program - 1, shares, X, SCALES)
                if arrive(state, shares):
                    raise_everywhere(ctx, state, protocol.ROWS, epoch, RANKS)
            else:
                status = _finish(ctx, fingerprint, state, epoch, RANKS)
    if leave(ctx, status):
        set_word(state, protocol.DISPATCH_EPOCH, epoch)  # the last to leave: all have read the old one
