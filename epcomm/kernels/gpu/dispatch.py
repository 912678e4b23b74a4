"""Dispatch: every rank grants its peers a receive block, then each row is copied to its final place there.

Roles and phases, by program
  1  the first: grant a block to every peer (in latency mode with this rank's counts); wait for every peer's grant.
  2  the next n: copy the rows of every n-th token, read once for all their places (or quantise them on the way: SCALES
     says to which scales, X what they are), and zero the padding of every n-th local expert in this rank's own block;
     the last of them to finish raises ROWS at every peer. Rows for other nodes are packed in the departures; it puts
     them before.
  3  the others: what `dispatch_receive` does, here or in a launch of its own.

EXPANDED: rows travel by rank and go to the peer's arrivals; the grant is one of those, too.

Edges
  WAR  GRANT: the receiver's block, and its arrivals, are free. It carries the block's number.
  WAR  GRANT, again: what the last dispatch put has arrived, so the departures are free.
  RAW  GRANT, latency mode: the peer's counts are in the table (its parity: see counts.py).
  RAW, WAR  of phase 3: see dispatch_receive.py.
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
from epcomm.device.gpu.network import quiet
from epcomm.device.gpu.waiting import enter, leave, meet_everyone
from epcomm.kernels.gpu.counts import base_of, place_rows, push_counts, raise_everywhere, signal_word
from epcomm.kernels.gpu.departures import send_departures
from epcomm.kernels.gpu.dispatch_receive import receive_rows
from epcomm.kernels.gpu.phases import announce, arrive, follow
from epcomm.kernels.gpu.quantized_rows import NARROW_TILE_BLOCKS, TILE_BLOCKS, send_quantized_row
from epcomm.kernels.gpu.rows import (
    departing_row,
    departures,
    destination,
    is_dropped,
    num_places,
    own_block,
    place,
    slot_weight,
)
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _meet_peers(ctx, fingerprint, state, routing, block, latency, epoch, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
                NETWORK: tl.constexpr):  # fmt: skip
    """Phase 1. In latency mode the counts ride along."""
    me = word(ctx, control.RANK)
    kind = protocol.GRANT + (epoch & 1)
    if latency:
        push_counts(ctx, state, routing, epoch, NETWORK)
    value, granted = epoch << protocol.PAYLOAD_BITS, signal_word(ctx, state, kind, me, 0)
    raise_everywhere(ctx, state, kind, value | block, RANKS, NETWORK)
    status = meet_everyone(ctx, fingerprint, granted, value, sites.DISPATCH_GRANT, RANKS, NETWORK)  # WAR; RAW of counts
    if latency:
        if status == control.OK:
            status = place_rows(ctx, state, routing, epoch, EXPERTS, RANKS, NETWORK)
    return status


@device
def _is_wide(tensor):
    """True if a tensor's rows can be read and delivered in 16-byte accesses."""
    address, stride = word(tensor, protocol.T_ADDRESS), word(tensor, protocol.T_STRIDE)
    return is_wide(address, stride, word(tensor, protocol.T_ROW_BYTES))


@device
def _send_row(ctx, state, routing, tensor, token, places, epoch,
              EXPANDED: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Copies a token's row of one tensor to all its places."""
    num_bytes, offset = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_OFFSET)
    source = word(tensor, protocol.T_ADDRESS) + token * word(tensor, protocol.T_STRIDE)
    start = tl.cast(0, tl.int64)
    while start < num_bytes:
        left = tl.minimum(num_bytes - start, TILE)
        tile = load_tile(source + start, 0, left, WIDE, TILE)
        for k in range(places):
            rank, row = place(ctx, state, routing, token, k, word(state, protocol.IS_BY_RANK))
            if rank >= 0:
                to = destination(ctx, state, rank, epoch, EXPANDED) + offset + row * num_bytes
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        departing = departing_row(ctx, state, routing, token, k, word(state, protocol.IS_BY_RANK))
                        to = departures(ctx, state) + word(tensor, protocol.T_DEPARTURE) + departing * num_bytes
                store_tile(to + start, 0, left, tile, WIDE, TILE)
        start += TILE


