"""`exchange` among ranks on several hosts: each rank stages bytes for its peers, and puts them to other hosts.

Ranks of the sender's host read what it staged, those of other hosts what arrived in their own memory. Where all
receivers get the same bytes they travel once per host, to the *forwarder*: the rank with the sender's number there,
modulo how many there are. The others of that host read from its memory.
Where pieces are large, hosts take turns in putting, see `TURN_BYTES`.
A channel's step i: stage and put piece i | tell the ranks of this host what came to forward | take piece i - 1.

Edges; every word is in the waiter's own memory
  RAW  SENT: the peer has staged the piece; from another host, it has arrived here (raised even when it sends nothing).
       FORWARDED: the piece has arrived in the forwarder's memory.
  WAR  TAKEN: the peer has read the piece that was in the slot NUM_SLOTS pieces ago, in this rank's memory, in its own
       or in the forwarder's; all three are written on this rank's behalf only after all peers have raised it. A piece
       that was taken had been put, so what it was put from is free as well.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import set_word, word
from epcomm.device.cpu.network import put
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.kernels.cpu.channels import data_movement, meet_pushed, push, slot_offset
from epcomm.kernels.cpu.exchange import entry, own_source, stage, take
from epcomm.kernels.cpu.nodes import member, node_of, num_members, number_of
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import nodes, sites


@device
def _forwarder(ctx, table, source, node):
    """The rank of a node to which the bytes of a rank of another node come."""
    return member(ctx, table, node, number_of(ctx, table, source) % num_members(ctx, table, node))


@device
def _send(ctx, args, channel, count, start, piece):
    """Stages bytes [start, start + piece) of what goes to each peer; ranks of other hosts get them, all are told."""
    state, window = word(args, protocol.STATE), window_of_collectives(ctx)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    reused = count + 1 - protocol.NUM_SLOTS
    if reused <= word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
        reused = 0  # the slot was not used in this generation
    for distance in range(1, size):
        rank = (me + distance) % size
        status = meet_pushed(ctx, state, channel, protocol.PUSHED_TAKEN, rank, reused, sites.EXCHANGE_TAKEN)  # WAR
        if status != control.OK:
            return status
    slot = slot_offset(word(state, protocol.SENT_SLOTS), channel, count)
    stage(ctx, args, peer(ctx, me) + slot, start, piece)
    to = slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count) + me * piece
    if not word(args, protocol.SHARED):
        _tell_host(ctx, state, channel, protocol.PUSHED_SENT, me, count)
        for distance in range(1, size):
            rank, before = (me + distance) % size, (me - distance + size) % size
            if peer(ctx, rank) == 0:
                length = min(piece, entry(ctx, args, protocol.SEND_BYTES, rank) - start)
                put(ctx, window, rank, to, slot + rank * piece, length)
                push(ctx, state, channel, protocol.PUSHED_SENT, rank, me, count + 1)
                if length >= protocol.TURN_BYTES and distance + 1 < size and peer(ctx, before) == 0:
                    status = _meet_sender(ctx, state, channel, count, before)
                    if status != control.OK:
                        return status
        return control.OK
    own_node, num_nodes = node_of(ctx, table, me), word(table, nodes.NUM_NODES)
    _tell_host(ctx, state, channel, protocol.PUSHED_SENT, me, count)
    for distance in range(1, num_nodes):
        node, length = (own_node + distance) % num_nodes, 0
        for number in range(num_members(ctx, table, node)):
            num_bytes = entry(ctx, args, protocol.SEND_BYTES, member(ctx, table, node, number))
            length = max(length, min(piece, num_bytes - start))
        forwarder = _forwarder(ctx, table, me, node)
        put(ctx, window, forwarder, to, slot, length)
        push(ctx, state, channel, protocol.PUSHED_SENT, forwarder, me, count + 1)
        before, number = (own_node - distance + num_nodes) % num_nodes, number_of(ctx, table, me)
        if length >= protocol.TURN_BYTES and distance + 1 < num_nodes and number < num_members(ctx, table, before):
            status = _meet_sender(ctx, state, channel, count, member(ctx, table, before, number))
            if status != control.OK:
                return status
    return control.OK


@device
def _tell_host(ctx, state, channel, kind, source, count):
    """Tells the other ranks of this host that a piece of `source` is where they read it."""
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    node = node_of(ctx, table, me)
    for number in range(num_members(ctx, table, node)):
        rank = member(ctx, table, node, number)
        if rank != me:
            push(ctx, state, channel, kind, rank, source, count + 1)


@device
def _meet_sender(ctx, state, channel, count, rank):
    """Waits until a peer's piece is there for those that it tells itself."""
    return meet_pushed(ctx, state, channel, protocol.PUSHED_SENT, rank, count + 1, sites.EXCHANGE_SENT)  # RAW


