"""send and recv: a ring of slots per ordered pair, in the receiver's memory.

The sender copies a message into the slots piece by piece; each piece carries the fingerprint of the message (its size,
dtype and tag), so a receive that expects another message stops instead of taking its bytes.

Edges
  RAW  SENT: the piece and its header are in the slot.
  WAR  TAKEN: the receiver has copied out what was in the slot INBOX_NUM_SLOTS pieces ago.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.memory import copy, load64, set_word, store64, word
from epcomm.device.cpu.peers import peer
from epcomm.device.cpu.waiting import signal, stopped, wait
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def _num_pieces(num_bytes):
    """At least one, so that an empty message is still received."""
    return max(1, (num_bytes + protocol.PIECE_BYTES - 1) // protocol.PIECE_BYTES)


@kernel("send", is_single=True)
def send(ctx, args, program, num_programs):
    x, num_bytes, rank = word(args, protocol.X), word(args, protocol.NUM_BYTES), word(args, protocol.PEER)
    inbox = peer(ctx, rank) + word(args, protocol.INBOX)
    first_of_generation = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
    for piece in range(_num_pieces(num_bytes)):
        count = word(word(args, protocol.COUNT), 0)
        reused = count + 1 - protocol.INBOX_NUM_SLOTS
        if reused > first_of_generation:
            status = wait(ctx, inbox + protocol.INBOX_TAKEN, reused, rank, sites.MESSAGE_TAKEN)  # WAR
            if status != control.OK:
                return status
        slot = inbox + protocol.INBOX_SLOTS + count % protocol.INBOX_NUM_SLOTS * protocol.INBOX_SLOT_BYTES
        start = piece * protocol.PIECE_BYTES
        store64(slot, word(args, protocol.MESSAGE))
        copy(slot + control.LINE, x + start, min(protocol.PIECE_BYTES, num_bytes - start))
        set_word(word(args, protocol.COUNT), 0, count + 1)
        signal(inbox + protocol.INBOX_SENT, count + 1)
    return control.OK


@kernel("recv", is_single=True)
def recv(ctx, args, program, num_programs):
    out, num_bytes, rank = word(args, protocol.OUT), word(args, protocol.NUM_BYTES), word(args, protocol.PEER)
    inbox = peer(ctx, word(ctx, control.RANK)) + word(args, protocol.INBOX)
    for piece in range(_num_pieces(num_bytes)):
        count = word(word(args, protocol.COUNT), 0)
        status = wait(ctx, inbox + protocol.INBOX_SENT, count + 1, rank, sites.MESSAGE_SENT)  # RAW
        if status != control.OK:
            return status
        slot = inbox + protocol.INBOX_SLOTS + count % protocol.INBOX_NUM_SLOTS * protocol.INBOX_SLOT_BYTES
        found = load64(slot)
        if found != word(args, protocol.MESSAGE):
            return stopped(ctx, control.MISMATCH, rank, sites.MESSAGE_SENT, word(args, protocol.MESSAGE), found)
        start = piece * protocol.PIECE_BYTES
        copy(out + start, slot + control.LINE, min(protocol.PIECE_BYTES, num_bytes - start))
        set_word(word(args, protocol.COUNT), 0, count + 1)
        signal(inbox + protocol.INBOX_TAKEN, count + 1)
    return control.OK
