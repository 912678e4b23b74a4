"""Broadcast among ranks on several hosts: pieces go down a tree of hosts, and each host's ranks read them there.

A host's *holder* gets the pieces for it: the root on its own host, elsewhere the rank with the root's number there,
modulo how many there are. The tree is a chain if there are at least as many pieces as hosts: then each link carries the
message once. Else it has a fan-out of 2, and fewer hops.
A holder's step i: get piece i (the root: from x) | tell its host, put it to the hosts below | copy it out | see that
piece i - 1 was read, and tell the host above. The others copy out what their holder tells them of.

Edges; every word is in the waiter's own memory
  RAW  SENT: the piece is in the holder's slot; from the host above, it has arrived there.
  WAR  TAKEN: nobody reads the peer's slot of that piece any more, nor the slot that it read it from. Once a rank has
       got all pieces it tells every peer so, and before an operation's first NUM_SLOTS pieces a holder waits for all
       peers, which an earlier operation's writers and readers are among; later for those below and those of its host.
       ARRIVED: what was put to the host below was sent, so the holder may overwrite it (the host below may still read).
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
def _meet_readers(ctx, args, channel, count, place, fan_out, kind, site):
    """Waits until the ranks of this host have taken the piece before `count`, and those below say `kind` of it."""
    state, me = word(args, protocol.STATE), word(ctx, control.RANK)
    table = word(state, protocol.NODES)
    node = node_of(ctx, table, me)
    for number in range(num_members(ctx, table, node)):
        rank = member(ctx, table, node, number)
        if rank != me:
            status = meet_pushed(ctx, state, channel, protocol.PUSHED_TAKEN, rank, count, sites.EXCHANGE_TAKEN)  # WAR
            if status != control.OK:
                return status
    for below in range(fan_out * place + 1, min(fan_out * (place + 1) + 1, word(table, nodes.NUM_NODES))):
        status = meet_pushed(ctx, state, channel, kind, _holder(ctx, args, table, below), count, site)  # WAR
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
def _hold(ctx, args, channel, first, num_pieces, place, fan_out, piece, stride):
    """A holder's part; `above` is the rank it gets pieces from, itself if it is the root."""
    state, me, num_bytes = word(args, protocol.STATE), word(ctx, control.RANK), word(args, protocol.MAX_PAIR_BYTES)
    table = word(state, protocol.NODES)
    above = _holder(ctx, args, table, (place - 1) // fan_out) if place > 0 else me
    is_read = fan_out * place + 1 < word(table, nodes.NUM_NODES) or num_members(ctx, table, node_of(ctx, table, me)) > 1
    lag = 1 if is_read else 0  # meanwhile readers read
    for step in range(num_pieces + lag):
        start, count = step * stride + channel * piece, first + step
        if step < num_pieces:
            length = max(0, min(piece, num_bytes - start))
            slot = peer(ctx, me) + slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count)
            reused = count + 1 - protocol.NUM_SLOTS
            if step < protocol.NUM_SLOTS:
                oldest = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
                status = _meet_everyone(ctx, state, channel, reused if reused > oldest else 0)
            else:
                status = _meet_readers(
                    ctx, args, channel, reused, place, fan_out, protocol.PUSHED_TAKEN, sites.EXCHANGE_TAKEN
                )
            if status == control.OK and above != me:
                status = meet_pushed(  # RAW
                    ctx, state, channel, protocol.PUSHED_SENT, above, count + 1, sites.EXCHANGE_SENT
                )
            if status != control.OK:
                return status
            if above == me:
                copy(slot, word(args, protocol.X) + start, length)
            else:
                push(ctx, state, channel, protocol.PUSHED_ARRIVED, above, me, count + 1)
            _pass_on(ctx, args, channel, count, place, fan_out, length)
            _copy_out(args, start, word(args, protocol.X) + start if above == me else slot, length)
        if step >= lag:
            taken = count + 1 - lag
            status = _meet_readers(
                ctx, args, channel, taken, place, fan_out, protocol.PUSHED_ARRIVED, sites.BROADCAST_ARRIVED
            )
            if status != control.OK:
                return status
            if above != me:
                push(ctx, state, channel, protocol.PUSHED_TAKEN, above, me, taken)
    return control.OK


@device
def _read(ctx, args, channel, first, num_pieces, holder, piece, stride):
    """The part of a rank that reads what its holder has."""
    state, num_bytes = word(args, protocol.STATE), word(args, protocol.MAX_PAIR_BYTES)
    for step in range(num_pieces):
        start, count = step * stride + channel * piece, first + step
        status = meet_pushed(ctx, state, channel, protocol.PUSHED_SENT, holder, count + 1, sites.EXCHANGE_SENT)  # RAW
        if status != control.OK:
            return status
        slot = peer(ctx, holder) + slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count)
        _copy_out(args, start, slot, min(piece, num_bytes - start))
        push(ctx, state, channel, protocol.PUSHED_TAKEN, holder, word(ctx, control.RANK), count + 1)
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
