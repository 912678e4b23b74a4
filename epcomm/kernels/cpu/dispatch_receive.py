"""The receiving half of a dispatch: waits for the peers' rows and completes this rank's receive block.

Roles
  program 0: zero the padding of its own block; wait for every peer's ROWS, and for DONE of the last combine.
  all programs, by rank: wait for every peer's ROWS, then expand their share of what arrived.

Edges
  RAW  ROWS: the peer's rows for this rank are delivered.
  WAR  DONE: the peer has read the output blocks of earlier combines; they may be written again.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.memory import copy, copy_streaming, fence, fill_with_ones, load32, store32, word, zero_bytes
from epcomm.kernels.cpu.counts import base_of, wait_for_everyone
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _own_block(ctx, args, state):
    """Address of the block that this rank granted."""
    offset = word(state, protocol.BLOCKS) + word(args, protocol.BLOCK) * word(state, protocol.BLOCK_BYTES)
    return base_of(state, word(ctx, control.RANK)) + offset


@device
def _zero_padding(ctx, args, state, routing):
    """Contiguous layout: zeroes the rows between each local expert's last and its aligned end in this rank's block."""
    me, size, num_experts = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NUM_EXPERTS)
    order, order_start = word(state, protocol.ORDER), word(state, protocol.ORDER_START)
    table, alignment = word(routing, protocol.TABLE), word(state, protocol.ALIGNMENT)
    block, by_rank = _own_block(ctx, args, state), word(args, protocol.BY_RANK)
    row = 0
    for at in range(load32(order_start + 4 * me), load32(order_start + 4 * (me + 1))):
        for source in range(size):
            row += load32(table + 4 * (source * (num_experts + size) + load32(order + 4 * at)))
        padding = max(0, min(-row % alignment, word(state, protocol.ROW_LIMIT) - row))
        for i in range(word(args, protocol.NUM_TENSORS)):
            tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
            num_bytes = word(tensor, protocol.T_ROW_BYTES)
            offset = word(tensor, protocol.T_EXPANDED) if by_rank else word(tensor, protocol.T_OFFSET)
            zero_bytes(block + offset + row * num_bytes, padding * num_bytes)
        zero_bytes(block + word(state, protocol.WEIGHT_REGION) + 4 * row, 4 * padding)
        for i in range(padding):
            store32(block + word(state, protocol.TOKEN_REGION) + 4 * (row + i), -1)
        row += -row % alignment


@device
def _mark_tail(ctx, args, state, routing):
    """Marks the rows of this rank's block past its last one, or zeroes them too."""
    first, end = load32(word(routing, protocol.ROWS_OF) + 4 * word(ctx, control.RANK)), word(state, protocol.BLOCK_ROWS)
    block, count, by_rank = _own_block(ctx, args, state), end - first, word(args, protocol.BY_RANK)
    per_row = 1
    if word(state, protocol.LAYOUT) == protocol.FLAT:
        per_row = word(routing, protocol.TOPK)
        item = word(routing, protocol.INDEX_BYTES)
        fill_with_ones(block + word(state, protocol.INDEX_REGION) + item * per_row * first, item * per_row * count)
    fill_with_ones(block + word(state, protocol.TOKEN_REGION) + 4 * first, 4 * count)
    zero_bytes(block + word(state, protocol.WEIGHT_REGION) + 4 * per_row * first, 4 * per_row * count)
    if word(state, protocol.TAIL) == protocol.ZERO:
        for i in range(word(args, protocol.NUM_TENSORS)):
            tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
            num_bytes = word(tensor, protocol.T_ROW_BYTES)
            is_expanded = by_rank and word(state, protocol.LAYOUT) != protocol.FLAT
            offset = word(tensor, protocol.T_EXPANDED) if is_expanded else word(tensor, protocol.T_OFFSET)
            zero_bytes(block + offset + first * num_bytes, count * num_bytes)


@device
def await_readers(ctx, state, site):
    """Waits until every peer has read the rows of the last combine."""
    combined = word(state, protocol.COMBINE_EPOCH)
    if combined == word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
        combined = 0  # there was no combine in this generation
    return wait_for_everyone(ctx, state, protocol.DONE, combined, site)  # WAR


@device
def _expand(ctx, args, state, routing, program, num_programs):
    """Copies this program's share of the arrived rows to the places of their experts in the receive block."""
    topk, num_arrived = word(routing, protocol.TOPK), word(routing, protocol.NUM_ARRIVED)
    block = _own_block(ctx, args, state)
    arrivals = base_of(state, word(ctx, control.RANK)) + word(state, protocol.ARRIVALS)
    tokens, places = arrivals + word(state, protocol.ARRIVED_TOKEN), arrivals + word(state, protocol.ARRIVED_PLACE)
    weights = arrivals + word(state, protocol.ARRIVED_WEIGHT)
    deliver_weights = word(args, protocol.HAS_WEIGHTS)
    moved = word(routing, protocol.TOTAL_ROWS) * word(args, protocol.ROW_BYTES_TOTAL)
    streaming = moved > word(state, protocol.STREAMING_BYTES)
    for row in range(num_arrived * program // num_programs, num_arrived * (program + 1) // num_programs):
        for slot in range(topk):
            at = 4 * (row * topk + slot)
            # a number from a peer, which must not lead outside of the block
            place = min(load32(places + at), word(state, protocol.BLOCK_ROWS) - 1)
            store32(word(routing, protocol.PLACES) + at, place)
            if place >= 0:
                for i in range(word(args, protocol.NUM_TENSORS)):
                    tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
                    num_bytes = word(tensor, protocol.T_ROW_BYTES)
                    source = arrivals + word(tensor, protocol.T_OFFSET) + row * num_bytes
                    to = block + word(tensor, protocol.T_EXPANDED) + place * num_bytes
                    if streaming:
                        copy_streaming(to, source, num_bytes)
                    else:
                        copy(to, source, num_bytes)
                store32(block + word(state, protocol.TOKEN_REGION) + 4 * place, load32(tokens + 4 * row))
                if deliver_weights:
                    store32(block + word(state, protocol.WEIGHT_REGION) + 4 * place, load32(weights + at))
    if streaming:
        fence()


@device
def receive_rows(ctx, args, epoch, program, num_programs):
    """This program's part in the receiving half of dispatch `epoch`."""
    state, routing = word(args, protocol.STATE), word(args, protocol.ROUTING)
    is_expanded = word(args, protocol.BY_RANK) and word(state, protocol.LAYOUT) != protocol.FLAT
    if program == 0:
        if word(state, protocol.LAYOUT) == protocol.CONTIGUOUS and word(state, protocol.ALIGNMENT) > 1:
            _zero_padding(ctx, args, state, routing)
        if word(state, protocol.TAIL) != protocol.UNDEFINED:
            _mark_tail(ctx, args, state, routing)
    elif not is_expanded:
        return control.OK
    status = wait_for_everyone(ctx, state, protocol.ROWS, epoch, sites.DISPATCH_ROWS)  # RAW
    if status == control.OK and is_expanded:
        _expand(ctx, args, state, routing, program, num_programs)
    if status == control.OK and program == 0:
        status = await_readers(ctx, state, sites.DISPATCH_READ)
    return status


@kernel("dispatch_receive")
def dispatch_receive(ctx, args, program, num_programs):
    """For a dispatch that only sent."""
    return receive_rows(ctx, args, word(word(args, protocol.STATE), protocol.DISPATCH_EPOCH), program, num_programs)
