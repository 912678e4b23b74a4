"""Channels of a collective: their bytes and slots, and the words that ranks on several hosts raise at each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import Kernel, device, kernel
from epcomm.device.cpu.memory import fence, word
from epcomm.device.cpu.network import raise_word
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.device.cpu.waiting import meet
from epcomm.kernels.protocol import collectives as protocol


def data_movement(name: str, move_channel: Callable[..., Any]) -> Kernel:
    """The kernel whose programs take every n-th channel: ``move_channel(ctx, args, channel) -> status``."""

    def run(ctx, args, program, num_programs):
        for channel in range(program, word(word(args, protocol.STATE), protocol.NUM_CHANNELS), num_programs):
            status = move_channel(ctx, args, channel)
            if status != control.OK:
                return status
        if word(args, protocol.STREAMING):
            fence()
        return control.OK

    return kernel(name)(run)


def reduction_by_channels(name: str, reduce_channel: Callable[..., Any]) -> Kernel:
    """The same of a reduction whose bytes are shared out: ``reduce_channel(ctx, args, channel, x, out, num_bytes)``."""

    @device
    def reduce_share(ctx, args, channel):
        x, out, num_bytes = word(args, protocol.X), word(args, protocol.OUT), word(args, protocol.NUM_BYTES)
        share = channel_bytes(num_bytes, word(word(args, protocol.STATE), protocol.NUM_CHANNELS))
        low = min(num_bytes, channel * share)
        return reduce_channel(ctx, args, channel, x + low, out + low, min(share, num_bytes - low))

    return data_movement(name, reduce_share)


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
