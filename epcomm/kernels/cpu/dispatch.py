"""Dispatch: every rank grants its peers a receive block, then each row is copied to its final place there.

Roles and phases
  1  program 0: grant a block to every peer (in latency mode with this rank's counts); wait for every peer's grant.
  2  all programs: copy the rows of their share of the tokens, or quantise each once and copy that; the last to finish
     raises ROWS at every peer. Rows for other nodes are packed in the departures; the last puts them before it raises.
  3  what `dispatch_receive` does, here or in a launch of its own.

Rows that travel by rank go to the peer's arrivals, unless the layout is flat; the grant is one of those, too.

Edges
  WAR  GRANT: the receiver's block, and its arrivals, are free. It carries the block's number.
  WAR  GRANT, again: what the last dispatch put has arrived, so the departures are free.
  RAW  GRANT, latency mode: the peer's counts are in the table (its parity: see counts.py).
  RAW, WAR  of phase 3: see dispatch_receive.py.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.function import call5
from epcomm.device.cpu.memory import (
    copy,
    copy_streaming,
    fence,
    load32,
    prefetch_for_writing,
    set_word,
    store32,
    store_float,
    word,
)
from epcomm.device.cpu.waiting import meet
from epcomm.kernels.cpu.counts import base_of, place_rows, push_counts, raise_at, signal_word
from epcomm.kernels.cpu.departures import departures, granted_offset, send_departures
from epcomm.kernels.cpu.dispatch_receive import receive_rows
from epcomm.kernels.cpu.phases import announce, arrive, follow
from epcomm.kernels.cpu.slots import is_dropped, slot_weight
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites

_SHORT_ROW_BYTES = 1024  # of a tensor such as scales


@device
def _meet_peers(ctx, args, state, routing, epoch):
    """Phase 1. In latency mode the counts ride along."""
    me, size, latency = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.LATENCY)
    kind = protocol.GRANT + (epoch & 1)
    for distance in range(size):
        rank = (me + distance) % size
        if latency:
            push_counts(ctx, state, routing, rank, epoch)
        raise_at(ctx, state, rank, kind, epoch << protocol.PAYLOAD_BITS | word(args, protocol.BLOCK))
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
def _tensors(args, state, program):
    """The table of what is copied: the caller's, or one of a token's quantised row in this program's scratch memory.

    The latter's records are of the codes and of the scales. Their stride is 0: it is the same row for all tokens.
    """
    given = word(args, protocol.TENSORS)
    if word(given, protocol.T_QUANTIZE) == 0:
        return given
    scratch = word(state, protocol.SCRATCH) + program * word(state, protocol.SCRATCH_BYTES)
    address = scratch + 8 * protocol.TENSOR_WORDS * 2
    for i in range(2):
        record, tensor = 8 * protocol.TENSOR_WORDS * i, scratch + 8 * protocol.TENSOR_WORDS * i
        address += -address & (control.LINE - 1)
        for at in range(protocol.TENSOR_WORDS):
            set_word(tensor, at, word(given + record, at))
        set_word(tensor, protocol.T_ADDRESS, address)
        set_word(tensor, protocol.T_STRIDE, 0)
        address += word(tensor, protocol.T_ROW_BYTES)
    return scratch


@device
def _quantize_row(args, tensors, token):
    """Quantises a token's row, into scratch memory."""
    given = word(args, protocol.TENSORS)
    call5(
        word(given, protocol.T_QUANTIZE),
        word(given, protocol.T_ADDRESS) + token * word(given, protocol.T_STRIDE),
        word(tensors, protocol.T_ADDRESS),
        word(tensors + 8 * protocol.TENSOR_WORDS, protocol.T_ADDRESS),
        word(given, protocol.T_ELEMENTS),
        word(given, protocol.T_QUANTIZE_ARGUMENT),
    )


