"""Dispatch: every rank grants its peers a receive block, then each row is copied to its final place there.

Roles and phases
  1  program 0: grant a block to every peer (in latency mode with this rank's counts); wait for every peer's grant.
  2  all programs: copy the rows of their share of the tokens; the last to finish raises ROWS at every peer.
  3  program 0: zero the padding of its own block; wait for every peer's ROWS, and for DONE of the last combine.

Edges
  WAR  GRANT: the receiver's block is free. It carries the block's number.
  RAW  GRANT, latency mode: the peer's counts are in the table (its parity: see counts.py).
  RAW  ROWS: the peer's rows for this rank are delivered.
  WAR  DONE: the peer has read the output blocks of earlier combines; they may be written again.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.memory import (
    copy,
    copy_streaming,
    fence,
    load32,
    load_acquire,
    load_float,
    set_word,
    store32,
    store_float,
    word,
    zero_bytes,
)
from epcomm.device.cpu.waiting import meet, signal, wait
from epcomm.kernels.cpu.counts import base_of, place_rows, push_counts, signal_word
from epcomm.kernels.cpu.phases import announce, arrive, follow
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _meet_peers(ctx, args, state, routing, epoch):
    """Phase 1. In latency mode the counts ride along."""
    me, size, latency = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.LATENCY)
    kind = protocol.GRANT + (epoch & 1)
    for distance in range(size):
        rank = (me + distance) % size
        if latency:
            push_counts(ctx, state, routing, rank, epoch)
        signal(signal_word(ctx, state, kind, rank, me), epoch << protocol.PAYLOAD_BITS | word(args, protocol.BLOCK))
    for distance in range(1, size):
        rank = (me + distance) % size
        granted = signal_word(ctx, state, kind, me, rank)
        status = meet(ctx, granted, epoch << protocol.PAYLOAD_BITS, rank, sites.DISPATCH_GRANT)  # WAR; RAW of counts
        if status != control.OK:
            return status
    if latency:
        return place_rows(ctx, state, routing, epoch)
    return control.OK


@device
def _granted_block(ctx, state, rank, epoch):
    """Address of the block that `rank` granted for this epoch."""
    granted = load_acquire(
        signal_word(ctx, state, protocol.GRANT + (epoch & 1), word(ctx, control.RANK), rank)
    )
    # the number comes from a peer: never let it lead outside of the segment
    block = min(granted & protocol.PAYLOAD_MASK, word(state, protocol.NUM_BLOCKS) - 1)
    return base_of(state, rank) + word(state, protocol.BLOCKS) + block * word(state, protocol.BLOCK_BYTES)


@device
def _copy_row(args, token, row, block, streaming):
    """Copies a token's row of every tensor to `row` of `block`."""
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        source = word(tensor, protocol.T_ADDRESS) + token * word(tensor, protocol.T_STRIDE)
        to = block + word(tensor, protocol.T_OFFSET) + row * num_bytes
        if streaming:
            copy_streaming(to, source, num_bytes)
        else:
            copy(to, source, num_bytes)


@device
def _weight(args, token, slot, topk):
    """The weight of a (token, expert): its slot's and those of later slots that name the same expert."""
    routing, weights = word(args, protocol.ROUTING), word(args, protocol.WEIGHTS) + 4 * token * topk
    experts = word(routing, protocol.EXPERT) + 4 * token * topk
    total = load_float(weights + 4 * slot)
    for later in range(slot + 1, topk):
        if load32(experts + 4 * later) == -2 - slot:
            total += load_float(weights + 4 * later)
    return total


@device
def _send_per_expert(ctx, args, state, epoch, first, last, streaming):
    """One row per (token, expert): contiguous and padded layouts."""
    routing, topk = word(args, protocol.ROUTING), word(word(args, protocol.ROUTING), protocol.TOPK)
    experts, positions, base = (
        word(routing, protocol.EXPERT),
        word(routing, protocol.POSITION),
        word(routing, protocol.BASE),
    )
    owner, token_region = word(state, protocol.OWNER), word(state, protocol.TOKEN_REGION)
    deliver_weights = word(args, protocol.WEIGHTS) != 0 and word(state, protocol.LAYOUT) == protocol.CONTIGUOUS
    for token in range(first, last):
        for slot in range(topk):
            expert = load32(experts + 4 * (token * topk + slot))
            if expert >= 0:
                block = _granted_block(ctx, state, load32(owner + 4 * expert), epoch)
                row = load32(base + 4 * expert) + load32(positions + 4 * (token * topk + slot))
                _copy_row(args, token, row, block, streaming)
                store32(block + token_region + 4 * row, token)
                if deliver_weights:
                    store_float(
                        block + word(state, protocol.WEIGHT_REGION) + 4 * row, _weight(args, token, slot, topk)
                    )


