"""All data movement between ranks, and reduce_scatter: each rank stages bytes for its peers, who read them.

A table says how many bytes go to and come from each peer; allgather, gather, broadcast, scatter, alltoall and
alltoallv differ in nothing else. With a reduction, what comes from all peers is reduced instead of laid side by side.
A channel's step i: stage piece i for every peer | take piece i - 1 from every peer.

Edges
  RAW  SENT: the peer has staged the piece (raised even when it sends nothing).
  WAR  TAKEN: the peer has read the piece that was in the slot NUM_SLOTS pieces ago.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.device.gpu.waiting import meet, peer, signal, wait
from epcomm.kernels.gpu.channels import by_channels, channel_ring, slot_offset
from epcomm.kernels.gpu.reduction import reduce
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites

#: values of the constants that stand for no reduction
NO_REDUCTION = {"DTYPE": tl.uint8, "OP": "none"}


@device
def entry(ctx, args, row, rank):
    """An entry of the exchange's table."""
    return word(word(args, protocol.TABLE), row * word(ctx, control.SIZE) + rank)


@device
def stage(ctx, args, x, slot, start, piece):
    """Stages bytes [start, start + piece) of what goes to each peer: once, if all receive the same."""
    me, size, shared = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.SHARED)
    is_staged = tl.cast(0, tl.int64)
    for distance in range(1, size):
        rank = (me + distance) % size
        length = tl.minimum(entry(ctx, args, protocol.SEND_BYTES, rank) - start, piece)
        if (length > 0) & (is_staged == 0):
            source = x + entry(ctx, args, protocol.SEND_OFFSET, rank) + start
            copy(slot + rank * piece * (1 - shared), source, length)
            is_staged = shared


@device
def take(ctx, args, out, rank, source, start, piece):
    """Copies bytes [start, start + piece) of what comes from `rank` to their place, if they aren't there."""
    length = tl.minimum(entry(ctx, args, protocol.RECEIVE_BYTES, rank) - start, piece)
    to = out + entry(ctx, args, protocol.RECEIVE_OFFSET, rank) + start
    if (length > 0) & (to != source):
        copy(to, source, length)


@device
def _exchange_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                      NETWORK: tl.constexpr):  # fmt: skip
    state, me, size = word(args, protocol.STATE), word(ctx, control.RANK), word(ctx, control.SIZE)
    words = word(state, protocol.WORDS) + channel * (protocol.CHANNEL_WORDS * control.LINE)
    sent_word, taken_word = words + protocol.SENT * control.LINE, words + protocol.TAKEN * control.LINE
    ring = channel_ring(word(state, protocol.SENT_SLOTS), channel)
    num_channels, first = word(state, protocol.NUM_CHANNELS), word(state, protocol.CHUNKS + 2 * channel + 1)
    first_of_generation = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
    own = x + entry(ctx, args, protocol.SEND_OFFSET, me)
    piece = (protocol.CHUNK_BYTES // size) & -64
    own_piece = me * piece  # where in a peer's slot the bytes for this rank are
    if word(args, protocol.SHARED) != 0:
        piece = tl.cast(protocol.CHUNK_BYTES, tl.int64)
        own_piece = tl.cast(0, tl.int64)
    stride = piece * num_channels
    # at least one step, so that ranks meet (and compare what they call) even when there is nothing to move
    num_steps = tl.maximum((word(args, protocol.MAX_PAIR_BYTES) + stride - 1) // stride, 1)
    status = tl.cast(control.OK, tl.int64)
    for step in range(num_steps + 1):
        if step < num_steps:
            reused = first + step + 1 - protocol.NUM_SLOTS
            if reused > first_of_generation:  # the slot was used in this generation
                for distance in range(1, size):
                    rank = (me + distance) % size
                    if status == control.OK:
                        raised = peer(ctx, rank) + taken_word
                        status = wait(ctx, fingerprint, raised, reused, rank, sites.EXCHANGE_TAKEN)  # WAR
            if status == control.OK:
                slot = peer(ctx, me) + slot_offset(ring, first + step)
                stage(ctx, args, x, slot, step * stride + channel * piece, piece)
                signal(peer(ctx, me) + sent_word, first + step + 1)
        if step > 0:
            start = (step - 1) * stride + channel * piece
            slot = slot_offset(ring, first + step - 1) + own_piece
            for distance in range(1, size):
                rank = (me + distance) % size
                if status == control.OK:
                    raised = peer(ctx, rank) + sent_word
                    status = meet(ctx, fingerprint, raised, first + step, rank, sites.EXCHANGE_SENT, NETWORK)  # RAW
                if OP == "none":
                    if status == control.OK:
                        take(ctx, args, out, rank, peer(ctx, rank) + slot, start, piece)
            if status == control.OK:
                if OP == "none":
                    take(ctx, args, out, me, own + start, start, piece)
                else:
                    length = tl.minimum(entry(ctx, args, protocol.RECEIVE_BYTES, me) - start, piece)
                    reduce(ctx, out + start, own + start, slot, tl.maximum(length, 0), DTYPE, OP)
                signal(peer(ctx, me) + taken_word, first + step)
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel + 1, first + num_steps)
    return status


@kernel("exchange", programs=all_programs, max_registers=168)
def exchange(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
             DTYPE: tl.constexpr, OP: tl.constexpr):  # fmt: skip
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _exchange_channel, DTYPE, OP, "none")