@device
def _copy_row(tensors, num_tensors, token, row, block, offset, streaming):
    """Copies a token's row of every tensor to `row` of `block`; `offset` is the word that says where there."""
    if streaming:
        # short rows, such as scales, don't fill lines: these are fetched while the first tensor's row is on its way
        for i in range(1, num_tensors):
            tensor = tensors + 8 * protocol.TENSOR_WORDS * i
            num_bytes = word(tensor, protocol.T_ROW_BYTES)
            if num_bytes <= _SHORT_ROW_BYTES:
                prefetch_for_writing(block + word(tensor, offset) + row * num_bytes, num_bytes)
    for i in range(num_tensors):
        tensor = tensors + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        source = word(tensor, protocol.T_ADDRESS) + token * word(tensor, protocol.T_STRIDE)
        to = block + word(tensor, offset) + row * num_bytes
        if streaming and (num_bytes > _SHORT_ROW_BYTES or num_bytes & 63 == 0):
            copy_streaming(to, source, num_bytes)
        else:
            copy(to, source, num_bytes)


@device
def _send_per_expert(ctx, args, state, epoch, program, first, last, streaming):
    """One row per (token, expert): contiguous and padded layouts."""
    routing, topk = word(args, protocol.ROUTING), word(word(args, protocol.ROUTING), protocol.TOPK)
    experts, positions, base = (
        word(routing, protocol.EXPERT),
        word(routing, protocol.POSITION),
        word(routing, protocol.BASE),
    )
    owner, departure = word(state, protocol.OWNER), word(routing, protocol.DEPARTURE)
    weights = word(args, protocol.WEIGHTS)
    deliver_weights = weights != 0
    tensors, num_tensors = _tensors(args, state, program), word(args, protocol.NUM_TENSORS)
    quantizes = tensors != word(args, protocol.TENSORS)
    for token in range(first, last):
        to_quantize = quantizes  # once, if it goes anywhere
        for slot in range(topk):
            expert = load32(experts + 4 * (token * topk + slot))
            if expert >= 0:
                row = load32(base + 4 * expert) + load32(positions + 4 * (token * topk + slot))
                if is_dropped(state, row):
                    continue
                if to_quantize:
                    _quantize_row(args, tensors, token)
                    to_quantize = False
                rank = load32(owner + 4 * expert)
                block, offset, regions = base_of(state, rank), protocol.T_OFFSET, state + 8 * protocol.TOKEN_REGION
                if block != 0:
                    block += granted_offset(ctx, state, rank, epoch)
                else:
                    block, offset = departures(ctx, state), protocol.T_DEPARTURE
                    regions = state + 8 * protocol.DEPARTING
                    row = load32(departure + 4 * expert) + load32(positions + 4 * (token * topk + slot))
                _copy_row(tensors, num_tensors, token, row, block, offset, streaming)
                store32(block + word(regions, protocol.R_TOKEN) + 4 * row, token)
                if deliver_weights:
                    weight = slot_weight(routing, weights, token, slot, topk)
                    store_float(block + word(regions, protocol.R_WEIGHT) + 4 * row, weight)


@device
def _describe_flat(ctx, args, state, token, rank, row, block, regions):
    """Flat layout: what the caller learns of a row, the token's slots on that rank as local experts and weights."""
    routing = word(args, protocol.ROUTING)
    topk, wide = word(routing, protocol.TOPK), word(routing, protocol.INDEX_BYTES) == 8
    experts, owner, local = word(routing, protocol.EXPERT), word(state, protocol.OWNER), word(state, protocol.LOCAL)
    weights = word(args, protocol.WEIGHTS)
    store32(block + word(regions, protocol.R_TOKEN) + 4 * row, token)
    index = block + word(regions, protocol.R_INDEX) + (8 if wide else 4) * row * topk
    weight = block + word(regions, protocol.R_WEIGHT) + 4 * row * topk
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
def _prefetch_description(args, regions, row, block):
    """Fetches what `_describe_flat` will write of the row that comes next: a peer has these lines."""
    routing = word(args, protocol.ROUTING)
    topk, item = word(routing, protocol.TOPK), word(routing, protocol.INDEX_BYTES)
    prefetch_for_writing(block + word(regions, protocol.R_TOKEN) + 4 * row, 4)
    prefetch_for_writing(block + word(regions, protocol.R_INDEX) + item * row * topk, item * topk)
    if word(args, protocol.WEIGHTS) != 0:
        prefetch_for_writing(block + word(regions, protocol.R_WEIGHT) + 4 * row * topk, 4 * topk)


