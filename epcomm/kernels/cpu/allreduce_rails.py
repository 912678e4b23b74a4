"""Allreduce and reduce among ranks on several hosts: reduce on each host, exchange between hosts, gather on each host.

The first ranks of each host, as many as the smallest host has, each reduce one part of a chunk; the rank with the same
number on every host, its *rail*, reduces the same part. Each part of a host's partial result travels once to each other
host. Partial results of 16-bit floats are float32, so a result is rounded once.
A channel's step i: stage chunk i for this host (all but the part this rank reduces) | reduce this rank's part of chunk
i - 1 over its host and put that to its rail | reduce what the rail put of chunk i - 2 | copy chunk i - 3 out of the
slots of this host's ranks. Inputs are reduced in rank order, partial results in the order of hosts: the result has the
same bits everywhere.

Edges, with NUM_SLOTS = 4; a part belongs to one rank of each host
  RAW  STAGED, read where it was raised: the part is staged.     PARTIAL, pushed: a host's partial result has arrived.
       REDUCED, read where it was raised: the part of the result is there.
  WAR  staged slot of chunk c (last held c - 4): at step c - 1 this rank waited for REDUCED of c - 4 from all that read.
       Partial slot of chunk c, here and on the rail, written at step c + 1 (last held c - 4): at step c this rank
       waited for PARTIAL of c - 2 from the whole rail; a rank raises that at its step c - 1, after it reduced c - 4 at
       c - 2: what is here was put, and what is there was read.
       Reduced slot of chunk c, written at step c + 2 (last held c - 4): at step c + 1 this rank waited for STAGED of
       chunk c from all of its host; a peer stages c after it copied c - 4 out.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import copy, copy_streaming, set_word, word
from epcomm.device.cpu.network import put
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.device.cpu.waiting import meet, signal
from epcomm.kernels.cpu.allreduce_two_shot import stage_but_part
from epcomm.kernels.cpu.channels import meet_pushed, part_bytes, push, reduction_by_channels, slot_offset
from epcomm.kernels.cpu.nodes import member, node_of, num_members, number_of
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import nodes, sites


@device
def _partial(state, channel, count, node):
    """Offset of a node's partial result of a chunk."""
    slot = channel * protocol.NUM_SLOTS + count % protocol.NUM_SLOTS
    slot = slot * word(word(state, protocol.NODES), nodes.NUM_NODES) + node
    return word(state, protocol.PARTIAL_SLOTS) + slot * protocol.PARTIAL_BYTES


@device
def _channel_word(ctx, state, channel, kind, rank):
    """Address of a word that a rank of this host raises in its own memory."""
    line = channel * protocol.CHANNEL_WORDS + kind
    return peer(ctx, rank) + word(state, protocol.WORDS) + line * LINE


@device
def _reduce_on_host(ctx, args, channel, count, x, length):
    """Reduces this rank's part of a chunk over its host, and puts it to the ranks of its rail that want it."""
    state, root, window = word(args, protocol.STATE), word(args, protocol.ROOT), window_of_collectives(ctx)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources = word(args, protocol.SOURCES) + channel * word(ctx, control.SIZE) * 8
    part = part_bytes(length, word(table, nodes.NUM_RAILS))
    low = min(length, number * part)
    num_bytes, num_sources = min(length, low + part) - low, num_members(ctx, table, own_node)
    for index in range(num_sources):
        rank = member(ctx, table, own_node, index)
        if rank != me:
            raised = _channel_word(ctx, state, channel, protocol.STAGED, rank)
            status = meet(ctx, raised, count + 1, rank, sites.TWO_SHOT_STAGED)  # RAW
            if status != control.OK:
                return status
        staged = peer(ctx, rank) + slot_offset(word(state, protocol.STAGED_SLOTS), channel, count)
        set_word(sources, index, (x if rank == me else staged) + low)
    partial = _partial(state, channel, count, own_node)
    call6(word(args, protocol.REDUCE), peer(ctx, me) + partial, sources, num_sources, num_bytes, num_sources, 0)
    for distance in range(1, num_nodes):
        node = (own_node + distance) % num_nodes
        rank = member(ctx, table, node, number)
        if root < 0 or node_of(ctx, table, root) == node:
            put(ctx, window, rank, partial, partial, num_bytes * word(args, protocol.PARTIAL_SCALE))
        push(ctx, state, channel, protocol.PUSHED_PARTIAL, rank, me, count + 1)
    return control.OK