@device
def _forward(ctx, args, channel, count):
    """Passes on what ranks of other hosts sent to this one for its host."""
    state = word(args, protocol.STATE)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    node = node_of(ctx, table, me)
    for distance in range(1, size):
        rank = (me + distance) % size
        if peer(ctx, rank) == 0 and _forwarder(ctx, table, rank, node) == me:
            status = _meet_sender(ctx, state, channel, count, rank)
            if status != control.OK:
                return status
            _tell_host(ctx, state, channel, protocol.PUSHED_FORWARDED, rank, count)
    return control.OK


@device
def _arrival(ctx, args, channel, count, rank, piece):
    """(address of a peer's piece, status) once it is there."""
    state, shared = word(args, protocol.STATE), word(args, protocol.SHARED)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    if peer(ctx, rank) != 0:
        staged = peer(ctx, rank) + slot_offset(word(state, protocol.SENT_SLOTS), channel, count)
        return staged + (0 if shared else me * piece), _meet_sender(ctx, state, channel, count, rank)
    holder = _forwarder(ctx, table, rank, node_of(ctx, table, me)) if shared else me
    received = slot_offset(word(state, protocol.RECEIVED_SLOTS), channel, count) + rank * piece
    if holder == me:
        status = _meet_sender(ctx, state, channel, count, rank)
    else:
        status = _meet_sender(ctx, state, channel, count, holder)  # once it has come, it is the sender who is awaited
        if status == control.OK:
            status = meet_pushed(  # RAW
                ctx, state, channel, protocol.PUSHED_FORWARDED, rank, count + 1, sites.EXCHANGE_FORWARDED
            )
    return peer(ctx, holder) + received, status


@device
def _receive(ctx, args, channel, count, start, piece):
    """Takes bytes [start, start + piece) of what comes from each peer, or reduces them in rank order."""
    state, reduce = word(args, protocol.STATE), word(args, protocol.REDUCE)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    sources = word(args, protocol.SOURCES) + channel * size * 8
    for distance in range(1, size):
        rank = (me + distance) % size
        place, status = _arrival(ctx, args, channel, count, rank, piece)
        if status != control.OK:
            return status
        if reduce == 0:
            take(ctx, args, rank, place, start, piece)
        else:
            set_word(sources, rank, place)
    own = own_source(ctx, args, start)
    if reduce != 0:
        length = min(piece, entry(ctx, args, protocol.RECEIVE_BYTES, me) - start)
        if length > 0:
            set_word(sources, me, own)
            call6(reduce, word(args, protocol.OUT) + start, sources, size, length, size, 0)
    elif own != word(args, protocol.OUT) + entry(ctx, args, protocol.RECEIVE_OFFSET, me) + start:
        take(ctx, args, me, own, start, piece)
    for distance in range(1, size):
        push(ctx, state, channel, protocol.PUSHED_TAKEN, (me + distance) % size, me, count + 1)
    return control.OK


@device
def _exchange_channel(ctx, args, channel):
    state = word(args, protocol.STATE)
    num_channels, first = word(state, protocol.NUM_CHANNELS), word(state, protocol.CHUNKS + 2 * channel + 1)
    piece = (protocol.CHUNK_BYTES // word(ctx, control.SIZE)) & -64
    stride = piece * num_channels
    # at least one step, so that ranks meet (and compare what they call) even when there is nothing to move
    num_steps = max(1, (word(args, protocol.MAX_PAIR_BYTES) + stride - 1) // stride)
    set_word(state, protocol.CHUNKS + 2 * channel + 1, first + num_steps)
    for step in range(num_steps + 1):
        start, count = step * stride + channel * piece, first + step
        if step < num_steps:
            status = _send(ctx, args, channel, count, start, piece)
            if status != control.OK:
                return status
        if step > 0:
            if word(args, protocol.SHARED):
                status = _forward(ctx, args, channel, count - 1)
                if status != control.OK:
                    return status
            status = _receive(ctx, args, channel, count - 1, start - stride, piece)
            if status != control.OK:
                return status
    return control.OK


exchange_network = data_movement("exchange_network", _exchange_channel)
