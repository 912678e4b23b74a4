"""Two-shot allreduce and reduce: reduce-scatter, then all-gather, pipelined over chunks that stay in cache.

A channel's step i: stage chunk i (all but the part this rank reduces) | reduce this rank's part of chunk i - 1 into a
slot | copy chunk i - 2 out of every rank's slot. Each rank sums its part in rank order: the result has the same bits
everywhere.

Edges, with NUM_SLOTS = 4
  RAW  STAGED: the peer's part of the chunk is staged.     REDUCED: the peer's part of the result is there.
  WAR  staged slot of chunk c (last held c - 4): at step c - 1 this rank waited for REDUCED of c - 3 from all, and a
       rank reduces in order. Reduced slot of chunk c, written at step c + 1 (last held c - 4): the wait for STAGED of
       chunk c from all; a peer stages c after it copied c - 3 out.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import copy, copy_streaming, set_word, word
from epcomm.device.cpu.peers import peer
from epcomm.device.cpu.waiting import meet, signal
from epcomm.kernels.cpu.channels import part_bytes, reduction_by_channels
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def stage_but_part(x, slot, num_bytes, index, count):
    """Stages a chunk, except part `index` of `count`, if there is one: this rank reduces it itself."""
    part = part_bytes(num_bytes, count)
    low = min(num_bytes, index * part)
    high = min(num_bytes, low + part)
    copy(slot, x, low)
    copy(slot + high, x + high, num_bytes - high)


@device
def _reduce_channel(ctx, args, channel, x, out, num_bytes):
    """One channel's bytes of the operation."""
    state = word(args, protocol.STATE)
    me, size, root = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.ROOT)
    sources = word(args, protocol.SOURCES) + channel * size * 8
    words = word(state, protocol.WORDS) + channel * protocol.CHANNEL_WORDS * LINE
    staged_word, reduced_word = words + protocol.STAGED * LINE, words + protocol.REDUCED * LINE
    ring = channel * protocol.NUM_SLOTS * protocol.CHUNK_BYTES
    staged, reduced = word(state, protocol.STAGED_SLOTS) + ring, word(state, protocol.REDUCED_SLOTS) + ring
    first = word(state, protocol.CHUNKS + 2 * channel)
    chunk = protocol.CHUNK_BYTES
    num_chunks = (num_bytes + chunk - 1) // chunk
    set_word(state, protocol.CHUNKS + 2 * channel, first + num_chunks)
    streaming = word(args, protocol.STREAMING)
    for step in range(num_chunks + 2):
        if step < num_chunks:
            slot = peer(ctx, me) + staged + (first + step) % protocol.NUM_SLOTS * chunk
            stage_but_part(x + step * chunk, slot, min(chunk, num_bytes - step * chunk), me, size)
            signal(peer(ctx, me) + staged_word, first + step + 1)
        if 0 < step <= num_chunks:
            done = step - 1
            length = min(chunk, num_bytes - done * chunk)
            part = part_bytes(length, size)
            low = min(length, me * part)
            at = (first + done) % protocol.NUM_SLOTS * chunk + low
            for distance in range(1, size):
                rank = (me + distance) % size
                status = meet(  # RAW
                    ctx, peer(ctx, rank) + staged_word, first + done + 1, rank, sites.TWO_SHOT_STAGED
                )
                if status != control.OK:
                    return status
            for rank in range(size):
                set_word(sources, rank, x + done * chunk + low if rank == me else peer(ctx, rank) + staged + at)
            to, own_bytes = peer(ctx, me) + reduced + at, min(length, low + part) - low
            call6(word(args, protocol.REDUCE), to, sources, size, own_bytes, size, 0)
            signal(peer(ctx, me) + reduced_word, first + done + 1)
        if step > 1:
            done = step - 2
            length = min(chunk, num_bytes - done * chunk)
            part = part_bytes(length, size)
            slot = reduced + (first + done) % protocol.NUM_SLOTS * chunk
            for distance in range(size):
                rank = (me + distance) % size
                low = min(length, rank * part)
                status = meet(  # RAW
                    ctx, peer(ctx, rank) + reduced_word, first + done + 1, rank, sites.TWO_SHOT_REDUCED
                )
                if status != control.OK:
                    return status
                if root < 0 or root == me:
                    to, source = out + done * chunk + low, peer(ctx, rank) + slot + low
                    if streaming:
                        copy_streaming(to, source, min(length, low + part) - low)
                    else:
                        copy(to, source, min(length, low + part) - low)
    return control.OK


allreduce_two_shot = reduction_by_channels("allreduce_two_shot", _reduce_channel)
