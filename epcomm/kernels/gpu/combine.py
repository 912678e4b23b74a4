"""Combine: every rank reads the expert outputs of its tokens from their owners' output blocks and sums them.

Roles and phases, by program
  1  the first half: copy their share of y into the output block, unless the experts wrote there; the last to finish
     raises READY at every peer.
  2  the second half: wait for every peer's READY, then sum the rows of every n-th token, in slot order (flat: in rank
     order); the last to finish raises DONE at every peer.

Edges
  WAR  DONE, before staging: every peer has read what the output block held before.
  RAW  READY: the peer's expert outputs are in the output block whose number it carries.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, load32, set_word, word
from epcomm.device.gpu.waiting import enter, leave, meet_everyone, wait_for_everyone
from epcomm.kernels.gpu.counts import base_of, raise_everywhere, signal_word
from epcomm.kernels.gpu.phases import arrive
from epcomm.kernels.gpu.row_sum import sum_token, write_slots
from epcomm.kernels.gpu.rows import num_places
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _await_readers(ctx, fingerprint, state, last, RANKS: tl.constexpr):
    """Waits until every peer has read combine `last`, the latest: the host's count doesn't know of graph replays."""
    read = last
    if last == word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
        read = tl.cast(0, tl.int64)  # there was no combine in this generation
    done = signal_word(ctx, state, protocol.DONE, word(ctx, control.RANK), 0)
    return wait_for_everyone(ctx, fingerprint, done, read, sites.COMBINE_READ, RANKS)  # WAR


@device
def _stage_rows(args, tensors, block, start, num_rows, share, shares):
    """Copies this share of rows start to start + num_rows - 1."""
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = tensors + 8 * protocol.TENSOR_WORDS * i
        num_bytes, stride = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_STRIDE)
        source, to = word(tensor, protocol.T_ADDRESS), block + word(tensor, protocol.T_OFFSET)
        for row in range(start + share, start + num_rows, shares):
            copy(to + row * num_bytes, source + row * stride, num_bytes)


@device
def _stage(ctx, args, state, routing, tensors, output, share, shares):
    """Copies this share of each local expert's rows (contiguous and flat: of all rows) into the output block."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    block = base_of(state, me) + word(state, protocol.OUTPUTS) + output * word(state, protocol.OUTPUT_BYTES)
    if word(state, protocol.LAYOUT) != protocol.PADDED:
        num_rows = load32(word(routing, protocol.ROWS_OF) + 4 * me).to(tl.int64)
        _stage_rows(args, tensors, block, tl.cast(0, tl.int64), num_rows, share, shares)
    else:
        starts, table = word(state, protocol.ORDER_START), word(routing, protocol.TABLE)
        columns = word(state, protocol.NUM_EXPERTS) + size
        first, end = load32(starts + 4 * me).to(tl.int64), load32(starts + 4 * (me + 1)).to(tl.int64)
        for at in range(first, end):
            expert = load32(word(state, protocol.ORDER) + 4 * at).to(tl.int64)
            rows = tl.cast(0, tl.int64)
            for source in range(size):
                rows += load32(table + 4 * (source * columns + expert)).to(tl.int64)
            start = (at - first) * size * word(state, protocol.MAX_TOKENS)
            _stage_rows(args, tensors, block, start, rows, share, shares)


@device
def _combine_token(ctx, state, routing, weights, tensor, token, places, epoch, reduce,
                   IN: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    if reduce:
        sum_token(ctx, state, routing, weights, tensor, token, places, epoch, IN, OUT, WIDE)
    else:
        write_slots(ctx, state, routing, weights, tensor, token, places, epoch, IN, OUT, WIDE)


@device
def _is_wide(tensor, OUT: tl.constexpr):
    """True if rows, results and biases of a tensor can all be read and written in 16-byte accesses."""
    bits = word(tensor, protocol.T_ROW_BYTES) | (word(tensor, protocol.T_ELEMENTS) * OUT.itemsize)
    bits |= word(tensor, protocol.T_OUT) | word(tensor, protocol.T_OUT_STRIDE)
    bits |= word(tensor, protocol.T_BIAS) | word(tensor, protocol.T_BIAS_STRIDE)
    return (bits & 15) == 0


@device
def _sum_rows(ctx, args, state, routing, weights, tensors, epoch, share, shares, IN: tl.constexpr, OUT: tl.constexpr):
    """Phase 2 of one program, after its wait."""
    places, reduce = num_places(ctx, state, routing), word(args, protocol.REDUCE) != 0
    for token in range(share, word(routing, protocol.NUM_TOKENS), shares):
        for i in tl.static_range(len(IN)):
            tensor = tensors + 8 * protocol.TENSOR_WORDS * i
            if _is_wide(tensor, OUT[i]):
                _combine_token(
                    ctx, state, routing, weights, tensor, token, places, epoch, reduce, IN[i], OUT[i], True
                )
            else:
                _combine_token(
                    ctx, state, routing, weights, tensor, token, places, epoch, reduce, IN[i], OUT[i], False
                )


@kernel("combine", programs=lambda shares: 2 * shares, max_registers=168)
def combine(ctx, args, fingerprint, routing, tensors, weights, output, stage_after, c5,
            IN: tl.constexpr, OUT: tl.constexpr, RANKS: tl.constexpr):  # fmt: skip
    """IN and OUT: dtypes of the expert outputs and of the results, one of each per tensor."""
    program, status = enter(ctx, fingerprint)
    state, shares = word(args, protocol.STATE), tl.num_programs(0) // 2
    epoch = word(state, protocol.COMBINE_EPOCH) + 1
    kind = protocol.READY + (epoch & 1)
    if program < shares:
        if stage_after >= 0:
            if status == control.OK:
                status = _await_readers(ctx, fingerprint, state, epoch - 1, RANKS)
            if status == control.OK:
                _stage(ctx, args, state, routing, tensors, output, program, shares)
        if status == control.OK:
            if arrive(state, shares):
                raise_everywhere(ctx, state, kind, (epoch << protocol.PAYLOAD_BITS) | output, RANKS)
    else:
        ready, value = signal_word(ctx, state, kind, word(ctx, control.RANK), 0), epoch << protocol.PAYLOAD_BITS
        status = meet_everyone(ctx, fingerprint, ready, value, sites.COMBINE_READY, RANKS)  # RAW
        if status == control.OK:
            _sum_rows(ctx, args, state, routing, weights, tensors, epoch, program - shares, shares, IN, OUT)
            if arrive(state, shares):
                raise_everywhere(ctx, state, protocol.DONE, epoch, RANKS)
    if leave(ctx, status):
        set_word(state, protocol.COMBINE_EPOCH, epoch)  # the last to leave: all have read the old one