@device
def _send_per_rank(ctx, args, state, epoch, first, last, streaming):
    """One row per (token, rank), with the token's slots on that rank: flat layout."""
    routing, size = word(args, protocol.ROUTING), word(ctx, control.SIZE)
    topk, wide = word(routing, protocol.TOPK), word(routing, protocol.INDEX_BYTES) == 8
    experts, owner, local = word(routing, protocol.EXPERT), word(state, protocol.OWNER), word(state, protocol.LOCAL)
    base = word(routing, protocol.BASE) + 4 * word(state, protocol.NUM_EXPERTS)
    weights, me = word(args, protocol.WEIGHTS), word(ctx, control.RANK)
    for token in range(first, last):
        for distance in range(size):
            rank = (me + distance) % size
            position = load32(word(routing, protocol.RANK_POSITION) + 4 * (token * size + rank))
            if position >= 0:
                block = _granted_block(ctx, state, rank, epoch)
                row = load32(base + 4 * rank) + position
                _copy_row(args, token, row, block, streaming)
                store32(block + word(state, protocol.TOKEN_REGION) + 4 * row, token)
                index = block + word(state, protocol.INDEX_REGION) + (8 if wide else 4) * row * topk
                weight = block + word(state, protocol.WEIGHT_REGION) + 4 * row * topk
                for slot in range(topk):
                    at = token * topk + slot
                    expert = load32(experts + 4 * at)
                    if expert < -1:
                        expert = load32(experts + 4 * (token * topk - 2 - expert))
                    mine = expert >= 0 and load32(owner + 4 * expert) == rank
                    number = load32(local + 4 * expert) if mine else -1
                    if wide:
                        set_word(index, slot, number)
                    else:
                        store32(index + 4 * slot, number)
                    if weights != 0:
                        store32(weight + 4 * slot, load32(weights + 4 * at) if mine else 0)


@device
def _zero_padding(ctx, args, state, routing):
    """Contiguous layout: zeroes the rows between each local expert's last and its aligned end in this rank's block."""
    me, size, num_experts = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NUM_EXPERTS)
    order, order_start = word(state, protocol.ORDER), word(state, protocol.ORDER_START)
    table, alignment = word(routing, protocol.TABLE), word(state, protocol.ALIGNMENT)
    block = base_of(state, me) + word(state, protocol.BLOCKS) + word(args, protocol.BLOCK) * word(
        state, protocol.BLOCK_BYTES
    )
    row = 0
    for at in range(load32(order_start + 4 * me), load32(order_start + 4 * (me + 1))):
        for source in range(size):
            row += load32(table + 4 * (source * (num_experts + size) + load32(order + 4 * at)))
        padding = -row % alignment
        for i in range(word(args, protocol.NUM_TENSORS)):
            tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
            num_bytes = word(tensor, protocol.T_ROW_BYTES)
            zero_bytes(block + word(tensor, protocol.T_OFFSET) + row * num_bytes, padding * num_bytes)
        zero_bytes(block + word(state, protocol.WEIGHT_REGION) + 4 * row, 4 * padding)
        for i in range(padding):
            store32(block + word(state, protocol.TOKEN_REGION) + 4 * (row + i), -1)
        row += padding


@kernel("dispatch")
def dispatch(ctx, args, program, num_programs):
    """Returns CAPACITY on all ranks, before any row is sent, if some rank's rows are too many."""
    state, routing = word(args, protocol.STATE), word(args, protocol.ROUTING)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    epoch = word(state, protocol.DISPATCH_EPOCH) + 1
    if program == 0:
        status = _meet_peers(ctx, args, state, routing, epoch)
        announce(state, protocol.DISPATCH_PHASE, epoch, status)
    else:
        status = follow(ctx, state, protocol.DISPATCH_PHASE, epoch, sites.DISPATCH_GRANT)
    if status == control.CAPACITY and arrive(state, num_programs):
        set_word(state, protocol.DISPATCH_EPOCH, epoch)  # agreed on by all: the next dispatch is epoch + 1 everywhere
    if status != control.OK:
        return status
    moved = word(routing, protocol.TOTAL_ROWS) * word(args, protocol.ROW_BYTES_TOTAL)
    streaming = moved > word(state, protocol.STREAMING_BYTES)
    num_tokens = word(routing, protocol.NUM_TOKENS)
    first, last = num_tokens * program // num_programs, num_tokens * (program + 1) // num_programs
    if word(state, protocol.LAYOUT) == protocol.FLAT:
        _send_per_rank(ctx, args, state, epoch, first, last, streaming)
    else:
        _send_per_expert(ctx, args, state, epoch, first, last, streaming)
    if streaming:
        fence()
    if arrive(state, num_programs):
        set_word(state, protocol.DISPATCH_EPOCH, epoch)
        for distance in range(size):
            rank = (me + distance) % size
            signal(signal_word(ctx, state, protocol.ROWS, rank, me), epoch)
    if program != 0:
        return control.OK
    if word(state, protocol.LAYOUT) == protocol.CONTIGUOUS and word(state, protocol.ALIGNMENT) > 1:
        _zero_padding(ctx, args, state, routing)
    combined = word(state, protocol.COMBINE_EPOCH)
    if combined == word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
        combined = 0  # there was no combine in this generation
    for distance in range(size):
        rank = (me + distance) % size
        status = wait(ctx, signal_word(ctx, state, protocol.ROWS, me, rank), epoch, rank, sites.DISPATCH_ROWS)  # RAW
        if status != control.OK:
            return status
        done = signal_word(ctx, state, protocol.DONE, me, rank)
        status = wait(ctx, done, combined, rank, sites.DISPATCH_READ)  # WAR
        if status != control.OK:
            return status
    return control.OK
