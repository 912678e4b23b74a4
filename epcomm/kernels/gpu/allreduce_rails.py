"""Allreduce and reduce among ranks on several nodes: reduce on each node, exchange between nodes, gather on each node.

The first ranks of each node, as many as the smallest node has, each reduce one part of a chunk; the rank with the same
number on every node, its *rail*, reduces the same part. Each part of a node's partial result travels once to each other
node. Partial results of 16-bit floats are float32, so a result is rounded once.
A channel's step i: stage chunk i for this node (all but the part this rank reduces) | reduce this rank's part of chunk
i - 1 over its node and put that to its rail | reduce what the rail put of chunk i - 2 | copy chunk i - 3 out of the
slots of this node's ranks. Inputs are reduced in rank order, partial results in the order of nodes: the result has the
same bits everywhere.

Edges, with NUM_SLOTS = 4; a part belongs to one rank of each node
  RAW  STAGED, read where it was raised: the part is staged.     PARTIAL, pushed: a node's partial result has arrived.
       REDUCED, read where it was raised: the part of the result is there.
  WAR  staged slot of chunk c (last held c - 4): at step c - 1 this rank waited for REDUCED of c - 4 from all that read.
       Partial slot of chunk c, here and on the rail, written at step c + 1 (last held c - 4): at step c this rank
       waited for PARTIAL of c - 2 from the whole rail; a rank raises that at its step c - 1, after it reduced c - 4 at
       c - 2: what is here was put, and what is there was read.
       Reduced slot of chunk c, written at step c + 2 (last held c - 4): at step c + 1 this rank waited for STAGED of
       chunk c from all of its node; a peer stages c after it copied c - 4 out.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.device.gpu.network import quiet, start_put
from epcomm.device.gpu.waiting import meet, peer, signal, window_of_collectives
from epcomm.kernels.gpu.allreduce_two_shot import stage_but_part
from epcomm.kernels.gpu.channels import (
    by_channels,
    channel_bytes,
    channel_ring,
    part_bytes,
    push,
    pushed_word,
    slot_offset,
)
from epcomm.kernels.gpu.nodes import member, node_of, num_members, number_of
from epcomm.kernels.gpu.reduction import reduce_listed
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
    """Address of a word that a rank of this node raises in its own memory."""
    line = channel * protocol.CHANNEL_WORDS + kind
    return peer(ctx, rank) + word(state, protocol.WORDS) + line * control.LINE


@device
def _slot(state, slots, channel, count):
    """Offset of a chunk's slot in one of the state's rings."""
    return slot_offset(channel_ring(word(state, slots), channel), count)


@device
def _reduce_on_node(ctx, args, fingerprint, channel, count, x, length, DTYPE: tl.constexpr, OP: tl.constexpr,
                    PARTIAL: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Reduces this rank's part of a chunk over its node, and puts it to the ranks of its rail that want it."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PARTIAL_ITEM: tl.constexpr = PARTIAL.primitive_bitwidth // 8
    state, root, window = word(args, protocol.STATE), word(args, protocol.ROOT), window_of_collectives(ctx)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources = word(args, protocol.SOURCES) + channel * word(ctx, control.SIZE) * 8
    part = part_bytes(length, word(table, nodes.NUM_RAILS))
    low = tl.minimum(length, number * part)
    num_items, num_sources = (tl.minimum(length, low + part) - low) // ITEM, num_members(ctx, table, own_node)
    status = tl.cast(control.OK, tl.int64)
    for index in range(num_sources):
        rank = member(ctx, table, own_node, index)
        source = x
        if rank != me:
            source = peer(ctx, rank) + _slot(state, protocol.STAGED_SLOTS, channel, count)
            if status == control.OK:
                raised = _channel_word(ctx, state, channel, protocol.STAGED, rank)
                status = meet(ctx, fingerprint, raised, count + 1, rank, sites.TWO_SHOT_STAGED, NETWORK)  # RAW
        set_word(sources, index, source + low)
    if status == control.OK:
        partial = _partial(state, channel, count, own_node)
        tl.debug_barrier()  # all threads see the sources
        reduce_listed(peer(ctx, me) + partial, sources, num_sources, num_items, num_sources, DTYPE, PARTIAL,
                      "sum" if OP == "avg" else OP)  # fmt: skip
        if num_items > 0:
            for distance in range(1, num_nodes):
                node = (own_node + distance) % num_nodes
                if (root < 0) | (node_of(ctx, table, tl.maximum(root, 0)) == node):
                    rank = member(ctx, table, node, number)
                    start_put(ctx, window, rank, partial, partial, num_items * PARTIAL_ITEM, NETWORK)
        quiet(ctx, NETWORK)
        for distance in range(1, num_nodes):
            rank = member(ctx, table, (own_node + distance) % num_nodes, number)
            push(ctx, state, channel, protocol.PUSHED_PARTIAL, rank, me, count + 1, NETWORK)
    return status


@device
def _reduce_on_rail(ctx, args, fingerprint, channel, count, length, DTYPE: tl.constexpr, OP: tl.constexpr,
                    PARTIAL: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Reduces all nodes' partial results of this rank's part of a chunk."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    state, root = word(args, protocol.STATE), word(args, protocol.ROOT)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources, status = word(args, protocol.SOURCES) + channel * size * 8, tl.cast(control.OK, tl.int64)
    for distance in range(1, num_nodes):
        rank = member(ctx, table, (own_node + distance) % num_nodes, number)
        if status == control.OK:
            raised = pushed_word(ctx, state, channel, protocol.PUSHED_PARTIAL, rank)
            status = meet(ctx, fingerprint, raised, count + 1, rank, sites.RAILS_PARTIAL, NETWORK)  # RAW
    if status == control.OK:
        if (root < 0) | (node_of(ctx, table, tl.maximum(root, 0)) == own_node):
            for node in range(num_nodes):
                set_word(sources, node, peer(ctx, me) + _partial(state, channel, count, node))
            tl.debug_barrier()  # all threads see the sources
            part = part_bytes(length, word(table, nodes.NUM_RAILS))
            low = tl.minimum(length, number * part)
            to = peer(ctx, me) + _slot(state, protocol.REDUCED_SLOTS, channel, count) + low
            num_items = (tl.minimum(length, low + part) - low) // ITEM
            reduce_listed(to, sources, num_nodes, num_items, size, PARTIAL, DTYPE, OP)
        signal(_channel_word(ctx, state, channel, protocol.REDUCED, me), count + 1)
    return status


@device
def _copy_out(ctx, args, fingerprint, channel, count, out, length, NETWORK: tl.constexpr):
    """Copies a chunk of the result out of the slots of this node's ranks."""
    state, root = word(args, protocol.STATE), word(args, protocol.ROOT)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, num_rails = node_of(ctx, table, me), word(table, nodes.NUM_RAILS)
    part, status = part_bytes(length, num_rails), tl.cast(control.OK, tl.int64)
    for distance in range(num_rails):
        number = (number_of(ctx, table, me) + distance) % num_rails
        rank, low = member(ctx, table, own_node, number), tl.minimum(length, number * part)
        if status == control.OK:
            raised = _channel_word(ctx, state, channel, protocol.REDUCED, rank)
            status = meet(ctx, fingerprint, raised, count + 1, rank, sites.TWO_SHOT_REDUCED, NETWORK)  # RAW
        if (status == control.OK) & ((root < 0) | (root == me)):
            source = peer(ctx, rank) + _slot(state, protocol.REDUCED_SLOTS, channel, count) + low
            copy(out + low, source, tl.minimum(length, low + part) - low)
    return status