@device
def _reduce_on_rail(ctx, args, channel, count, length):
    """Reduces all hosts' partial results of this rank's part of a chunk."""
    state, root = word(args, protocol.STATE), word(args, protocol.ROOT)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources = word(args, protocol.SOURCES) + channel * size * 8
    for distance in range(1, num_nodes):
        rank = member(ctx, table, (own_node + distance) % num_nodes, number)
        status = meet_pushed(ctx, state, channel, protocol.PUSHED_PARTIAL, rank, count + 1, sites.RAILS_PARTIAL)  # RAW
        if status != control.OK:
            return status
    if root < 0 or node_of(ctx, table, root) == own_node:
        for node in range(num_nodes):
            set_word(sources, node, peer(ctx, me) + _partial(state, channel, count, node))
        part = part_bytes(length, word(table, nodes.NUM_RAILS))
        low = min(length, number * part)
        to = peer(ctx, me) + slot_offset(word(state, protocol.REDUCED_SLOTS), channel, count) + low
        call6(word(args, protocol.FINISH), to, sources, num_nodes, min(length, low + part) - low, size, 0)
    signal(_channel_word(ctx, state, channel, protocol.REDUCED, me), count + 1)
    return control.OK


@device
def _copy_out(ctx, args, channel, count, out, length):
    """Copies a chunk of the result out of the slots of this host's ranks."""
    state, root = word(args, protocol.STATE), word(args, protocol.ROOT)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, num_rails = node_of(ctx, table, me), word(table, nodes.NUM_RAILS)
    part = part_bytes(length, num_rails)
    for distance in range(num_rails):
        number = (number_of(ctx, table, me) + distance) % num_rails
        rank, low = member(ctx, table, own_node, number), min(length, number * part)
        raised = _channel_word(ctx, state, channel, protocol.REDUCED, rank)
        status = meet(ctx, raised, count + 1, rank, sites.TWO_SHOT_REDUCED)  # RAW
        if status != control.OK:
            return status
        if root < 0 or root == me:
            source = peer(ctx, rank) + slot_offset(word(state, protocol.REDUCED_SLOTS), channel, count) + low
            if word(args, protocol.STREAMING):
                copy_streaming(out + low, source, min(length, low + part) - low)
            else:
                copy(out + low, source, min(length, low + part) - low)
    return control.OK


@device
def _reduce_channel(ctx, args, channel, x, out, num_bytes):
    """One channel's bytes of the operation."""
    state, chunk = word(args, protocol.STATE), protocol.CHUNK_BYTES
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    number, num_rails = number_of(ctx, table, me), word(table, nodes.NUM_RAILS)
    first = word(state, protocol.CHUNKS + 2 * channel)
    num_chunks = (num_bytes + chunk - 1) // chunk
    if channel == 0:
        num_chunks = max(1, num_chunks)  # so that ranks meet (and compare what they call) even without a byte
    set_word(state, protocol.CHUNKS + 2 * channel, first + num_chunks)
    for step in range(num_chunks + 3):
        if step < num_chunks:
            start = step * chunk
            slot = peer(ctx, me) + slot_offset(word(state, protocol.STAGED_SLOTS), channel, first + step)
            stage_but_part(x + start, slot, min(chunk, num_bytes - start), number, num_rails)
            signal(_channel_word(ctx, state, channel, protocol.STAGED, me), first + step + 1)
        if number < num_rails and 0 < step <= num_chunks:
            start = (step - 1) * chunk
            length = min(chunk, num_bytes - start)
            status = _reduce_on_host(ctx, args, channel, first + step - 1, x + start, length)
            if status != control.OK:
                return status
        if number < num_rails and 1 < step <= num_chunks + 1:
            length = min(chunk, num_bytes - (step - 2) * chunk)
            status = _reduce_on_rail(ctx, args, channel, first + step - 2, length)
            if status != control.OK:
                return status
        if step > 2:
            start = (step - 3) * chunk
            status = _copy_out(ctx, args, channel, first + step - 3, out + start, min(chunk, num_bytes - start))
            if status != control.OK:
                return status
    return control.OK


allreduce_rails = reduction_by_channels("allreduce_rails", _reduce_channel)