@device
def _describe_arrival(ctx, args, state, token, rank, row, arrivals, regions):
    """What the receiver needs to expand a row: the places of the token's experts there, and their weights."""
    routing, weights = word(args, protocol.ROUTING), word(args, protocol.WEIGHTS)
    topk, owner, base = word(routing, protocol.TOPK), word(state, protocol.OWNER), word(routing, protocol.BASE)
    store32(arrivals + word(regions, protocol.R_TOKEN) + 4 * row, token)
    for slot in range(topk):
        at = token * topk + slot
        expert = load32(word(routing, protocol.EXPERT) + 4 * at)
        place = -1
        if expert >= 0 and load32(owner + 4 * expert) == rank:
            place = load32(base + 4 * expert) + load32(word(routing, protocol.POSITION) + 4 * at)
            if is_dropped(state, place):
                place = -1
            elif weights != 0:
                weight = arrivals + word(regions, protocol.R_WEIGHT) + 4 * (row * topk + slot)
                store_float(weight, slot_weight(routing, weights, token, slot, topk))
        store32(arrivals + word(regions, protocol.R_INDEX) + 4 * (row * topk + slot), place)


@device
def _send_per_rank(ctx, args, state, epoch, program, first, last, streaming):
    """One row per (token, rank), with what goes with it."""
    routing, size, me = word(args, protocol.ROUTING), word(ctx, control.SIZE), word(ctx, control.RANK)
    base = word(routing, protocol.BASE) + 4 * word(state, protocol.NUM_EXPERTS)
    departure = word(routing, protocol.DEPARTURE) + 4 * word(state, protocol.NUM_EXPERTS)
    is_flat = word(state, protocol.LAYOUT) == protocol.FLAT
    tensors, num_tensors = _tensors(args, state, program), word(args, protocol.NUM_TENSORS)
    quantizes = tensors != word(args, protocol.TENSORS)
    for token in range(first, last):
        to_quantize = quantizes  # once, if it goes anywhere
        for distance in range(size):
            rank = (me + distance) % size
            position = load32(word(routing, protocol.RANK_POSITION) + 4 * (token * size + rank))
            if position >= 0:
                row = load32(base + 4 * rank) + position
                if is_flat and is_dropped(state, row):
                    continue
                if to_quantize:
                    _quantize_row(args, tensors, token)
                    to_quantize = False
                block, offset = base_of(state, rank), protocol.T_OFFSET
                regions = state + 8 * (protocol.TOKEN_REGION if is_flat else protocol.ARRIVED_TOKEN)
                if block == 0:
                    block, offset = departures(ctx, state), protocol.T_DEPARTURE
                    regions = state + 8 * protocol.DEPARTING
                    row = load32(departure + 4 * rank) + position
                elif is_flat:
                    block += granted_offset(ctx, state, rank, epoch)
                else:
                    block += word(state, protocol.ARRIVALS)
                if is_flat:
                    if streaming:
                        _prefetch_description(args, regions, row + 1, block)
                    _copy_row(tensors, num_tensors, token, row, block, offset, streaming)
                    _describe_flat(ctx, args, state, token, rank, row, block, regions)
                else:
                    _copy_row(tensors, num_tensors, token, row, block, offset, streaming)
                    _describe_arrival(ctx, args, state, token, rank, row, block, regions)


@device
def _deliver(ctx, args, state, epoch):
    """Tells every peer that its rows are there, once they are."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    for distance in range(size):
        rank = (me + distance) % size
        if base_of(state, rank) == 0:
            send_departures(ctx, args, state, epoch, rank)
        raise_at(ctx, state, rank, protocol.ROWS, epoch)


@kernel("dispatch")
def dispatch(ctx, args, program, num_programs):
    """Returns CAPACITY on all ranks, before any row is sent, if some rank's rows are too many."""
    state, routing = word(args, protocol.STATE), word(args, protocol.ROUTING)
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
    if word(args, protocol.BY_RANK):
        _send_per_rank(ctx, args, state, epoch, program, first, last, streaming)
    else:
        _send_per_expert(ctx, args, state, epoch, program, first, last, streaming)
    if streaming:
        fence()
    if arrive(state, num_programs):
        set_word(state, protocol.DISPATCH_EPOCH, epoch)
        _deliver(ctx, args, state, epoch)
    if word(args, protocol.SEND_ONLY):
        return control.OK
    return receive_rows(ctx, args, epoch, program, num_programs)
