"""Channels of a collective: their bytes and slots, and the words that ranks on several nodes raise at each other."""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import word
from epcomm.device.gpu.network import raise_word
from epcomm.device.gpu.waiting import enter, leave, peer, window_of_collectives
from epcomm.kernels.protocol import collectives as protocol


@device
def by_channels(ctx, args, fingerprint, x, out, num_bytes, MOVE: tl.constexpr, DTYPE: tl.constexpr, OP: tl.constexpr,
                NETWORK: tl.constexpr):  # fmt: skip
    """A kernel whose programs share out channels, each of which the device function MOVE does.

    ``MOVE(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE, OP, NETWORK) -> status``.
    """
    program, status = enter(ctx, fingerprint, NETWORK)
    x, out, num_bytes = tl.cast(x, tl.int64), tl.cast(out, tl.int64), tl.cast(num_bytes, tl.int64)
    first, end = _share_of(program, word(word(args, protocol.STATE), protocol.NUM_CHANNELS))
    for channel in range(first, end):
        if status == control.OK:
            status = MOVE(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE, OP, NETWORK)
    leave(ctx, status)


@device
def _share_of(program, num_channels):
    """(first channel of a program, the one after its last).

    Shares are contiguous, so channels begin in the same order on every rank, however many programs it has: a rank whose
    programs run one after the other waits for peers only at channels that they come to before all later ones.
    """
    num_programs = tl.num_programs(0)
    return program * num_channels // num_programs, (program + 1) * num_channels // num_programs


@device
def channel_bytes(state, channel, num_bytes):
    """(first byte of a channel of a reduction, how many it has): whole 64-byte vectors of all but the last."""
    num_channels = word(state, protocol.NUM_CHANNELS)
    share = ((num_bytes + num_channels - 1) // num_channels + 63) & -64
    low = tl.minimum(num_bytes, channel * share)
    return low, tl.minimum(share, num_bytes - low)


@device
def part_bytes(num_bytes, count):
    """Bytes of each of `count` parts of a chunk but the last: whole 64-byte vectors."""
    return ((num_bytes + count - 1) // count + 63) & -64


@device
def channel_ring(rings, channel):
    """Offset of a channel's ring of slots."""
    return rings + channel * (protocol.NUM_SLOTS * protocol.CHUNK_BYTES)


@device
def slot_offset(ring, chunk):
    """Offset of a chunk's slot in a ring."""
    return ring + chunk % protocol.NUM_SLOTS * protocol.CHUNK_BYTES


@device
def _line(ctx, state, channel, kind, rank):
    """Offset of the word that `rank` raises."""
    line = (channel * protocol.NUM_PUSHED + kind) * word(ctx, control.SIZE) + rank
    return word(state, protocol.PUSHED_WORDS) + line * control.LINE


@device
def push(ctx, state, channel, kind, rank, about, value, NETWORK: tl.constexpr):
    """Raises the word about rank `about` (mostly this one) in `rank`'s segment."""
    offset = _line(ctx, state, channel, kind, about)
    raise_word(ctx, window_of_collectives(ctx), peer(ctx, rank), rank, offset, value, NETWORK)


@device
def pushed_word(ctx, state, channel, kind, rank):
    """Address of the word about `rank` in this rank's segment."""
    return peer(ctx, word(ctx, control.RANK)) + _line(ctx, state, channel, kind, rank)
