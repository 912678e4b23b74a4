"""Broadcast among ranks on several nodes: pieces go down a tree of nodes, and each node's ranks read them there.

A node's *holder* gets the pieces for it: the root on its own node, elsewhere the rank with the root's number there,
modulo how many there are. The tree is a chain if there are at least as many pieces as nodes: then each link carries the
message once. Else it has a fan-out of 2, and fewer hops.
A holder's step i: get piece i (the root: from x) | tell its node, put it to the nodes below | copy it out | see that
piece i - 1 was read, and tell the node above. The others copy out what their holder tells them of. *Readers* of a
holder are the other ranks of its node and the holders below. The rank *above*, from which pieces come, is a holder's in
the node above; the others' is their holder.

Edges; every word is in the waiter's own memory
  RAW  SENT: the piece is in the holder's slot; from the node above, it has arrived there. Of a reader: it is in the
       operation; its holder waits for that, so that nobody broadcasts to ranks that do something else.
  WAR  TAKEN: a reader doesn't read that piece any more, nor do its own readers; raised for the rank above if the slot
       is used again in the operation. In the end each rank tells every peer that it has taken all: that is what whoever
       writes to the slots next, in later operations, waits for.
       ARRIVED: the piece has been put to a holder below, so the slot that it was put from may be overwritten.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device, opaque
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.device.gpu.network import quiet, start_put
from epcomm.device.gpu.waiting import meet, peer, wait, window_of_collectives
from epcomm.kernels.gpu.channels import by_channels, channel_ring, push, pushed_word, slot_offset
from epcomm.kernels.gpu.nodes import member, node_of, num_members, number_of
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import nodes, sites


@device
def _holder(ctx, args, table, place):
    """The rank that gets the pieces for a node, by that node's place in the tree; the root's is 0."""
    root = word(args, protocol.ROOT)
    node = (node_of(ctx, table, root) + place) % word(table, nodes.NUM_NODES)
    return member(ctx, table, node, number_of(ctx, table, root) % num_members(ctx, table, node))


@device
def _num_near(ctx, table):
    """How many other ranks this rank's node has."""
    return num_members(ctx, table, node_of(ctx, table, word(ctx, control.RANK))) - 1


@device
def _reader(ctx, args, table, below, index):
    """A reader of this holder: first come the other ranks of its node, then the holders in places `below` and on."""
    me, num_near = word(ctx, control.RANK), _num_near(ctx, table)
    number = tl.minimum(index, num_near)
    number = tl.where(number < number_of(ctx, table, me), number, number + 1)
    if index < num_near:
        rank = member(ctx, table, node_of(ctx, table, me), number)
    else:
        rank = _holder(ctx, args, table, below + index - num_near)
    return rank


@device
def _meet_readers(ctx, args, fingerprint, channel, below, num_readers, near, far, value, site, NETWORK: tl.constexpr):
    """Waits until the readers on this node have raised the word `near`, and the holders below that `far`."""
    state, status = word(args, protocol.STATE), tl.cast(control.OK, tl.int64)
    table = word(state, protocol.NODES)
    for index in range(num_readers):
        rank = _reader(ctx, args, table, below, index)
        if status == control.OK:
            kind = tl.where(index < _num_near(ctx, table), near, far)
            raised = pushed_word(ctx, state, channel, kind, rank)
            status = meet(ctx, fingerprint, raised, value, rank, site, NETWORK)
    return status


@device
def _wait_for_everyone(ctx, args, fingerprint, channel, reused):
    """Waits until all peers have taken the piece before `reused`, of an earlier operation."""
    state, status = word(args, protocol.STATE), tl.cast(control.OK, tl.int64)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    if reused > word(ctx, control.GENERATION) << control.GENERATION_SHIFT:  # the slot was used in this generation
        for distance in range(1, size):
            rank = (me + distance) % size
            if status == control.OK:
                taken = pushed_word(ctx, state, channel, protocol.PUSHED_TAKEN, rank)
                status = wait(ctx, fingerprint, taken, reused, rank, sites.EXCHANGE_TAKEN)  # WAR
    return status


@device
def _pass_on(ctx, args, channel, count, below, num_readers, length, NETWORK: tl.constexpr):
    """Puts the piece in this rank's slot to the holders below, and tells all readers of it."""
    state, me = word(args, protocol.STATE), word(ctx, control.RANK)
    table = word(state, protocol.NODES)
    slot = slot_offset(channel_ring(word(state, protocol.RECEIVED_SLOTS), channel), count)
    num_near = _num_near(ctx, table)
    if (length > 0) & (num_readers > num_near):
        for index in range(num_near, num_readers):
            rank = _reader(ctx, args, table, below, index)
            start_put(ctx, window_of_collectives(ctx), rank, slot, slot, length, NETWORK)
        quiet(ctx, NETWORK)
    for index in range(num_readers):
        rank = _reader(ctx, args, table, below, index)
        push(ctx, state, channel, protocol.PUSHED_SENT, rank, me, count + 1, NETWORK)


