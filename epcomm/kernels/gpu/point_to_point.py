"""send and recv: a ring of slots per ordered pair, in the receiver's memory.

The sender copies a message into the slots piece by piece; each piece carries the fingerprint of the message (its size,
dtype and tag), so a receive that expects another message stops instead of taking its bytes. For a receiver on another
node it fills a slot of its own, as the receiver's will be, and puts it there.

Edges
  RAW  SENT, in the receiver's memory: the piece and its header are in the slot.
  WAR  TAKEN, in the sender's memory: the receiver has copied out what was in the slot INBOX_NUM_SLOTS pieces ago (so it
       has arrived, and the sender's own slot is free, too).
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, load64, set_word, word
from epcomm.device.gpu.network import quiet, raise_word, start_put
from epcomm.device.gpu.waiting import enter, leave, peer, stopped, wait, window_of_collectives
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def _num_pieces(num_bytes):
    """At least one, so that an empty message is still received."""
    return tl.maximum((num_bytes + protocol.PIECE_BYTES - 1) // protocol.PIECE_BYTES, 1)


@device
def _slot_offset(ring, count):
    return ring + count % protocol.INBOX_NUM_SLOTS * protocol.INBOX_SLOT_BYTES


@kernel("send", programs=one)
def send(ctx, args, fingerprint, x, out, num_bytes, c3, c4, c5, NETWORK: tl.constexpr):
    program, status = enter(ctx, fingerprint, NETWORK)
    x, num_bytes = tl.cast(x, tl.int64), tl.cast(num_bytes, tl.int64)
    rank, counter = word(args, protocol.PEER), word(args, protocol.COUNT)
    first = word(counter, 0)
    base, own, window = peer(ctx, rank), peer(ctx, word(ctx, control.RANK)), window_of_collectives(ctx)
    first_of_generation = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
    for piece in range(_num_pieces(num_bytes)):
        count = first + piece
        reused = count + 1 - protocol.INBOX_NUM_SLOTS
        if (status == control.OK) & (reused > first_of_generation):
            raised = own + word(args, protocol.INBOX_TAKEN)
            status = wait(ctx, fingerprint, raised, reused, rank, sites.MESSAGE_TAKEN)  # WAR
        if status == control.OK:
            inbox = _slot_offset(word(args, protocol.INBOX), count)
            outbox, slot = _slot_offset(word(args, protocol.OUTBOX), count), base + inbox
            if base == 0:
                slot = own + outbox
            start = piece * protocol.PIECE_BYTES
            length = tl.minimum(num_bytes - start, protocol.PIECE_BYTES)
            set_word(slot, 0, word(args, protocol.MESSAGE))
            copy(slot + control.LINE, x + start, length)
            if NETWORK != "none":
                if base == 0:
                    start_put(ctx, window, rank, inbox, outbox, control.LINE + length, NETWORK)
                    quiet(ctx, NETWORK)
            raise_word(ctx, window, base, rank, word(args, protocol.INBOX_SENT), count + 1, NETWORK)
            set_word(counter, 0, count + 1)  # behind a barrier: all threads have read it
    leave(ctx, status)


@kernel("recv", programs=one)
def recv(ctx, args, fingerprint, x, out, num_bytes, c3, c4, c5, NETWORK: tl.constexpr):
    program, status = enter(ctx, fingerprint, NETWORK)
    out, num_bytes = tl.cast(out, tl.int64), tl.cast(num_bytes, tl.int64)
    rank, counter, message = word(args, protocol.PEER), word(args, protocol.COUNT), word(args, protocol.MESSAGE)
    first = word(counter, 0)
    base, own, window = peer(ctx, rank), peer(ctx, word(ctx, control.RANK)), window_of_collectives(ctx)
    for piece in range(_num_pieces(num_bytes)):
        count = first + piece
        slot, start = own + _slot_offset(word(args, protocol.INBOX), count), piece * protocol.PIECE_BYTES
        if status == control.OK:
            raised = own + word(args, protocol.INBOX_SENT)
            status = wait(ctx, fingerprint, raised, count + 1, rank, sites.MESSAGE_SENT)  # RAW
        if status == control.OK:
            found = load64(slot)
            if found != message:
                status = stopped(ctx, control.MISMATCH, rank, sites.MESSAGE_SENT, message, found)
        if status == control.OK:
            copy(out + start, slot + control.LINE, tl.minimum(num_bytes - start, protocol.PIECE_BYTES))
            raise_word(ctx, window, base, rank, word(args, protocol.INBOX_TAKEN), count + 1, NETWORK)
            set_word(counter, 0, count + 1)  # behind a barrier: all threads have read it
    leave(ctx, status)
