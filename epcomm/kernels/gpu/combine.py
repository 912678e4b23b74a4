"""Combine: every rank reads the expert outputs of its tokens from their owners' output blocks and sums them.

Roles and phases, by program; n in each
  1  SUMMED_HERE, with weights: push the weights of every n-th token to the receivers of its rows; the last to finish
     raises WEIGHTED at every peer.
  2  copy their share of y into the output block, unless the experts wrote there (SCALES: quantise it, to such scales);
     SUMMED_HERE: put the sum of every n-th token's rows on this rank there instead. The last to finish raises READY at
     every peer; to those on other nodes it puts their rows before.
  3  what `combine_receive` does, here or in a launch of its own.

Edges
  WAR  the weights of combine e - 1 were read by a peer before it raised READY of e - 1, which this rank waited for.
  RAW  WEIGHTED: the peer's weights for the rows that this rank received are in the arrivals.
  WAR  DONE, before staging: every peer has read what the output block held before.
  WAR  DONE of combine e - 1, before rows are put: the peers have read their returns.
  RAW  of phase 3: see combine_receive.py.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, load32, set_word, word
from epcomm.device.gpu.network import quiet
from epcomm.device.gpu.waiting import enter, leave, meet_everyone, wait_for_everyone
from epcomm.kernels.gpu.combine_receive import sum_rows
from epcomm.kernels.gpu.counts import base_of, raise_everywhere, signal_word
from epcomm.kernels.gpu.departures import send_weights
from epcomm.kernels.gpu.partial_sums import share_weights, sum_on_this_rank
from epcomm.kernels.gpu.phases import arrive
from epcomm.kernels.gpu.quantized_sums import stage_quantized
from epcomm.kernels.gpu.returns import send_returns
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
def _stage_rows(args, tensors, block, start, num_rows, share, shares, IN: tl.constexpr, SCALES: tl.constexpr):
    """Copies this share of rows start to start + num_rows - 1, or quantises them."""
    if SCALES is None:
        for i in range(word(args, protocol.NUM_TENSORS)):
            tensor = tensors + 8 * protocol.TENSOR_WORDS * i
            num_bytes, stride = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_STRIDE)
            source, to = word(tensor, protocol.T_ADDRESS), block + word(tensor, protocol.T_OFFSET)
            for row in range(start + share, start + num_rows, shares):
                copy(to + row * num_bytes, source + row * stride, num_bytes)
    else:
        for row in range(start + share, start + num_rows, shares):
            stage_quantized(tensors, block, row, IN[0], SCALES)


@device
def _stage(ctx, args, state, routing, tensors, block, share, shares, IN: tl.constexpr, SCALES: tl.constexpr):
    """Copies this share of each local expert's rows (contiguous and flat: of all rows) into the output block."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    if word(state, protocol.LAYOUT) != protocol.PADDED:
        num_rows = load32(word(routing, protocol.ROWS_OF) + 4 * me).to(tl.int64)
        _stage_rows(args, tensors, block, tl.cast(0, tl.int64), num_rows, share, shares, IN, SCALES)
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
            _stage_rows(args, tensors, block, start, rows, share, shares, IN, SCALES)


@device
def _fill_block(ctx, args, fingerprint, state, routing, tensors, output, epoch, share, shares,
                IN: tl.constexpr, RANKS: tl.constexpr, SUMMED_HERE: tl.constexpr, SCALES: tl.constexpr,
                NETWORK: tl.constexpr):  # fmt: skip
    """Phase 2, for what the experts left elsewhere."""
    me = word(ctx, control.RANK)
    block = base_of(state, me) + word(state, protocol.OUTPUTS) + output * word(state, protocol.OUTPUT_BYTES)
    status = _await_readers(ctx, fingerprint, state, epoch - 1, RANKS)
    if SUMMED_HERE:
        if (status == control.OK) & (word(args, protocol.HAS_WEIGHTS) != 0):
            weighted = signal_word(ctx, state, protocol.WEIGHTED, me, 0)
            status = meet_everyone(ctx, fingerprint, weighted, epoch, sites.COMBINE_WEIGHTED, RANKS, NETWORK)  # RAW
        if status == control.OK:
            sum_on_this_rank(ctx, args, state, routing, tensors, block, share, shares, IN, SCALES)
    else:
        if status == control.OK:
            _stage(ctx, args, state, routing, tensors, block, share, shares, IN, SCALES)
    return status


