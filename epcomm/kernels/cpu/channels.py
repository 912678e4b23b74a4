"""Channels of a collective: their bytes and slots, and the words that ranks on several hosts raise at each other."""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import word
from epcomm.device.cpu.network import raise_word
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.device.cpu.waiting import meet
from epcomm.kernels.protocol import collectives as protocol


@device
def channel_bytes(num_bytes, num_channels):
    """Bytes of each channel but the last: whole 64-byte vectors."""
    return ((num_bytes + num_channels - 1) // num_channels + 63) & -64


@device
def part_bytes(num_bytes, count):
    """Bytes of each of `count` parts of a chunk but the last: whole 64-byte vectors."""
    return ((num_bytes + count - 1) // count + 63) & -64


@device
def slot_offset(ring, channel, count):
    """Offset of the slot of a channel's chunk `count`."""
    return ring + (channel * protocol.NUM_SLOTS + count % protocol.NUM_SLOTS) * protocol.CHUNK_BYTES


@device
def _line(ctx, state, channel, kind, rank):
    """Offset of the word that `rank` raises."""
    line = (channel * protocol.NUM_PUSHED + kind) * word(ctx, control.SIZE) + rank
    return word(state, protocol.PUSHED_WORDS) + line * LINE


@device
def push(ctx, state, channel, kind, rank, about, value):
    """Raises the word about rank `about` (mostly this one) in `rank`'s segment."""
    raise_word(ctx, window_of_collectives(ctx), rank, _line(ctx, state, channel, kind, about), value)


@device
def meet_pushed(ctx, state, channel, kind, rank, value, site):
    """Waits for the word about `rank` in this rank's segment."""
    address = peer(ctx, word(ctx, control.RANK)) + _line(ctx, state, channel, kind, rank)
    return meet(ctx, address, value, rank, site)
