"""Reductions among ranks on several hosts: reduce on each host, exchange between hosts, gather on each host.

The first ranks of each host, as many as the smallest host has, each reduce one part of a chunk; the rank with the same
number on every host, its *rail*, reduces the same part. Either every rank of a rail puts all of its host's partial
result to the others, who each finish the part (one hop); or each host finishes one share of it, and puts that to the
others (two hops, less traffic). Partial results of 16-bit floats are float32, so a result is rounded once; with one
rank per host they are its input, in its own dtype. Each rank keeps of the result what the operation gives it: all,
nothing (a reduce to another rank), or its part (a reduce-scatter).
Where parts are large, hosts take turns in putting, see `TURN_BYTES`.
A channel's step i: stage chunk i for this host (all but the part this rank reduces) | reduce this rank's part of chunk
i - 1 over its host and put that to its rail | finish what the rail put of chunk i - 2, all or this rank's share, which
it puts to its rail | copy chunk i - 3 out of the slots of this host's ranks. Inputs are reduced in rank order, partial
results in the order of hosts: the result has the same bits everywhere.

Edges, with NUM_SLOTS = 4; a part belongs to one rank of each host
  RAW  STAGED, read where it was raised: the part is staged.     PARTIAL, pushed: a host's partial result has arrived.
       REDUCED, pushed: a host's share of the result has arrived; read where it was raised: all of the part is there.
  WAR  staged slot of chunk c (last held c - 4): at step c - 1 this rank waited for REDUCED of c - 4 from all that read.
       Partial slot of chunk c, here and on the rail, written at step c + 1 (last held c - 4): at step c this rank
       waited for PARTIAL of c - 2 from the whole rail; a rank raises that at its step c - 1, after it finished c - 4 at
       c - 2: what is here was put, and what is there was read.
       Reduced slot of chunk c, here and on the rail, written at step c + 2 (last held c - 4): a peer stages c after it
       copied c - 4 out; a rank waits for STAGED of c from all of its host before it raises PARTIAL of c, and this rank
       waited for both. Shares that were put from here: the rail waited for REDUCED of c - 4 before it raised that.
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
def _part(args, length, number):
    """Where the part of a rail begins and ends in a chunk of `length` bytes."""
    part = part_bytes(length, word(word(word(args, protocol.STATE), protocol.NODES), nodes.NUM_RAILS))
    low = min(length, number * part)
    return low, min(length, low + part)


@device
def _share(args, low, high, node):
    """Where what a node finishes of a part begins and ends in the chunk."""
    if word(args, protocol.NUM_SHARES) == 1:
        return low, high
    share = part_bytes(high - low, word(args, protocol.NUM_SHARES))
    first = min(high, low + node * share)
    return first, min(high, first + share)


@device
def _wants(ctx, args, node):
    """Whether ranks of a node get the result."""
    root = word(args, protocol.ROOT)
    return root < 0 or node_of(ctx, word(word(args, protocol.STATE), protocol.NODES), root) == node


@device
def _take_turn(ctx, state, channel, count, distance, kind, site):
    """Before the host that is farther than `distance` is put to: waits for what the one as far before puts here."""
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    if distance + 1 == num_nodes:
        return control.OK
    before = member(ctx, table, (own_node - distance + num_nodes) % num_nodes, number)
    return meet_pushed(ctx, state, channel, kind, before, count + 1, site)  # RAW, early


@device
def _reduce_on_host(ctx, args, channel, count, x, length):
    """Reduces this rank's part of a chunk over its host, and puts to each rank of its rail what that finishes."""
    state, window, scale = word(args, protocol.STATE), window_of_collectives(ctx), word(args, protocol.PARTIAL_SCALE)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources = word(args, protocol.SOURCES) + channel * word(ctx, control.SIZE) * 8
    low, high = _part(args, length, number)
    num_sources = num_members(ctx, table, own_node)
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
    if word(args, protocol.ARE_ALONE):
        copy(peer(ctx, me) + partial, x + low, high - low)
    else:
        call6(word(args, protocol.REDUCE), peer(ctx, me) + partial, sources, num_sources, high - low, num_sources, 0)
    for distance in range(1, num_nodes):
        node = (own_node + distance) % num_nodes
        rank = member(ctx, table, node, number)
        if word(args, protocol.NUM_SHARES) > 1 or _wants(ctx, args, node):
            first, end = _share(args, low, high, node)
            place = partial + (first - low) * scale
            put(ctx, window, rank, place, place, (end - first) * scale)
        push(ctx, state, channel, protocol.PUSHED_PARTIAL, rank, me, count + 1)
        if (high - low) * scale >= word(args, protocol.NUM_SHARES) * protocol.TURN_BYTES:
            status = _take_turn(ctx, state, channel, count, distance, protocol.PUSHED_PARTIAL, sites.RAILS_PARTIAL)
            if status != control.OK:
                return status
    return control.OK


