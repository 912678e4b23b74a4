"""`exchange` among ranks on several nodes: each rank stages bytes for its peers, and puts them to other nodes.

Ranks of the sender's node read what it staged, those of other nodes what arrived in their own memory. Where all
receivers get the same bytes they travel once per node, to the *forwarder*: the rank with the sender's number there,
modulo how many there are. The others of that node read from its memory.
A channel's step i: stage and put piece i | tell the ranks of this node what came to forward | take piece i - 1.

Edges; every word is in the waiter's own memory
  RAW  SENT: the peer has staged the piece; from another node, it has arrived here (raised even when it sends nothing).
       FORWARDED: the piece has arrived in the forwarder's memory.
  WAR  TAKEN: the peer has read the piece that was in the slot NUM_SLOTS pieces ago, in this rank's memory, in its own
       or in the forwarder's; all three are written on this rank's behalf only after all peers have raised it. A piece
       that was taken had been put, so what it was put from is free as well.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import set_word, word
from epcomm.device.gpu.network import quiet, start_put
from epcomm.device.gpu.waiting import meet, peer, wait, window_of_collectives
from epcomm.kernels.gpu.channels import by_channels, channel_ring, push, pushed_word, slot_offset
from epcomm.kernels.gpu.exchange import entry, stage, take
from epcomm.kernels.gpu.nodes import member, node_of, num_members, number_of
from epcomm.kernels.gpu.reduction import reduce_listed
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@device
def _forwarder(ctx, table, source, node):
    """The rank of a node to which the bytes of a rank of another node come."""
    return member(ctx, table, node, number_of(ctx, table, source) % num_members(ctx, table, node))


@device
def _is_told(ctx, args, rank):
    """True if this rank itself tells `rank` that a piece is there."""
    me, table = word(ctx, control.RANK), word(word(args, protocol.STATE), protocol.NODES)
    is_told = (word(args, protocol.SHARED) == 0) | (peer(ctx, rank) != 0)
    return is_told | (rank == _forwarder(ctx, table, me, node_of(ctx, table, rank)))


@device
def _bytes_for(ctx, args, rank):
    """How many bytes come to `rank` from this one, perhaps for its node."""
    num_bytes = entry(ctx, args, protocol.SEND_BYTES, rank)
    if word(args, protocol.SHARED) != 0:
        table = word(word(args, protocol.STATE), protocol.NODES)
        node = node_of(ctx, table, rank)
        for number in range(num_members(ctx, table, node)):
            reader = member(ctx, table, node, number)
            num_bytes = tl.maximum(num_bytes, entry(ctx, args, protocol.SEND_BYTES, reader))
    return num_bytes


@device
def _send(ctx, args, fingerprint, channel, count, x, start, piece, NETWORK: tl.constexpr):
    """Stages bytes [start, start + piece) of what goes to each peer; ranks of other nodes get them, all are told."""
    state, window = word(args, protocol.STATE), window_of_collectives(ctx)
    me, size, shared = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.SHARED)
    status, reused = tl.cast(control.OK, tl.int64), count + 1 - protocol.NUM_SLOTS
    if reused > word(ctx, control.GENERATION) << control.GENERATION_SHIFT:  # the slot was used in this generation
        for distance in range(1, size):
            rank = (me + distance) % size
            if status == control.OK:
                taken = pushed_word(ctx, state, channel, protocol.PUSHED_TAKEN, rank)
                status = wait(ctx, fingerprint, taken, reused, rank, sites.EXCHANGE_TAKEN)  # WAR
    if status == control.OK:
        slot = slot_offset(channel_ring(word(state, protocol.SENT_SLOTS), channel), count)
        to = slot_offset(channel_ring(word(state, protocol.RECEIVED_SLOTS), channel), count) + me * piece
        stage(ctx, args, x, peer(ctx, me) + slot, start, piece)
        for distance in range(1, size):
            rank = (me + distance) % size
            if (peer(ctx, rank) == 0) & _is_told(ctx, args, rank):
                length = tl.minimum(_bytes_for(ctx, args, rank) - start, piece)
                if length > 0:
                    start_put(ctx, window, rank, to, slot + rank * piece * (1 - shared), length, NETWORK)
        quiet(ctx, NETWORK)
        for distance in range(1, size):
            rank = (me + distance) % size
            if _is_told(ctx, args, rank):
                push(ctx, state, channel, protocol.PUSHED_SENT, rank, me, count + 1, NETWORK)
    return status


@device
def _meet_sender(ctx, args, fingerprint, channel, count, rank, NETWORK: tl.constexpr):
    """Waits until a peer's piece is there for those that it tells itself."""
    sent = pushed_word(ctx, word(args, protocol.STATE), channel, protocol.PUSHED_SENT, rank)
    return meet(ctx, fingerprint, sent, count + 1, rank, sites.EXCHANGE_SENT, NETWORK)  # RAW


