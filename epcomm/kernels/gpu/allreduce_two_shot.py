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

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.device.gpu.waiting import meet, peer, signal
from epcomm.kernels.gpu.channels import by_channels, channel_bytes, channel_ring, part_bytes, slot_offset
from epcomm.kernels.gpu.reduction import reduce
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def stage_but_part(x, slot, num_bytes, index, count):
    """Stages a chunk, except part `index` of `count`, if there is one: this rank reduces it itself."""
    part = part_bytes(num_bytes, count)
    low = tl.minimum(num_bytes, index * part)
    high = tl.minimum(num_bytes, low + part)
    copy(slot, x, low)
    copy(slot + high, x + high, num_bytes - high)


@device
def _reduce_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    """One channel's bytes of the operation."""
    state, root = word(args, protocol.STATE), word(args, protocol.ROOT)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    words = word(state, protocol.WORDS) + channel * (protocol.CHANNEL_WORDS * control.LINE)
    staged_word, reduced_word = words + protocol.STAGED * control.LINE, words + protocol.REDUCED * control.LINE
    staged = channel_ring(word(state, protocol.STAGED_SLOTS), channel)
    reduced = channel_ring(word(state, protocol.REDUCED_SLOTS), channel)
    low, num_bytes = channel_bytes(state, channel, num_bytes)
    x, out = x + low, out + low
    first = word(state, protocol.CHUNKS + 2 * channel)
    num_chunks = (num_bytes + protocol.CHUNK_BYTES - 1) // protocol.CHUNK_BYTES
    status = tl.cast(control.OK, tl.int64)
    for step in range(num_chunks + 2):
        if (status == control.OK) & (step < num_chunks):
            start = step * protocol.CHUNK_BYTES
            slot = peer(ctx, me) + slot_offset(staged, first + step)
            stage_but_part(x + start, slot, tl.minimum(num_bytes - start, protocol.CHUNK_BYTES), me, size)
            signal(peer(ctx, me) + staged_word, first + step + 1)
        if (step > 0) & (step <= num_chunks):
            chunk = first + step - 1
            for distance in range(1, size):
                rank = (me + distance) % size
                if status == control.OK:
                    raised = peer(ctx, rank) + staged_word
                    status = meet(ctx, fingerprint, raised, chunk + 1, rank, sites.TWO_SHOT_STAGED, NETWORK)  # RAW
            if status == control.OK:
                start = (step - 1) * protocol.CHUNK_BYTES
                length = tl.minimum(num_bytes - start, protocol.CHUNK_BYTES)
                part = part_bytes(length, size)
                low = tl.minimum(length, me * part)
                to = peer(ctx, me) + slot_offset(reduced, chunk) + low
                own = tl.minimum(length, low + part) - low
                reduce(ctx, to, x + start + low, slot_offset(staged, chunk) + low, own, DTYPE, OP)
                signal(peer(ctx, me) + reduced_word, chunk + 1)
        if step > 1:
            chunk = first + step - 2
            start = (step - 2) * protocol.CHUNK_BYTES
            length = tl.minimum(num_bytes - start, protocol.CHUNK_BYTES)
            part = part_bytes(length, size)
            for distance in range(size):
                rank = (me + distance) % size
                if status == control.OK:
                    raised = peer(ctx, rank) + reduced_word
                    status = meet(ctx, fingerprint, raised, chunk + 1, rank, sites.TWO_SHOT_REDUCED, NETWORK)  # RAW
                if (status == control.OK) & ((root < 0) | (root == me)):
                    low = tl.minimum(length, rank * part)
                    source = peer(ctx, rank) + slot_offset(reduced, chunk) + low
                    copy(out + start + low, source, tl.minimum(length, low + part) - low)
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel, first + num_chunks)
    return status


@kernel("allreduce_two_shot", programs=all_programs, max_registers=168)
def allreduce_two_shot(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                       DTYPE: tl.constexpr, OP: tl.constexpr):  # fmt: skip
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _reduce_channel, DTYPE, OP, "none")
