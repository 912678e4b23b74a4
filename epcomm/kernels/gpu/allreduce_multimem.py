"""Two-shot allreduce in which NVLink's switch adds: sums and averages of bfloat16, float16 and float32.

A channel's step i: stage chunk i | have the switch add all ranks' staged chunks i - 1, this rank's part of it, and
write the sums to every rank | copy chunk i - 2 out of this rank's own segment. A rank's links carry its part once in
each direction, however many ranks there are.

Each part is added once, and all ranks get what that gave: one call's result is the same on all of them. The order of
the additions is the switch's: unlike that of the other algorithms, a result need not have the same bits from run to
run. 16-bit floats are added in float32 and rounded once; their ``avg`` is divided after that and rounded again.

Edges, with NUM_SLOTS = 4; the words are those of `allreduce_two_shot`, whose slots this shares
  RAW  STAGED: the peer's chunk is staged.     REDUCED: the peer's part of the result is in this rank's segment.
  WAR  staged slot of chunk c (last held c - 4): at step c - 1 this rank waited for REDUCED of c - 3 from all, and a
       rank reduces in order. Reduced slot of chunk c at every rank, written at step c + 1 (last held c - 4): the wait
       for STAGED of chunk c from all; a peer stages c after it copied c - 3 out.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.device.gpu.multimem import multimem_fence, multimem_load_reduce, multimem_store, packed, unpacked
from epcomm.device.gpu.waiting import meet, peer, signal
from epcomm.kernels.gpu.channels import by_channels, channel_bytes, channel_ring, part_bytes, slot_offset
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites

TILE_VECTORS = tl.constexpr(1024)  # of 16 bytes: four that each thread has under way to the switch


@device
def _divided(words, size, DTYPE: tl.constexpr):
    """A column of words whose numbers are divided by `size`."""
    low, high = unpacked(words, DTYPE)
    count = size.to(tl.float32)
    return packed(tl.div_rn(low, count), tl.div_rn(high, count), DTYPE)


@device
def _reduce_part(ctx, multicast, staged, reduced, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Reduces `num_bytes` at offset `staged` of all segments to offset `reduced` of all, in whole vectors."""
    size, num_vectors = word(ctx, control.SIZE), (num_bytes + 15) // 16
    multimem_fence()  # the peers staged by other addresses; and they read by others what is written over
    start = tl.cast(0, tl.int64)
    while start < num_vectors:
        vector = start + tl.arange(0, TILE_VECTORS)
        is_inside = vector < num_vectors
        a, b, c, d = multimem_load_reduce(ctx, multicast, staged + vector * 16, is_inside, DTYPE)
        if OP == "avg":
            a, b = _divided(a, size, DTYPE), _divided(b, size, DTYPE)
            c, d = _divided(c, size, DTYPE), _divided(d, size, DTYPE)
        multimem_store(ctx, multicast, reduced + vector * 16, a, b, c, d, is_inside)
        start += TILE_VECTORS
    multimem_fence()


@device
def _reduce_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    """One channel's bytes of the operation."""
    state = word(args, protocol.STATE)
    me, size, multicast = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.MULTICAST)
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
            copy(slot, x + start, tl.minimum(num_bytes - start, protocol.CHUNK_BYTES))
            signal(peer(ctx, me) + staged_word, first + step + 1)
        if (step > 0) & (step <= num_chunks):
            chunk = first + step - 1
            for distance in range(1, size):
                rank = (me + distance) % size
                if status == control.OK:
                    raised = peer(ctx, rank) + staged_word
                    status = meet(ctx, fingerprint, raised, chunk + 1, rank, sites.TWO_SHOT_STAGED, NETWORK)  # RAW
            if status == control.OK:
                length = tl.minimum(num_bytes - (step - 1) * protocol.CHUNK_BYTES, protocol.CHUNK_BYTES)
                part = part_bytes(length, size)
                low = tl.minimum(length, me * part)
                own = tl.minimum(length, low + part) - low
                _reduce_part(ctx, multicast, slot_offset(staged, chunk) + low, slot_offset(reduced, chunk) + low, own,
                             DTYPE, OP)  # fmt: skip
                signal(peer(ctx, me) + reduced_word, chunk + 1)
        if step > 1:
            chunk, start = first + step - 2, (step - 2) * protocol.CHUNK_BYTES
            for distance in range(size):
                rank = (me + distance) % size
                if status == control.OK:
                    raised = peer(ctx, rank) + reduced_word
                    status = meet(ctx, fingerprint, raised, chunk + 1, rank, sites.TWO_SHOT_REDUCED, NETWORK)  # RAW
            if status == control.OK:
                slot = peer(ctx, me) + slot_offset(reduced, chunk)
                copy(out + start, slot, tl.minimum(num_bytes - start, protocol.CHUNK_BYTES))
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel, first + num_chunks)
    return status


@kernel(
    "allreduce_multimem",
    programs=all_programs,
    max_registers=168,
    oldest_arch="sm_90",
    oldest_because="multimem instructions need sm_90",
)
def allreduce_multimem(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                       DTYPE: tl.constexpr, OP: tl.constexpr):  # fmt: skip
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _reduce_channel, DTYPE, OP, "none")
