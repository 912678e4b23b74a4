"""Broadcast among ranks on several hosts: pieces go down a tree of hosts, and each host's ranks read them there.

A host's *holder* gets the pieces for it: the root on its own host, elsewhere the rank with the root's number there,
modulo how many there are. The tree is a chain if there are at least as many pieces as hosts: then each link carries the
message once. Else it has a fan-out of 2, and fewer hops.
A holder's step i: get piece i (the root: from x) | tell its host, put it to the hosts below | copy it out | see that
piece i - 1 was read, and tell the host above. The others copy out what their holder tells them of. *Readers* of a
holder are the holders below and the other ranks of its host.

Edges; every word is in the waiter's own memory
  RAW  SENT: the piece is in the holder's slot; from the host above, it has arrived there. Of a reader: it is in the
       operation; its holder waits for that, so that nobody broadcasts to ranks that do something else.
  WAR  TAKEN: a reader doesn't read that piece any more, nor do its own readers; raised for the holder if the slot is
       used again in the operation. In the end each rank tells every peer that it has taken all: that is what whoever
       writes to the slots next, in later operations, waits for.
       ARRIVED: the piece has been put to a holder below, so the slot that it was put from may be overwritten.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import copy, copy_streaming, set_word, word
from epcomm.device.cpu.network import put
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.kernels.cpu.channels import data_movement, meet_pushed, push, slot_offset
from epcomm.kernels.cpu.nodes import member, node_of, num_members, number_of
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import nodes, sites

_PIECES_PER_HOP = 4  # of a message of middle size: a chain is full for most of the time


@device
def _holder(ctx, args, table, place):
    """The rank that gets the pieces for a host, by that host's place in the tree; the root's is 0."""
    root = word(args, protocol.ROOT)
    node = (node_of(ctx, table, root) + place) % word(table, nodes.NUM_NODES)
    return member(ctx, table, node, number_of(ctx, table, root) % num_members(ctx, table, node))


@device
def _meet_readers(ctx, args, channel, place, fan_out, here, below, value, site):
    """Waits until the other ranks of this host have raised the word `here`, and the holders below that `below`."""
    state, me = word(args, protocol.STATE), word(ctx, control.RANK)
    table = word(state, protocol.NODES)
    node = node_of(ctx, table, me)
    for number in range(num_members(ctx, table, node)):
        rank = member(ctx, table, node, number)
        if rank != me:
            status = meet_pushed(ctx, state, channel, here, rank, value, site)
            if status != control.OK:
                return status
    for child in range(fan_out * place + 1, min(fan_out * (place + 1) + 1, word(table, nodes.NUM_NODES))):
        status = meet_pushed(ctx, state, channel, below, _holder(ctx, args, table, child), value, site)
        if status != control.OK:
            return status
    return control.OK


@device
def _meet_everyone(ctx, state, channel, count):
    """Waits until all peers have taken the piece before `count`, of an earlier operation."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    for distance in range(1, size):
        rank = (me + distance) % size
        status = meet_pushed(ctx, state, channel, protocol.PUSHED_TAKEN, rank, count, sites.EXCHANGE_TAKEN)  # WAR
        if status != control.OK:
            return status
    return control.OK


@device
def _pass_on(ctx, args, channel, count, place, fan_out, length):
    """Tells this host of the piece in this rank's slot, and puts it to the holders of the hosts below."""
    state, me = word(args, protocol.STATE), word(ctx, control.RANK)
    table = word(state, protocol.NODES)
    slot, node = slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count), node_of(ctx, table, me)
    for number in range(num_members(ctx, table, node)):
        rank = member(ctx, table, node, number)
        if rank != me:
            push(ctx, state, channel, protocol.PUSHED_SENT, rank, me, count + 1)
    for below in range(fan_out * place + 1, min(fan_out * (place + 1) + 1, word(table, nodes.NUM_NODES))):
        rank = _holder(ctx, args, table, below)
        put(ctx, window_of_collectives(ctx), rank, slot, slot, length)
        push(ctx, state, channel, protocol.PUSHED_SENT, rank, me, count + 1)


@device
def _copy_out(args, start, source, length):
    """Copies a piece to its place in the result."""
    out = word(args, protocol.OUT) + start
    if out != source and length > 0:
        if word(args, protocol.STREAMING):
            copy_streaming(out, source, length)
        else:
            copy(out, source, length)


@device
def _is_reused(step, num_pieces):
    """Whether the operation uses a piece's slot again."""
    return step + protocol.NUM_SLOTS < num_pieces


@device
def _wait_for_slots(ctx, args, channel, step, count, place, fan_out):
    """Waits until nobody reads this rank's slot, and those of the holders below."""
    reused = count + 1 - protocol.NUM_SLOTS
    if step < protocol.NUM_SLOTS:
        oldest = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
        return _meet_everyone(ctx, word(args, protocol.STATE), channel, reused if reused > oldest else 0)  # WAR
    taken, site = protocol.PUSHED_TAKEN, sites.EXCHANGE_TAKEN
    return _meet_readers(ctx, args, channel, place, fan_out, taken, taken, reused, site)  # WAR


