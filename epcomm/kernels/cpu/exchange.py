"""All data movement between ranks, and reduce_scatter: each rank stages bytes for its peers, who read them.

A table says how many bytes go to and come from each peer; allgather, gather, broadcast, scatter, alltoall and
alltoallv differ in nothing else. With a reduction, what comes from all peers is reduced instead of laid side by side.
A channel's step i: stage piece i for every peer | take piece i - 1 from every peer.

Edges
  RAW  SENT: the peer has staged the piece (raised even when it sends nothing).
  WAR  TAKEN: the peer has read the piece that was in the slot NUM_SLOTS pieces ago.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import copy, copy_streaming, set_word, word
from epcomm.device.cpu.peers import peer
from epcomm.device.cpu.waiting import meet, signal, wait
from epcomm.kernels.cpu.channels import data_movement
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def entry(ctx, args, row, rank):
    """An entry of the exchange's table."""
    return word(word(args, protocol.TABLE), row * word(ctx, control.SIZE) + rank)


@device
def stage(ctx, args, slot, start, piece):
    """Stages bytes [start, start + piece) of what goes to each peer."""
    me, size, x = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.X)
    for distance in range(1, size):
        rank = (me + distance) % size
        length = min(piece, entry(ctx, args, protocol.SEND_BYTES, rank) - start)
        if length > 0:
            source = x + entry(ctx, args, protocol.SEND_OFFSET, rank) + start
            if word(args, protocol.SHARED):
                copy(slot, source, length)
                return
            copy(slot + rank * piece, source, length)


@device
def take(ctx, args, rank, slot, start, piece):
    """Copies bytes [start, start + piece) of what comes from `rank` to their place."""
    length = min(piece, entry(ctx, args, protocol.RECEIVE_BYTES, rank) - start)
    if length > 0:
        to = word(args, protocol.OUT) + entry(ctx, args, protocol.RECEIVE_OFFSET, rank) + start
        if word(args, protocol.STREAMING):
            copy_streaming(to, slot, length)
        else:
            copy(to, slot, length)


@device
def own_source(ctx, args, start):
    """Address of this rank's bytes for itself."""
    return word(args, protocol.X) + entry(ctx, args, protocol.SEND_OFFSET, word(ctx, control.RANK)) + start


@device
def _exchange_channel(ctx, args, channel):
    state, me, size = word(args, protocol.STATE), word(ctx, control.RANK), word(ctx, control.SIZE)
    words = word(state, protocol.WORDS) + channel * protocol.CHANNEL_WORDS * LINE
    sent_word, taken_word = words + protocol.SENT * LINE, words + protocol.TAKEN * LINE
    ring = word(state, protocol.SENT_SLOTS) + channel * protocol.NUM_SLOTS * protocol.CHUNK_BYTES
    sources, reduce = word(args, protocol.SOURCES) + channel * size * 8, word(args, protocol.REDUCE)
    num_channels, first = word(state, protocol.NUM_CHANNELS), word(state, protocol.CHUNKS + 2 * channel + 1)
    shared = word(args, protocol.SHARED)
    piece = protocol.CHUNK_BYTES if shared else (protocol.CHUNK_BYTES // size) & -64
    stride = piece * num_channels
    # at least one step, so that ranks meet (and compare what they call) even when there is nothing to move
    num_steps = max(1, (word(args, protocol.MAX_PAIR_BYTES) + stride - 1) // stride)
    set_word(state, protocol.CHUNKS + 2 * channel + 1, first + num_steps)
    for step in range(num_steps + 1):
        if step < num_steps:
            reused = first + step + 1 - protocol.NUM_SLOTS
            if reused <= word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
                reused = 0  # the slot was not used in this generation
            for distance in range(1, size):
                rank = (me + distance) % size
                status = wait(ctx, peer(ctx, rank) + taken_word, reused, rank, sites.EXCHANGE_TAKEN)  # WAR
                if status != control.OK:
                    return status
            slot = peer(ctx, me) + ring + (first + step) % protocol.NUM_SLOTS * protocol.CHUNK_BYTES
            stage(ctx, args, slot, step * stride + channel * piece, piece)
            signal(peer(ctx, me) + sent_word, first + step + 1)
        if step > 0:
            start = (step - 1) * stride + channel * piece
            slot = ring + (first + step - 1) % protocol.NUM_SLOTS * protocol.CHUNK_BYTES
            if not shared:
                slot += me * piece
            for distance in range(1, size):
                rank = (me + distance) % size
                status = meet(ctx, peer(ctx, rank) + sent_word, first + step, rank, sites.EXCHANGE_SENT)  # RAW
                if status != control.OK:
                    return status
                if reduce == 0:
                    take(ctx, args, rank, peer(ctx, rank) + slot, start, piece)
            own = own_source(ctx, args, start)
            if reduce != 0:
                length = min(piece, entry(ctx, args, protocol.RECEIVE_BYTES, me) - start)
                if length > 0:
                    for rank in range(size):
                        set_word(sources, rank, own if rank == me else peer(ctx, rank) + slot)
                    call6(reduce, word(args, protocol.OUT) + start, sources, size, length, size, 0)
            else:
                out = word(args, protocol.OUT) + entry(ctx, args, protocol.RECEIVE_OFFSET, me) + start
                if own != out:
                    take(ctx, args, me, own, start, piece)
            signal(peer(ctx, me) + taken_word, first + step)
    return control.OK


exchange = data_movement("exchange", _exchange_channel)