@device
def _reduce_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    """One channel's bytes of the operation. DTYPE is (the message's, that of partial results)."""
    state = word(args, protocol.STATE)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    number, num_rails = number_of(ctx, table, me), word(table, nodes.NUM_RAILS)
    first = word(state, protocol.CHUNKS + 2 * channel)
    low, num_bytes = channel_bytes(state, channel, num_bytes)
    x, out = x + low, out + low
    num_chunks = (num_bytes + protocol.CHUNK_BYTES - 1) // protocol.CHUNK_BYTES
    if channel == 0:
        num_chunks = tl.maximum(num_chunks, 1)  # so that ranks meet (and compare what they call) even without a byte
    status = tl.cast(control.OK, tl.int64)
    for step in range(num_chunks + 3):
        start, count = step * protocol.CHUNK_BYTES, first + step
        if (status == control.OK) & (step < num_chunks):
            slot = peer(ctx, me) + _slot(state, protocol.STAGED_SLOTS, channel, count)
            length = tl.minimum(num_bytes - start, protocol.CHUNK_BYTES)
            stage_but_part(x + start, slot, length, number, num_rails)
            signal(_channel_word(ctx, state, channel, protocol.STAGED, me), count + 1)
        if (status == control.OK) & (number < num_rails) & (step > 0) & (step <= num_chunks):
            done = start - protocol.CHUNK_BYTES
            length = tl.minimum(num_bytes - done, protocol.CHUNK_BYTES)
            status = _reduce_on_node(ctx, args, fingerprint, channel, count - 1, x + done, length, DTYPE[0], OP,
                                     DTYPE[1], NETWORK)  # fmt: skip
        if (status == control.OK) & (number < num_rails) & (step > 1) & (step <= num_chunks + 1):
            length = tl.minimum(num_bytes - (start - 2 * protocol.CHUNK_BYTES), protocol.CHUNK_BYTES)
            status = _reduce_on_rail(ctx, args, fingerprint, channel, count - 2, length, DTYPE[0], OP, DTYPE[1],
                                     NETWORK)  # fmt: skip
        if (status == control.OK) & (step > 2):
            done = start - 3 * protocol.CHUNK_BYTES
            length = tl.minimum(num_bytes - done, protocol.CHUNK_BYTES)
            status = _copy_out(ctx, args, fingerprint, channel, count - 3, out + done, length, NETWORK)
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel, first + num_chunks)
    return status


@kernel("allreduce_rails", programs=all_programs, max_registers=168)
def allreduce_rails(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                    DTYPE: tl.constexpr, OP: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _reduce_channel, DTYPE, OP, NETWORK)