@device
def _forward(ctx, args, fingerprint, channel, count, NETWORK: tl.constexpr):
    """Tells the other ranks of this node what ranks of other nodes sent to this one for all of it."""
    state = word(args, protocol.STATE)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    node, status = node_of(ctx, table, me), tl.cast(control.OK, tl.int64)
    for distance in range(1, size):
        source = (me + distance) % size
        if (status == control.OK) & (peer(ctx, source) == 0) & (_forwarder(ctx, table, source, node) == me):
            status = _meet_sender(ctx, args, fingerprint, channel, count, source, NETWORK)
            for number in range(num_members(ctx, table, node)):
                rank = member(ctx, table, node, number)
                if (status == control.OK) & (rank != me):
                    push(ctx, state, channel, protocol.PUSHED_FORWARDED, rank, source, count + 1, NETWORK)
    return status


@device
def _arrival(ctx, args, fingerprint, channel, count, rank, piece, NETWORK: tl.constexpr):
    """(address of a peer's piece, status) once it is there."""
    state, shared = word(args, protocol.STATE), word(args, protocol.SHARED)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    teller, holder = rank, rank
    place = slot_offset(channel_ring(word(state, protocol.SENT_SLOTS), channel), count) + me * piece * (1 - shared)
    if peer(ctx, rank) == 0:
        holder = me
        if shared != 0:
            holder = _forwarder(ctx, table, rank, node_of(ctx, table, me))
        if holder != me:
            teller = holder  # once it has come, it is the sender who is awaited
        place = slot_offset(channel_ring(word(state, protocol.RECEIVED_SLOTS), channel), count) + rank * piece
    status = _meet_sender(ctx, args, fingerprint, channel, count, teller, NETWORK)
    if (status == control.OK) & (teller != rank):
        forwarded = pushed_word(ctx, state, channel, protocol.PUSHED_FORWARDED, rank)
        status = meet(ctx, fingerprint, forwarded, count + 1, rank, sites.EXCHANGE_FORWARDED, NETWORK)  # RAW
    return peer(ctx, holder) + place, status


@device
def _receive(ctx, args, fingerprint, channel, count, x, out, start, piece, DTYPE: tl.constexpr, OP: tl.constexpr,
             NETWORK: tl.constexpr):  # fmt: skip
    """Takes bytes [start, start + piece) of what comes from each peer, or reduces them in rank order."""
    state, me, size = word(args, protocol.STATE), word(ctx, control.RANK), word(ctx, control.SIZE)
    sources, status = word(args, protocol.SOURCES) + channel * size * 8, tl.cast(control.OK, tl.int64)
    own = x + entry(ctx, args, protocol.SEND_OFFSET, me) + start
    for distance in range(1, size):
        rank = (me + distance) % size
        if status == control.OK:
            place, status = _arrival(ctx, args, fingerprint, channel, count, rank, piece, NETWORK)
            if OP != "none":
                set_word(sources, rank, place)
            elif status == control.OK:
                take(ctx, args, out, rank, place, start, piece)
    if status == control.OK:
        if OP == "none":
            take(ctx, args, out, me, own, start, piece)
        else:
            set_word(sources, me, own)
            tl.debug_barrier()  # all threads see the sources
            ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
            length = tl.maximum(tl.minimum(entry(ctx, args, protocol.RECEIVE_BYTES, me) - start, piece), 0)
            reduce_listed(out + start, sources, size, length // ITEM, size, DTYPE, DTYPE, OP)
        for distance in range(1, size):
            rank = (me + distance) % size
            push(ctx, state, channel, protocol.PUSHED_TAKEN, rank, me, count + 1, NETWORK)
    return status


@device
def _exchange_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                      NETWORK: tl.constexpr):  # fmt: skip
    state, status = word(args, protocol.STATE), tl.cast(control.OK, tl.int64)
    num_channels, first = word(state, protocol.NUM_CHANNELS), word(state, protocol.CHUNKS + 2 * channel + 1)
    piece = (protocol.CHUNK_BYTES // word(ctx, control.SIZE)) & -64
    stride = piece * num_channels
    # at least one step, so that ranks meet (and compare what they call) even when there is nothing to move
    num_steps = tl.maximum((word(args, protocol.MAX_PAIR_BYTES) + stride - 1) // stride, 1)
    for step in range(num_steps + 1):
        start, count = step * stride + channel * piece, first + step
        if (status == control.OK) & (step < num_steps):
            status = _send(ctx, args, fingerprint, channel, count, x, start, piece, NETWORK)
        if step > 0:
            if (status == control.OK) & (word(args, protocol.SHARED) != 0):
                status = _forward(ctx, args, fingerprint, channel, count - 1, NETWORK)
            if status == control.OK:
                status = _receive(ctx, args, fingerprint, channel, count - 1, x, out, start - stride, piece, DTYPE, OP,
                                  NETWORK)  # fmt: skip
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel + 1, first + num_steps)
    return status


@kernel("exchange_network", programs=all_programs, max_registers=168)
def exchange_network(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                     DTYPE: tl.constexpr, OP: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _exchange_channel, DTYPE, OP, NETWORK)