@device
def _meet_rail(ctx, state, channel, count, kind, site):
    """Waits for what the other ranks of this rank's rail put."""
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    for distance in range(1, num_nodes):
        rank = member(ctx, table, (own_node + distance) % num_nodes, number)
        status = meet_pushed(ctx, state, channel, kind, rank, count + 1, site)  # RAW
        if status != control.OK:
            return status
    return control.OK


@device
def _reduce_on_rail(ctx, args, channel, count, length):
    """Reduces all hosts' partial results of what this rank finishes of its part, and puts its share to its rail."""
    state, window = word(args, protocol.STATE), window_of_collectives(ctx)
    me, size, table = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    own_node, number, num_nodes = node_of(ctx, table, me), number_of(ctx, table, me), word(table, nodes.NUM_NODES)
    sources, is_shared = word(args, protocol.SOURCES) + channel * size * 8, word(args, protocol.NUM_SHARES) > 1
    status = _meet_rail(ctx, state, channel, count, protocol.PUSHED_PARTIAL, sites.RAILS_PARTIAL)
    if status != control.OK:
        return status
    low, high = _part(args, length, number)
    first, end = _share(args, low, high, own_node)
    place = slot_offset(word(state, protocol.REDUCED_SLOTS), channel, count) + first
    if is_shared or _wants(ctx, args, own_node):
        offset = (first - low) * word(args, protocol.PARTIAL_SCALE)
        for node in range(num_nodes):
            set_word(sources, node, peer(ctx, me) + _partial(state, channel, count, node) + offset)
        call6(word(args, protocol.FINISH), peer(ctx, me) + place, sources, num_nodes, end - first, size, 0)
    if is_shared:
        for distance in range(1, num_nodes):
            node = (own_node + distance) % num_nodes
            rank = member(ctx, table, node, number)
            put(ctx, window, rank, place, place, end - first if _wants(ctx, args, node) else 0)
            push(ctx, state, channel, protocol.PUSHED_REDUCED, rank, me, count + 1)
            if end - first >= protocol.TURN_BYTES:
                status = _take_turn(ctx, state, channel, count, distance, protocol.PUSHED_REDUCED, sites.RAILS_REDUCED)
                if status != control.OK:
                    return status
    return control.OK


@device
def _gather_on_rail(ctx, args, channel, count):
    """Tells this host that this rank's part of the result is there."""
    state = word(args, protocol.STATE)
    if word(args, protocol.NUM_SHARES) > 1:
        status = _meet_rail(ctx, state, channel, count, protocol.PUSHED_REDUCED, sites.RAILS_REDUCED)
        if status != control.OK:
            return status
    signal(_channel_word(ctx, state, channel, protocol.REDUCED, word(ctx, control.RANK)), count + 1)
    return control.OK


@device
def _copy_out(ctx, args, channel, count, start, length):
    """Copies what this rank keeps of the result's bytes [start, start + length) out of the slots of this host."""
    state, kept = word(args, protocol.STATE), word(args, protocol.KEPT_OFFSET)
    me, table = word(ctx, control.RANK), word(state, protocol.NODES)
    own_node, num_rails = node_of(ctx, table, me), word(table, nodes.NUM_RAILS)
    for distance in range(num_rails):
        number = (number_of(ctx, table, me) + distance) % num_rails
        rank = member(ctx, table, own_node, number)
        low, high = _part(args, length, number)
        raised = _channel_word(ctx, state, channel, protocol.REDUCED, rank)
        status = meet(ctx, raised, count + 1, rank, sites.TWO_SHOT_REDUCED)  # RAW
        if status != control.OK:
            return status
        source = peer(ctx, rank) + slot_offset(word(state, protocol.REDUCED_SLOTS), channel, count)
        begin, end = max(low, kept - start), min(high, kept + word(args, protocol.KEPT_BYTES) - start)
        if end > begin:
            to = word(args, protocol.OUT) + start - kept + begin
            if word(args, protocol.STREAMING):
                copy_streaming(to, source + begin, end - begin)
            else:
                copy(to, source + begin, end - begin)
    return control.OK


@device
def _reduce_channel(ctx, args, channel, x, out, num_bytes):
    """One channel's bytes of the operation."""
    state = word(args, protocol.STATE)
    chunk = min(protocol.CHUNK_BYTES, max(protocol.PIECE_BYTES, num_bytes // protocol.PIECES_PER_HOP & -64))
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
        if number < num_rails and step > 2:
            status = _gather_on_rail(ctx, args, channel, first + step - 3)
            if status != control.OK:
                return status
        if step > 2:
            start = (step - 3) * chunk
            length, start = min(chunk, num_bytes - start), start + out - word(args, protocol.OUT)  # in the whole result
            status = _copy_out(ctx, args, channel, first + step - 3, start, length)
            if status != control.OK:
                return status
    return control.OK


allreduce_rails = reduction_by_channels("allreduce_rails", _reduce_channel)