@device
def _deliver(ctx, args, fingerprint, state, routing, tensors, output, epoch, RANKS: tl.constexpr,
             NETWORK: tl.constexpr):  # fmt: skip
    """Tells every peer that its rows are in the output block or, on another node, in its returns."""
    status = tl.cast(control.OK, tl.int64)
    if NETWORK != "none":
        status = _await_readers(ctx, fingerprint, state, epoch - 1, RANKS)  # WAR
        if status == control.OK:
            for rank in range(word(ctx, control.SIZE)):
                if base_of(state, rank) == 0:
                    send_returns(ctx, args, state, routing, tensors, output, rank, NETWORK)
            quiet(ctx, NETWORK)
    if status == control.OK:
        value = (epoch << protocol.PAYLOAD_BITS) | output
        raise_everywhere(ctx, state, protocol.READY + (epoch & 1), value, RANKS, NETWORK)
    return status


@device
def _deliver_weights(ctx, state, routing, epoch, RANKS: tl.constexpr, NETWORK: tl.constexpr):
    """Tells every peer that the weights of the rows that it has are there, once they are."""
    if NETWORK != "none":
        for rank in range(word(ctx, control.SIZE)):
            if base_of(state, rank) == 0:
                send_weights(ctx, state, routing, rank, NETWORK)
        quiet(ctx, NETWORK)
    raise_everywhere(ctx, state, protocol.WEIGHTED, epoch, RANKS, NETWORK)


@kernel("combine", programs=lambda shares: 2 * shares, max_registers=168)
def combine(ctx, args, fingerprint, routing, tensors, weights, output, stage_after, send_only,
            IN: tl.constexpr, OUT: tl.constexpr, RANKS: tl.constexpr, SUMMED_HERE: tl.constexpr,
            SCALES: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """IN and OUT: dtypes of the expert outputs and of the results, one of each per tensor. SCALES: of one, or None."""
    program, status = enter(ctx, fingerprint, NETWORK)
    shares = tl.num_programs(0) // (3 if SUMMED_HERE else 2)
    state, phase, share = word(args, protocol.STATE), program // shares, program % shares
    epoch = word(state, protocol.COMBINE_EPOCH) + 1
    if SUMMED_HERE:
        if phase == 0:
            if word(args, protocol.HAS_WEIGHTS):  # else the next phase doesn't wait, and would arrive among these
                share_weights(ctx, state, routing, weights, share, shares, NETWORK)
                if arrive(state, shares):
                    _deliver_weights(ctx, state, routing, epoch, RANKS, NETWORK)
        phase -= 1
    if phase == 0:
        if stage_after >= 0:
            status = _fill_block(
                ctx, args, fingerprint, state, routing, tensors, output, epoch, share, shares, IN, RANKS, SUMMED_HERE,
                SCALES, NETWORK,
            )  # fmt: skip
        if status == control.OK:
            if arrive(state, shares):
                status = _deliver(ctx, args, fingerprint, state, routing, tensors, output, epoch, RANKS, NETWORK)
    elif phase == 1:
        if send_only == 0:
            status = sum_rows(
                ctx, args, fingerprint, state, routing, weights, tensors, epoch, share, shares, IN, OUT, RANKS, SCALES,
                NETWORK,
            )  # fmt: skip
    if leave(ctx, status):
        if send_only == 0:
            set_word(state, protocol.COMBINE_EPOCH, epoch)  # the last to leave: all have read the old one