@device
def _describe_slots(state, routing, weights, token, rank, row, block, regions):
    """Flat layout: the token's slots on that rank, as local expert numbers and weights."""
    topk = word(routing, protocol.TOPK)
    experts = word(routing, protocol.EXPERT) + 4 * token * topk
    index_bytes = word(routing, protocol.INDEX_BYTES)
    index = block + word(regions, protocol.R_INDEX) + index_bytes * row * topk
    weight = block + word(regions, protocol.R_WEIGHT) + 4 * row * topk
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
def _describe_arrival(state, routing, weights, token, rank, row, arrivals, regions):
    """What the receiver needs to expand a row: the places of the token's experts there, and their weights."""
    topk, base = word(routing, protocol.TOPK), word(routing, protocol.BASE)
    store32(arrivals + word(regions, protocol.R_TOKEN) + 4 * row, token)
    for slot in range(topk):
        at = 4 * (token * topk + slot)
        expert = load32(word(routing, protocol.EXPERT) + at).to(tl.int64)
        to, there = 4 * (row * topk + slot), tl.cast(-1, tl.int32)
        if expert >= 0:
            if load32(word(state, protocol.OWNER) + 4 * expert) == rank:
                there = load32(base + 4 * expert) + load32(word(routing, protocol.POSITION) + at)
                if is_dropped(state, there):
                    there = tl.cast(-1, tl.int32)
                elif weights != 0:
                    weight = slot_weight(routing, weights, token, slot)
                    store_float(arrivals + word(regions, protocol.R_WEIGHT) + to, weight)
        store32(arrivals + word(regions, protocol.R_INDEX) + to, there)


@device
def _describe_rows(ctx, state, routing, weights, token, places, epoch, EXPANDED: tl.constexpr, NETWORK: tl.constexpr):
    """Writes what goes with a token's rows: which token it is, weights, and by rank the slots."""
    layout = word(state, protocol.LAYOUT)
    for k in range(places):
        rank, row = place(ctx, state, routing, token, k, word(state, protocol.IS_BY_RANK))
        if rank >= 0:
            block = destination(ctx, state, rank, epoch, EXPANDED)
            regions = state + 8 * (protocol.ARRIVED_TOKEN if EXPANDED else protocol.TOKEN_REGION)
            if NETWORK != "none":
                if base_of(state, rank) == 0:
                    block, regions = departures(ctx, state), state + 8 * protocol.DEPARTING
                    row = departing_row(ctx, state, routing, token, k, word(state, protocol.IS_BY_RANK))
            if EXPANDED:
                _describe_arrival(state, routing, weights, token, rank, row, block, regions)
            else:
                store32(block + word(regions, protocol.R_TOKEN) + 4 * row, token)
                if layout == protocol.FLAT:
                    _describe_slots(state, routing, weights, token, rank, row, block, regions)
                elif weights != 0:
                    weight = slot_weight(routing, weights, token, k)
                    store_float(block + word(regions, protocol.R_WEIGHT) + 4 * row, weight)


@device
def _zero_padding(state, routing, tensors, num_tensors, me, size, at, block, EXPANDED: tl.constexpr):
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
    padding = tl.maximum(tl.minimum(padding, word(state, protocol.ROW_LIMIT) - row), 0)
    for i in range(num_tensors):
        tensor = tensors + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        offset = word(tensor, protocol.T_EXPANDED) if EXPANDED else word(tensor, protocol.T_OFFSET)
        zero_bytes(block + offset + row * num_bytes, padding * num_bytes)
    zero_bytes(block + word(state, protocol.WEIGHT_REGION) + 4 * row, 4 * padding)
    for i in range(padding):
        store32(block + word(state, protocol.TOKEN_REGION) + 4 * (row + i), -1)


@device
def _mark_tail(state, routing, tensors, num_tensors, me, block, share, shares, EXPANDED: tl.constexpr):
    """Marks every n-th row of this rank's block past its last one, or zeroes them too."""
    first, is_flat = load32(word(routing, protocol.ROWS_OF) + 4 * me), word(state, protocol.LAYOUT) == protocol.FLAT
    topk, item = word(routing, protocol.TOPK), word(routing, protocol.INDEX_BYTES)
    for row in range(first + share, word(state, protocol.BLOCK_ROWS), shares):
        store32(block + word(state, protocol.TOKEN_REGION) + 4 * row, -1)
        if is_flat:
            for slot in range(topk):
                at = row * topk + slot
                if item == 8:
                    set_word(block + word(state, protocol.INDEX_REGION), at, -1)
                else:
                    store32(block + word(state, protocol.INDEX_REGION) + 4 * at, -1)
                store_float(block + word(state, protocol.WEIGHT_REGION) + 4 * at, 0.0)
        else:
            store_float(block + word(state, protocol.WEIGHT_REGION) + 4 * row, 0.0)
        if word(state, protocol.TAIL) == protocol.ZERO:
            for i in range(num_tensors):
                tensor = tensors + 8 * protocol.TENSOR_WORDS * i
                num_bytes = word(tensor, protocol.T_ROW_BYTES)
                offset = word(tensor, protocol.T_EXPANDED) if EXPANDED else word(tensor, protocol.T_OFFSET)
                zero_bytes(block + offset + row * num_bytes, num_bytes)


