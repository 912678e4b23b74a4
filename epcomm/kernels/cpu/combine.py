"""Combine: every rank reads the expert outputs of its tokens from their owners' output blocks and sums them.

Roles and phases
  1  all programs, by rank and with weights: push the weights of their share of the tokens to the receivers of the rows;
     the last to finish raises WEIGHTED at every peer.
  2  all programs: copy (or quantise) their share of y into the output block, unless the experts wrote there; by rank:
     put the sum of each token's rows on this rank there instead. The last to finish raises READY at every peer; to
     those on other nodes it puts their rows before.
  3  what `combine_receive` does, here or in a launch of its own.

Edges
  WAR  the weights of combine e - 1 were read by a peer before it raised READY of e - 1, which this rank waited for.
  RAW  WEIGHTED: the peer's weights for the rows that this rank received are in the arrivals.
  WAR  DONE, before staging: every peer has read what the output block held before.
  WAR  DONE of combine e - 1, before rows are put: the peers have read their returns.
  RAW  of phase 3: see combine_receive.py.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.function import call5
from epcomm.device.cpu.memory import copy, load32, word
from epcomm.kernels.cpu.combine_receive import sum_rows
from epcomm.kernels.cpu.counts import base_of, raise_at, wait_for_everyone
from epcomm.kernels.cpu.dispatch_receive import await_readers
from epcomm.kernels.cpu.partial_sums import share_weights, sum_on_this_rank
from epcomm.kernels.cpu.phases import announce, arrive, follow
from epcomm.kernels.cpu.returns import send_returns
from epcomm.kernels.cpu.slots import scales_of
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _stage(ctx, args, state, block, program, num_programs):
    """Copies this program's share of each local expert's rows (flat: of all rows) into the output block."""
    routing, me, size = word(args, protocol.ROUTING), word(ctx, control.RANK), word(ctx, control.SIZE)
    if word(state, protocol.LAYOUT) != protocol.PADDED:
        _stage_rows(args, block, 0, load32(word(routing, protocol.ROWS_OF) + 4 * me), program, num_programs)
        return
    order, order_start = word(state, protocol.ORDER), word(state, protocol.ORDER_START)
    table, columns = word(routing, protocol.TABLE), word(state, protocol.NUM_EXPERTS) + size
    first_expert = load32(order_start + 4 * me)
    for at in range(first_expert, load32(order_start + 4 * (me + 1))):
        rows = 0
        for source in range(size):
            rows += load32(table + 4 * (source * columns + load32(order + 4 * at)))
        start = (at - first_expert) * size * word(state, protocol.MAX_TOKENS)
        _stage_rows(args, block, start, rows, program, num_programs)


@device
def _stage_rows(args, block, start, num_rows, program, num_programs):
    first, last = start + num_rows * program // num_programs, start + num_rows * (program + 1) // num_programs
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
        num_bytes, stride = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_STRIDE)
        source, to = word(tensor, protocol.T_ADDRESS), block + word(tensor, protocol.T_OFFSET)
        quantize = word(tensor, protocol.T_QUANTIZE)
        if quantize != 0:
            columns, argument = word(tensor, protocol.T_ELEMENTS), word(tensor, protocol.T_QUANTIZE_ARGUMENT)
            for row in range(first, last):
                codes = to + row * num_bytes
                call5(quantize, source + row * stride, codes, scales_of(codes, columns), columns, argument)
        elif stride == num_bytes:
            copy(to + first * num_bytes, source + first * num_bytes, (last - first) * num_bytes)
        else:
            for row in range(first, last):
                copy(to + row * num_bytes, source + row * stride, num_bytes)


@device
def _fill_block(ctx, args, state, epoch, program, num_programs):
    """Phase 2, for what the experts left elsewhere."""
    if program == 0:
        read = word(args, protocol.STAGE_AFTER)
        status = wait_for_everyone(ctx, state, protocol.DONE, read, sites.COMBINE_READ)  # WAR
        announce(state, protocol.COMBINE_PHASE, epoch, status)
    else:
        status = follow(ctx, state, protocol.COMBINE_PHASE, epoch, sites.COMBINE_READ)
    if status != control.OK:
        return status
    offset = word(state, protocol.OUTPUTS) + word(args, protocol.BLOCK) * word(state, protocol.OUTPUT_BYTES)
    block = base_of(state, word(ctx, control.RANK)) + offset
    if word(args, protocol.BY_RANK) and word(state, protocol.LAYOUT) != protocol.FLAT:
        return sum_on_this_rank(ctx, args, state, block, epoch, program, num_programs)
    _stage(ctx, args, state, block, program, num_programs)
    return control.OK


@device
def _deliver(ctx, args, state, epoch):
    """Tells every peer that its rows are in the output block or, on another node, in its returns."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    value = epoch << protocol.PAYLOAD_BITS | word(args, protocol.BLOCK)
    if word(state, protocol.DEPARTURES):
        status = await_readers(ctx, state, sites.COMBINE_READ)  # WAR
        if status != control.OK:
            return status
    for distance in range(size):
        rank = (me + distance) % size
        if base_of(state, rank) == 0:
            send_returns(ctx, args, state, rank)
        raise_at(ctx, state, rank, protocol.READY + (epoch & 1), value)
    return control.OK


@kernel("combine")
def combine(ctx, args, program, num_programs):
    state = word(args, protocol.STATE)
    epoch = word(state, protocol.COMBINE_EPOCH) + 1
    if word(args, protocol.BY_RANK) and word(args, protocol.HAS_WEIGHTS):
        share_weights(ctx, args, state, epoch, program, num_programs)
    if word(args, protocol.STAGE_AFTER) >= 0:
        status = _fill_block(ctx, args, state, epoch, program, num_programs)
        if status != control.OK:
            return status
    if arrive(state, num_programs):
        status = _deliver(ctx, args, state, epoch)
        if status != control.OK:
            return status
    if word(args, protocol.SEND_ONLY):
        return control.OK
    return sum_rows(ctx, args, epoch, program, num_programs)
