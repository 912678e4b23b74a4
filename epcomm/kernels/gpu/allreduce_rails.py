"""Reductions among ranks on several nodes: reduce on each node, exchange between nodes, gather on each node.

The first ranks of each node, as many as the smallest node has, each reduce one part of a chunk; the rank with the same
number on every node, its *rail*, reduces the same part. Either every rank of a rail puts all of its node's partial
result to the others, who each finish the part (one hop); or each node finishes one share of it, and puts that to the
others (two hops, less traffic). Partial results of 16-bit floats are float32, so a result is rounded once; with one
rank per node they are its input, in its own dtype. Each rank keeps of the result what the operation gives it: all,
nothing (a reduce to another rank), or its part (a reduce-scatter).
A channel's step i: stage chunk i for this node (all but the part this rank reduces) | reduce this rank's part of chunk
i - 1 over its node and put that to its rail | finish what the rail put of chunk i - 2, all or this rank's share, which
it puts to its rail | copy chunk i - 3 out of the slots of this node's ranks. Inputs are reduced in rank order, partial
results in the order of nodes: the result has the same bits everywhere.

Edges, with NUM_SLOTS = 4; a part belongs to one rank of each node
  RAW  STAGED, read where it was raised: the part is staged.     PARTIAL, pushed: a node's partial result has arrived.
       REDUCED, pushed: a node's share of the result has arrived; read where it was raised: all of the part is there.
  WAR  staged slot of chunk c (last held c - 4): at step c - 1 this rank waited for REDUCED of c - 4 from all that read.
       Partial slot of chunk c, here and on the rail, written at step c + 1 (last held c - 4): at step c this rank
       waited for PARTIAL of c - 2 from the whole rail; a rank raises that at its step c - 1, after it finished c - 4 at
       c - 2: what is here was put, and what is there was read.
       Reduced slot of chunk c, here and on the rail, written at step c + 2 (last held c - 4): a peer stages c after it
       copied c - 4 out; a rank waits for STAGED of c from all of its node before it raises PARTIAL of c, and this rank
       waited for both. Shares that were put from here: the rail waited for REDUCED of c - 4 before it raised that.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device, opaque
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
def _part(args, length, number):
    """Where the part of a rail begins and ends in a chunk of `length` bytes."""
    part = part_bytes(length, word(word(word(args, protocol.STATE), protocol.NODES), nodes.NUM_RAILS))
    low = tl.minimum(length, number * part)
    return low, tl.minimum(length, low + part)


@device
def _is_shared(args):
    """Whether each node finishes a share of a part, not all of it."""
    return word(args, protocol.NUM_SHARES) > 1


@device
def _share(args, low, high, node):
    """Where what a node finishes of a part begins and ends in the chunk."""
    first, end = low, high
    if _is_shared(args):
        share = part_bytes(high - low, word(args, protocol.NUM_SHARES))
        first = tl.minimum(high, low + node * share)
        end = tl.minimum(high, first + share)
    return first, end


@device
def _wants(ctx, args, node):
    """Whether ranks of a node get the result."""
    root = word(args, protocol.ROOT)
    return (root < 0) | (node_of(ctx, word(word(args, protocol.STATE), protocol.NODES), tl.maximum(root, 0)) == node)


@device
def _on_rail(ctx, table, distance):
    """(a node, its rank on this rank's rail); that of node `distance` after this rank's."""
    me = word(ctx, control.RANK)
    node = (node_of(ctx, table, me) + distance) % word(table, nodes.NUM_NODES)
    return node, member(ctx, table, node, number_of(ctx, table, me))


@device
def _put(ctx, rank, place, num_bytes, NETWORK: tl.constexpr):
    """Puts bytes to the same place in the segment of another node's rank."""
    if num_bytes > 0:
        start_put(ctx, window_of_collectives(ctx), rank, place, place, num_bytes, NETWORK)


@device
def _push_rail(ctx, state, channel, count, kind, NETWORK: tl.constexpr):
    """Tells the other ranks of this rank's rail that what was put to them of a chunk is there."""
    table = word(state, protocol.NODES)
    quiet(ctx, NETWORK)
    for distance in range(1, word(table, nodes.NUM_NODES)):
        _, rank = _on_rail(ctx, table, distance)
        push(ctx, state, opaque(channel), kind, rank, word(ctx, control.RANK), count + 1, NETWORK)


@device
def _meet_rail(ctx, fingerprint, state, channel, count, kind, site, NETWORK: tl.constexpr):
    """Waits for what the other ranks of this rank's rail put."""
    table, status = word(state, protocol.NODES), tl.cast(control.OK, tl.int64)
    for distance in range(1, word(table, nodes.NUM_NODES)):
        _, rank = _on_rail(ctx, table, distance)
        if status == control.OK:
            raised = pushed_word(ctx, state, channel, kind, rank)
            status = meet(ctx, fingerprint, raised, count + 1, rank, site, NETWORK)  # RAW
    return status


@device
def _stage(ctx, args, channel, count, x, length):
    """Stages a chunk for this node, all but the part that this rank reduces."""
    state, me = word(args, protocol.STATE), word(ctx, control.RANK)
    table, slot = word(state, protocol.NODES), _slot(state, protocol.STAGED_SLOTS, channel, count)
    stage_but_part(x, peer(ctx, me) + slot, length, number_of(ctx, table, me), word(table, nodes.NUM_RAILS))
    signal(_channel_word(ctx, state, channel, protocol.STAGED, me), count + 1)


@device
def _reduce_on_node(ctx, args, fingerprint, channel, count, x, length, DTYPE: tl.constexpr, OP: tl.constexpr,
                    PARTIAL: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Reduces this rank's part of a chunk over its node, and puts to each rank of its rail what that finishes."""
    SCALE: tl.constexpr = PARTIAL.primitive_bitwidth // DTYPE.primitive_bitwidth
    state = word(args, protocol.STATE)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node = node_of(ctx, table, me)
    sources = word(args, protocol.SOURCES) + channel * word(ctx, control.SIZE) * 8
    low, high = _part(args, length, number_of(ctx, table, me))
    num_sources, status = num_members(ctx, table, own_node), tl.cast(control.OK, tl.int64)
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
        partial, num_items = _partial(state, channel, count, own_node), (high - low) // (DTYPE.primitive_bitwidth // 8)
        tl.debug_barrier()  # all threads see the sources
        reduce_listed(peer(ctx, me) + partial, sources, num_sources, num_items, num_sources, DTYPE, PARTIAL,
                      "sum" if OP == "avg" else OP)  # fmt: skip
        for distance in range(1, word(table, nodes.NUM_NODES)):
            node, rank = _on_rail(ctx, table, distance)
            if _is_shared(args) | _wants(ctx, args, node):
                first, end = _share(args, low, high, node)
                _put(ctx, rank, partial + (first - low) * SCALE, (end - first) * SCALE, NETWORK)
        _push_rail(ctx, state, channel, count, protocol.PUSHED_PARTIAL, NETWORK)
    return status


@device
def _reduce_on_rail(ctx, args, fingerprint, channel, count, length, DTYPE: tl.constexpr, OP: tl.constexpr,
                    PARTIAL: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    """Reduces all nodes' partial results of what this rank finishes of its part, and puts its share to its rail."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    SCALE: tl.constexpr = PARTIAL.primitive_bitwidth // DTYPE.primitive_bitwidth
    state = word(args, protocol.STATE)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    own_node, num_nodes = node_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources = word(args, protocol.SOURCES) + channel * size * 8
    kind, site = protocol.PUSHED_PARTIAL, sites.RAILS_PARTIAL
    status = _meet_rail(ctx, fingerprint, state, channel, count, kind, site, NETWORK)
    if status == control.OK:
        low, high = _part(args, length, number_of(ctx, table, me))
        first, end = _share(args, low, high, own_node)
        place = _slot(state, protocol.REDUCED_SLOTS, channel, count) + first
        if _is_shared(args) | _wants(ctx, args, own_node):
            for node in range(num_nodes):
                partial = _partial(state, channel, count, node) + (first - low) * SCALE
                set_word(sources, node, peer(ctx, me) + partial)
            tl.debug_barrier()  # all threads see the sources
            reduce_listed(peer(ctx, me) + place, sources, num_nodes, (end - first) // ITEM, size, PARTIAL, DTYPE, OP)
            tl.debug_barrier()  # all threads have read the sources
        if _is_shared(args):
            for distance in range(1, num_nodes):
                node, rank = _on_rail(ctx, table, distance)
                if _wants(ctx, args, node):
                    _put(ctx, rank, place, end - first, NETWORK)
            _push_rail(ctx, state, channel, count, protocol.PUSHED_REDUCED, NETWORK)
    return status


@device
def _gather_on_rail(ctx, args, fingerprint, channel, count, NETWORK: tl.constexpr):
    """Tells this node that this rank's part of the result is there."""
    state, status = word(args, protocol.STATE), tl.cast(control.OK, tl.int64)
    if _is_shared(args):
        kind, site = protocol.PUSHED_REDUCED, sites.RAILS_REDUCED
        status = _meet_rail(ctx, fingerprint, state, channel, count, kind, site, NETWORK)
    if status == control.OK:
        signal(_channel_word(ctx, state, channel, protocol.REDUCED, word(ctx, control.RANK)), count + 1)
    return status


@device
def _copy_out(ctx, args, fingerprint, channel, count, out, start, length, NETWORK: tl.constexpr):
    """Copies what this rank keeps of the result's bytes [start, start + length) out of the slots of this node."""
    state, kept = word(args, protocol.STATE), word(args, protocol.KEPT_OFFSET)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, num_rails = node_of(ctx, table, me), word(table, nodes.NUM_RAILS)
    status = tl.cast(control.OK, tl.int64)
    for distance in range(num_rails):
        number = (number_of(ctx, table, me) + distance) % num_rails
        rank = member(ctx, table, own_node, number)
        if status == control.OK:
            raised = _channel_word(ctx, state, channel, protocol.REDUCED, rank)
            status = meet(ctx, fingerprint, raised, count + 1, rank, sites.TWO_SHOT_REDUCED, NETWORK)  # RAW
        low, high = _part(args, length, number)
        begin = tl.maximum(low, kept - start)
        end = tl.minimum(high, kept + word(args, protocol.KEPT_BYTES) - start)
        if (status == control.OK) & (end > begin):
            source = peer(ctx, rank) + _slot(state, protocol.REDUCED_SLOTS, channel, count)
            copy(out + start - kept + begin, source + begin, end - begin)
    return status


@device
def _reduce_channel(ctx, args, fingerprint, channel, x, out, num_bytes, DTYPE: tl.constexpr, OP: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    """One channel's bytes of the operation. DTYPE is (the message's, that of partial results)."""
    state = word(args, protocol.STATE)
    table = word(state, protocol.NODES)
    is_on_rail = number_of(ctx, table, word(ctx, control.RANK)) < word(table, nodes.NUM_RAILS)
    first = word(state, protocol.CHUNKS + 2 * channel)
    base, num_bytes = channel_bytes(state, channel, num_bytes)
    num_chunks = (num_bytes + protocol.CHUNK_BYTES - 1) // protocol.CHUNK_BYTES
    if channel == 0:
        num_chunks = tl.maximum(num_chunks, 1)  # so that ranks meet (and compare what they call) even without a byte
    status = tl.cast(control.OK, tl.int64)
    for step_number in range(num_chunks + 3):
        channel, step = opaque(channel), opaque(step_number)
        start, count = step * protocol.CHUNK_BYTES, first + step
        if (status == control.OK) & (step < num_chunks):
            length = tl.minimum(num_bytes - start, protocol.CHUNK_BYTES)
            _stage(ctx, args, channel, count, x + base + start, length)
        if (status == control.OK) & is_on_rail & (step > 0) & (step <= num_chunks):
            done = start - protocol.CHUNK_BYTES
            length = tl.minimum(num_bytes - done, protocol.CHUNK_BYTES)
            status = _reduce_on_node(ctx, args, fingerprint, channel, count - 1, x + base + done, length, DTYPE[0], OP,
                                     DTYPE[1], NETWORK)  # fmt: skip
        if (status == control.OK) & is_on_rail & (step > 1) & (step <= num_chunks + 1):
            length = tl.minimum(num_bytes - (start - 2 * protocol.CHUNK_BYTES), protocol.CHUNK_BYTES)
            status = _reduce_on_rail(ctx, args, fingerprint, channel, count - 2, length, DTYPE[0], OP, DTYPE[1],
                                     NETWORK)  # fmt: skip
        if (status == control.OK) & is_on_rail & (step > 2):
            status = _gather_on_rail(ctx, args, fingerprint, channel, count - 3, NETWORK)
        if (status == control.OK) & (step > 2):
            done = start - 3 * protocol.CHUNK_BYTES
            length = tl.minimum(num_bytes - done, protocol.CHUNK_BYTES)
            status = _copy_out(ctx, args, fingerprint, channel, count - 3, out, base + done, length, NETWORK)
    tl.debug_barrier()  # all threads have read `first`
    set_word(state, protocol.CHUNKS + 2 * channel, first + num_chunks)
    return status


@kernel("allreduce_rails", programs=all_programs, max_registers=168)
def allreduce_rails(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                    DTYPE: tl.constexpr, OP: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    by_channels(ctx, args, fingerprint, x, out, num_bytes, _reduce_channel, DTYPE, OP, NETWORK)