@device
def _hold(ctx, args, channel, first, num_pieces, place, fan_out, piece, stride):
    """A holder's part; `above` is the rank it gets pieces from, itself if it is the root."""
    state, me, num_bytes = word(args, protocol.STATE), word(ctx, control.RANK), word(args, protocol.MAX_PAIR_BYTES)
    table = word(state, protocol.NODES)
    above = _holder(ctx, args, table, (place - 1) // fan_out) if place > 0 else me
    is_read = fan_out * place + 1 < word(table, nodes.NUM_NODES) or num_members(ctx, table, node_of(ctx, table, me)) > 1
    lag = 1 if is_read else 0  # meanwhile readers read
    sent, taken, arrived = protocol.PUSHED_SENT, protocol.PUSHED_TAKEN, protocol.PUSHED_ARRIVED
    if above != me:
        push(ctx, state, channel, sent, above, me, first + 1)
    for step in range(num_pieces):
        start, count = step * stride + channel * piece, first + step
        length = max(0, min(piece, num_bytes - start))
        slot = peer(ctx, me) + slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count)
        status = _wait_for_slots(ctx, args, channel, step, count, place, fan_out)
        if status == control.OK and above != me:
            status = meet_pushed(ctx, state, channel, sent, above, count + 1, sites.EXCHANGE_SENT)  # RAW
        if status != control.OK:
            return status
        if above == me:
            copy(slot, word(args, protocol.X) + start, length)
        elif _is_reused(step, num_pieces):
            push(ctx, state, channel, arrived, above, me, count + 1)
        _pass_on(ctx, args, channel, count, place, fan_out, length)
        _copy_out(args, start, word(args, protocol.X) + start if above == me else slot, length)
        if above != me and step >= lag and _is_reused(step - lag, num_pieces):
            value, site = count + 1 - lag, sites.BROADCAST_ARRIVED
            status = _meet_readers(ctx, args, channel, place, fan_out, taken, arrived, value, site)  # WAR
            if status != control.OK:
                return status
            push(ctx, state, channel, taken, above, me, value)
    return _meet_readers(ctx, args, channel, place, fan_out, sent, sent, first + 1, sites.BROADCAST_ENTERED)  # RAW


@device
def _read(ctx, args, channel, first, num_pieces, holder, piece, stride):
    """The part of a rank that reads what its holder has."""
    state, me, num_bytes = word(args, protocol.STATE), word(ctx, control.RANK), word(args, protocol.MAX_PAIR_BYTES)
    push(ctx, state, channel, protocol.PUSHED_SENT, holder, me, first + 1)
    for step in range(num_pieces):
        start, count = step * stride + channel * piece, first + step
        status = meet_pushed(ctx, state, channel, protocol.PUSHED_SENT, holder, count + 1, sites.EXCHANGE_SENT)  # RAW
        if status != control.OK:
            return status
        slot = peer(ctx, holder) + slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count)
        _copy_out(args, start, slot, min(piece, num_bytes - start))
        if _is_reused(step, num_pieces):
            push(ctx, state, channel, protocol.PUSHED_TAKEN, holder, me, count + 1)
    return control.OK


@device
def _broadcast_channel(ctx, args, channel):
    state, num_bytes = word(args, protocol.STATE), word(args, protocol.MAX_PAIR_BYTES)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    num_channels, num_nodes = word(state, protocol.NUM_CHANNELS), word(table, nodes.NUM_NODES)
    share = num_bytes // (num_channels * (num_nodes - 1) * _PIECES_PER_HOP) & -64
    piece = min(protocol.CHUNK_BYTES, max(protocol.PIECE_BYTES, share))
    stride = piece * num_channels
    num_pieces = max(1, (num_bytes + stride - 1) // stride)  # one so that ranks meet even when there is nothing to move
    fan_out = 1 if num_pieces >= num_nodes else 2
    first = word(state, protocol.CHUNKS + 2 * channel + 1)
    set_word(state, protocol.CHUNKS + 2 * channel + 1, first + num_pieces)
    root_node = node_of(ctx, table, word(args, protocol.ROOT))
    place = (node_of(ctx, table, me) - root_node + num_nodes) % num_nodes
    holder = _holder(ctx, args, table, place)
    if holder == me:
        status = _hold(ctx, args, channel, first, num_pieces, place, fan_out, piece, stride)
    else:
        status = _read(ctx, args, channel, first, num_pieces, holder, piece, stride)
    if status != control.OK:
        return status
    for distance in range(1, size):
        push(ctx, state, channel, protocol.PUSHED_TAKEN, (me + distance) % size, me, first + num_pieces)
    return control.OK


broadcast_network = data_movement("broadcast_network", _broadcast_channel)
