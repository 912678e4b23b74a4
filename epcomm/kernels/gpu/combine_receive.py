"""The receiving half of a combine: sums the rows of this rank's tokens, read from their owners' output blocks.

Roles, all programs: wait for every peer's READY, then sum the rows of every n-th token, in slot order (by rank: in rank
order), in float32 (float64 for float64), rounded once; the last to finish raises DONE at every peer.

Edges
  RAW  READY: the peer's expert outputs (by rank: their sums per token) are in the output block whose number it carries,
       or in the returns if the peer is on another node.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import set_word, word
from epcomm.device.gpu.waiting import enter, leave, meet_everyone
from epcomm.kernels.gpu.counts import raise_everywhere, signal_word
from epcomm.kernels.gpu.phases import arrive
from epcomm.kernels.gpu.quantized_rows import NARROW_TILE_BLOCKS, TILE_BLOCKS
from epcomm.kernels.gpu.quantized_sums import combine_quantized_token
from epcomm.kernels.gpu.row_sum import sum_token, write_slots
from epcomm.kernels.gpu.rows import num_places
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _combine_token(ctx, state, routing, weights, tensor, token, places, by_rank, epoch, reduce,
                   IN: tl.constexpr, OUT: tl.constexpr, WIDE: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    if reduce:
        sum_token(ctx, state, routing, weights, tensor, token, places, by_rank, epoch, IN, OUT, WIDE, NETWORK)
    else:
        write_slots(ctx, state, routing, weights, tensor, token, places, epoch, IN, OUT, WIDE, NETWORK)


@device
def _is_wide(tensor, OUT: tl.constexpr):
    """True if rows, results and biases of a tensor can all be read and written in 16-byte accesses."""
    bits = word(tensor, protocol.T_ROW_BYTES) | (word(tensor, protocol.T_ELEMENTS) * OUT.itemsize)
    bits |= word(tensor, protocol.T_OUT) | word(tensor, protocol.T_OUT_STRIDE)
    bits |= word(tensor, protocol.T_BIAS) | word(tensor, protocol.T_BIAS_STRIDE)
    return (bits & 15) == 0


@device
def _sum_tokens(ctx, args, state, routing, weights, tensors, epoch, share, shares,
                IN: tl.constexpr, OUT: tl.constexpr, SCALES: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    by_rank, reduce = word(args, protocol.BY_RANK) != 0, word(args, protocol.REDUCE) != 0
    places = num_places(ctx, routing, by_rank)
    for token in range(share, word(routing, protocol.NUM_TOKENS), shares):
        if SCALES is None:
            for i in tl.static_range(len(IN)):
                tensor = tensors + 8 * protocol.TENSOR_WORDS * i
                if _is_wide(tensor, OUT[i]):
                    _combine_token(
                        ctx, state, routing, weights, tensor, token, places, by_rank, epoch, reduce, IN[i], OUT[i],
                        True, NETWORK,
                    )  # fmt: skip
                else:
                    _combine_token(
                        ctx, state, routing, weights, tensor, token, places, by_rank, epoch, reduce, IN[i], OUT[i],
                        False, NETWORK,
                    )  # fmt: skip
        elif _is_wide(tensors, OUT[0]) & (word(tensors, protocol.T_ELEMENTS) % 16 == 0):
            combine_quantized_token(
                ctx, state, routing, weights, tensors, token, places, by_rank, epoch, reduce, OUT[0], True, TILE_BLOCKS,
                NETWORK,
            )  # fmt: skip
        else:
            combine_quantized_token(
                ctx, state, routing, weights, tensors, token, places, by_rank, epoch, reduce, OUT[0], False,
                NARROW_TILE_BLOCKS, NETWORK,
            )  # fmt: skip


@device
def sum_rows(ctx, args, fingerprint, state, routing, weights, tensors, epoch, share, shares,
             IN: tl.constexpr, OUT: tl.constexpr, RANKS: tl.constexpr, SCALES: tl.constexpr,
             NETWORK: tl.constexpr):  # fmt: skip
    """A program's part in the receiving half of combine `epoch`."""
    ready = signal_word(ctx, state, protocol.READY + (epoch & 1), word(ctx, control.RANK), 0)
    value = epoch << protocol.PAYLOAD_BITS
    status = meet_everyone(ctx, fingerprint, ready, value, sites.COMBINE_READY, RANKS, NETWORK)  # RAW
    if status == control.OK:
        given = weights
        if word(args, protocol.BY_RANK):
            given = tl.cast(0, tl.int64)  # they were applied where the experts are
        _sum_tokens(ctx, args, state, routing, given, tensors, epoch, share, shares, IN, OUT, SCALES, NETWORK)
        if arrive(state, shares):
            raise_everywhere(ctx, state, protocol.DONE, epoch, RANKS, NETWORK)
    return status


@kernel("combine_receive", programs=lambda shares: shares, max_registers=168)
def combine_receive(ctx, args, fingerprint, routing, tensors, weights, output, c4, c5,
                    IN: tl.constexpr, OUT: tl.constexpr, RANKS: tl.constexpr, SCALES: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    """For a combine that only sent. IN, OUT and SCALES: see combine.py."""
    program, status = enter(ctx, fingerprint, NETWORK)
    state, shares = word(args, protocol.STATE), tl.num_programs(0)
    epoch = word(state, protocol.COMBINE_EPOCH) + 1
    if status == control.OK:
        status = sum_rows(
            ctx, args, fingerprint, state, routing, weights, tensors, epoch, program, shares, IN, OUT, RANKS, SCALES,
            NETWORK,
        )  # fmt: skip
    if leave(ctx, status):
        set_word(state, protocol.COMBINE_EPOCH, epoch)  # the last to leave: all have read the old one