@device
def _broadcast_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                       NETWORK: tl.constexpr):  # fmt: skip
    """One channel's pieces. The rank above the root is itself; one that holds nothing has no readers."""
    state, num_bytes = word(args, protocol.STATE), word(args, protocol.MAX_PAIR_BYTES)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    num_channels, num_nodes = word(state, protocol.NUM_CHANNELS), word(table, nodes.NUM_NODES)
    share = num_bytes // (num_channels * (num_nodes - 1) * protocol.PIECES_PER_HOP) & -64
    piece = tl.minimum(tl.maximum(share, protocol.PIECE_BYTES), protocol.CHUNK_BYTES)
    stride = piece * num_channels
    num_pieces = tl.maximum((num_bytes + stride - 1) // stride, 1)  # one so that ranks meet even with nothing to move
    fan_out = tl.cast(tl.where(num_pieces >= num_nodes, 1, 2), tl.int64)
    first, root = word(state, protocol.CHUNKS + 2 * channel + 1), word(args, protocol.ROOT)
    place = (node_of(ctx, table, me) - node_of(ctx, table, root) + num_nodes) % num_nodes
    above, num_readers = _holder(ctx, args, table, place), tl.cast(0, tl.int64)
    is_holder, below = above == me, fan_out * place + 1
    if is_holder:
        above = _holder(ctx, args, table, tl.maximum(place - 1, 0) // fan_out)
        num_readers = _num_near(ctx, table) + tl.maximum(tl.minimum(num_nodes - below, fan_out), 0)
    sent, taken, arrived = protocol.PUSHED_SENT, protocol.PUSHED_TAKEN, protocol.PUSHED_ARRIVED
    if above != me:
        push(ctx, state, channel, sent, above, me, first + 1, NETWORK)
    status = tl.cast(control.OK, tl.int64)
    for step_number in range(num_pieces):
        channel, step = opaque(channel), opaque(step_number)
        start, count = (step * word(state, protocol.NUM_CHANNELS) + channel) * piece, first + step
        length = tl.maximum(tl.minimum(word(args, protocol.MAX_PAIR_BYTES) - start, piece), 0)
        reused, lag = count + 1 - protocol.NUM_SLOTS, tl.minimum(num_readers, 1)  # meanwhile readers read
        slot = slot_offset(channel_ring(word(state, protocol.RECEIVED_SLOTS), channel), count)
        source = peer(ctx, me) + slot
        if status == control.OK:
            if (step < protocol.NUM_SLOTS) & is_holder:
                status = _wait_for_everyone(ctx, args, fingerprint, channel, reused)
            if step >= protocol.NUM_SLOTS:
                status = _meet_readers(ctx, args, fingerprint, channel, below, num_readers, taken, taken, reused,
                                       sites.EXCHANGE_TAKEN, NETWORK)  # fmt: skip  # WAR
        if (status == control.OK) & (above != me):
            raised = pushed_word(ctx, state, channel, sent, above)
            status = meet(ctx, fingerprint, raised, count + 1, above, sites.EXCHANGE_SENT, NETWORK)  # RAW
        if status == control.OK:
            if above == me:
                copy(source, x + start, length)
                source = x + start
            elif not is_holder:
                source = peer(ctx, above) + slot
            elif step + protocol.NUM_SLOTS < num_pieces:
                push(ctx, state, channel, arrived, above, me, count + 1, NETWORK)
            _pass_on(ctx, args, channel, count, below, num_readers, length, NETWORK)
            if out + start != source:
                copy(out + start, source, length)
        if (above != me) & (step >= lag) & (step - lag + protocol.NUM_SLOTS < num_pieces):
            if status == control.OK:
                status = _meet_readers(ctx, args, fingerprint, channel, below, num_readers, taken, arrived,
                                       count + 1 - lag, sites.BROADCAST_ARRIVED, NETWORK)  # fmt: skip  # WAR
            if status == control.OK:
                push(ctx, state, channel, taken, above, me, count + 1 - lag, NETWORK)
    if status == control.OK:
        status = _meet_readers(ctx, args, fingerprint, channel, below, num_readers, sent, sent, first + 1,
                               sites.BROADCAST_ENTERED, NETWORK)  # fmt: skip  # RAW
    if status == control.OK:
        for distance in range(1, size):
            push(ctx, state, channel, taken, (me + distance) % size, me, first + num_pieces, NETWORK)
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel + 1, first + num_pieces)
    return status


@kernel("broadcast_network", programs=all_programs, max_registers=168)
def broadcast_network(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5, NETWORK: tl.constexpr):
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _broadcast_channel, tl.uint8, "none", NETWORK)