@device
def _send(ctx, args, state, routing, tensors, weights, block, epoch, share, shares,
          X: tl.constexpr, SCALES: tl.constexpr, EXPANDED: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Phase 2 of one program."""
    me, size, num_tensors = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.NUM_TENSORS)
    places = num_places(ctx, routing, word(state, protocol.IS_BY_RANK))
    for token in range(share, word(routing, protocol.NUM_TOKENS), shares):
        if SCALES is None:
            for i in range(num_tensors):
                tensor = tensors + 8 * protocol.TENSOR_WORDS * i
                if _is_wide(tensor):
                    _send_row(ctx, state, routing, tensor, token, places, epoch, EXPANDED, True, TILE_BYTES, NETWORK)
                else:
                    _send_row(
                        ctx, state, routing, tensor, token, places, epoch, EXPANDED, False, NARROW_TILE_BYTES, NETWORK
                    )
        elif _is_wide(tensors):
            send_quantized_row(
                ctx, state, routing, tensors, token, places, epoch, X, SCALES, EXPANDED, True, TILE_BLOCKS, NETWORK
            )
        else:
            send_quantized_row(
                ctx, state, routing, tensors, token, places, epoch, X, SCALES, EXPANDED, False, NARROW_TILE_BLOCKS,
                NETWORK,
            )  # fmt: skip
        _describe_rows(ctx, state, routing, weights, token, places, epoch, EXPANDED, NETWORK)
    if word(state, protocol.LAYOUT) == protocol.CONTIGUOUS:
        if word(state, protocol.ALIGNMENT) > 1:
            own, starts = own_block(ctx, state, block), word(state, protocol.ORDER_START)
            first, end = load32(starts + 4 * me), load32(starts + 4 * (me + 1))
            for at in range(first + share, end, shares):
                _zero_padding(state, routing, tensors, num_tensors, me, size, tl.cast(at, tl.int64), own, EXPANDED)
    if word(state, protocol.TAIL) != protocol.UNDEFINED:
        own = own_block(ctx, state, block)
        _mark_tail(state, routing, tensors, num_tensors, me, own, share, shares, EXPANDED)


@device
def _deliver(ctx, args, state, routing, tensors, weights, epoch, RANKS: tl.constexpr, EXPANDED: tl.constexpr,
             NETWORK: tl.constexpr):  # fmt: skip
    """Tells every peer that its rows are there, once they are."""
    if NETWORK != "none":
        for rank in range(word(ctx, control.SIZE)):
            if base_of(state, rank) == 0:
                send_departures(ctx, args, state, routing, tensors, weights, epoch, rank, EXPANDED, NETWORK)
        quiet(ctx, NETWORK)
    raise_everywhere(ctx, state, protocol.ROWS, epoch, RANKS, NETWORK)


@kernel("dispatch", programs=lambda shares: shares + 2, reports=True)
def dispatch(ctx, args, fingerprint, routing, tensors, weights, block, c4, send_only, EXPERTS: tl.constexpr,
             RANKS: tl.constexpr, X: tl.constexpr, SCALES: tl.constexpr, EXPANDED: tl.constexpr,
             NETWORK: tl.constexpr):  # fmt: skip
    """Ends with CAPACITY on all ranks, before any row is sent, if some rank's rows are too many."""
    program, status = enter(ctx, fingerprint, NETWORK)
    shares = (tl.num_programs(0) - 1) // 2 if EXPANDED else tl.num_programs(0) - 2
    state, me = word(args, protocol.STATE), word(ctx, control.RANK)
    epoch = word(state, protocol.DISPATCH_EPOCH) + 1
    if program == 0:
        if status == control.OK:
            latency = word(args, protocol.LATENCY) != 0
            status = _meet_peers(ctx, fingerprint, state, routing, block, latency, epoch, EXPERTS, RANKS, NETWORK)
        announce(state, protocol.DISPATCH_PHASE, epoch, status)
    elif status == control.OK:
        status = follow(ctx, fingerprint, state, protocol.DISPATCH_PHASE, epoch, me, sites.DISPATCH_GRANT)
        if status == control.OK:
            if program <= shares:
                _send(
                    ctx, args, state, routing, tensors, weights, block, epoch, program - 1, shares, X, SCALES, EXPANDED,
                    NETWORK,
                )  # fmt: skip
                if arrive(state, shares):
                    _deliver(ctx, args, state, routing, tensors, weights, epoch, RANKS, EXPANDED, NETWORK)
            elif send_only == 0:
                share, receivers = program - 1 - shares, tl.num_programs(0) - 1 - shares
                status = receive_rows(
                    ctx, args, fingerprint, state, routing, tensors, block, epoch, share, receivers, RANKS, EXPANDED
                )
    if leave(ctx, status):
        set_word(state, protocol.DISPATCH_EPOCH, epoch)  # the last to leave: all have read the old one
