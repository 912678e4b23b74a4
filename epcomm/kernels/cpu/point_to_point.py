"""send and recv: a ring of slots per ordered pair, in the receiver's memory.

The sender copies a message into the slots piece by piece; each piece carries the fingerprint of the message (its size,
dtype and tag), so a receive that expects another message stops instead of taking its bytes. For a receiver on another
host it fills a slot of its own, as the receiver's will be, and puts it there.

Edges
  RAW  SENT, in the receiver's memory: the piece and its header are in the slot.
  WAR  TAKEN, in the sender's memory: the receiver has copied out what was in the slot INBOX_NUM_SLOTS pieces ago (so it
       has arrived, and the sender's own slot is free, too).
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.memory import copy, load64, set_word, store64, word
from epcomm.device.cpu.network import put, raise_word
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.device.cpu.waiting import stopped, wait
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def _num_pieces(num_bytes):
    """At least one, so that an empty message is still received."""
    return max(1, (num_bytes + protocol.PIECE_BYTES - 1) // protocol.PIECE_BYTES)


@device
def _slot_offset(ring, count):
    return ring + count % protocol.INBOX_NUM_SLOTS * protocol.INBOX_SLOT_BYTES


@kernel("send", is_single=True)
def send(ctx, args, program, num_programs):
    x, num_bytes, rank = word(args, protocol.X), word(args, protocol.NUM_BYTES), word(args, protocol.PEER)
    window, own, base = window_of_collectives(ctx), peer(ctx, word(ctx, control.RANK)), peer(ctx, rank)
    first_of_generation = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
    for piece in range(_num_pieces(num_bytes)):
        count = word(word(args, protocol.COUNT), 0)
        reused = count + 1 - protocol.INBOX_NUM_SLOTS
        if reused > first_of_generation:
            status = wait(ctx, own + word(args, protocol.INBOX_TAKEN), reused, rank, sites.MESSAGE_TAKEN)  # WAR
            if status != control.OK:
                return status
        inbox = _slot_offset(word(args, protocol.INBOX), count)
        outbox = _slot_offset(word(args, protocol.OUTBOX), count)
        slot = base + inbox if base != 0 else own + outbox
        start = piece * protocol.PIECE_BYTES
        length = min(protocol.PIECE_BYTES, num_bytes - start)
        store64(slot, word(args, protocol.MESSAGE))
        copy(slot + control.LINE, x + start, length)
        if base == 0:
            put(ctx, window, rank, inbox, outbox, control.LINE + length)
        set_word(word(args, protocol.COUNT), 0, count + 1)
        raise_word(ctx, window, rank, word(args, protocol.INBOX_SENT), count + 1)
    return control.OK


@kernel("recv", is_single=True)
def recv(ctx, args, program, num_programs):
    out, num_bytes, rank = word(args, protocol.OUT), word(args, protocol.NUM_BYTES), word(args, protocol.PEER)
    own = peer(ctx, word(ctx, control.RANK))
    for piece in range(_num_pieces(num_bytes)):
        count = word(word(args, protocol.COUNT), 0)
        status = wait(ctx, own + word(args, protocol.INBOX_SENT), count + 1, rank, sites.MESSAGE_SENT)  # RAW
        if status != control.OK:
            return status
        slot = own + _slot_offset(word(args, protocol.INBOX), count)
        found = load64(slot)
        if found != word(args, protocol.MESSAGE):
            return stopped(ctx, control.MISMATCH, rank, sites.MESSAGE_SENT, word(args, protocol.MESSAGE), found)
        start = piece * protocol.PIECE_BYTES
        copy(out + start, slot + control.LINE, min(protocol.PIECE_BYTES, num_bytes - start))
        set_word(word(args, protocol.COUNT), 0, count + 1)
        raise_word(ctx, window_of_collectives(ctx), rank, word(args, protocol.INBOX_TAKEN), count + 1)
    return control.OK
