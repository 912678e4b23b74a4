"""Exchange of counts, and from everyone's counts the exact place of every row. Throughput routing does it once.

Edges
  RAW  COUNTS of epoch e from a peer: its counts are in this rank's table of parity e.
  WAR  the table of parity e was copied out by its owner before it raised COUNTS of e - 1, which this rank waited for.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, load32, load64, set_word, store32, word
from epcomm.device.gpu.network import quiet, start_put
from epcomm.device.gpu.waiting import enter, leave, meet_everyone, signal_everyone, tell_host
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def base_of(state, rank):
    """Address of `rank`'s copy of the handle's segment."""
    return word(word(state, protocol.WINDOW), rank)


@device
def signal_word(ctx, state, kind, at, source):
    """Address, at rank `at`, of the word of `kind` that `source` raises."""
    return base_of(state, at) + (kind * word(ctx, control.SIZE) + source) * control.LINE


@device
def raise_everywhere(ctx, state, kind, value, RANKS: tl.constexpr, NETWORK: tl.constexpr):
    """Raises this rank's word of `kind` at every rank, after all that this program wrote."""
    offset = (kind * word(ctx, control.SIZE) + word(ctx, control.RANK)) * control.LINE
    signal_everyone(ctx, word(state, protocol.WINDOW), offset, value, word(ctx, control.SIZE), RANKS, NETWORK)


@device
def _table(ctx, state, epoch):
    """Offset of the count table of an exchange."""
    size = word(ctx, control.SIZE)
    row = 4 * (word(state, protocol.NUM_EXPERTS) + size)
    return word(state, protocol.COUNT_TABLE) + (epoch & 1) * size * row


@device
def _push_counts(ctx, state, routing, rank, epoch):
    """Stores this rank's counts in `rank`'s table."""
    me, row = word(ctx, control.RANK), 4 * (word(state, protocol.NUM_EXPERTS) + word(ctx, control.SIZE))
    copy(base_of(state, rank) + _table(ctx, state, epoch) + me * row, word(routing, protocol.OWN_COUNTS), row)


@device
def push_counts(ctx, state, routing, epoch, NETWORK: tl.constexpr):
    """Puts this rank's counts into everyone's table, into its own first; the caller signals."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    for distance in range(size):
        rank = (me + distance) % size
        if NETWORK == "none":
            _push_counts(ctx, state, routing, rank, epoch)
        elif base_of(state, rank) != 0:
            _push_counts(ctx, state, routing, rank, epoch)
    if NETWORK != "none":
        tl.debug_barrier()  # the own table is where they are put from
        row = 4 * (word(state, protocol.NUM_EXPERTS) + size)
        offset = _table(ctx, state, epoch) + me * row
        for rank in range(size):
            if base_of(state, rank) == 0:
                start_put(ctx, word(state, protocol.WINDOW), rank, offset, offset, row, NETWORK)
        quiet(ctx, NETWORK)


@device
def most_kept(state):
    """How many rows of a rank count: what is dropped doesn't."""
    limit = tl.cast(1 << 31, tl.int64)
    if word(state, protocol.OVERFLOW) != protocol.STOP:
        limit = word(state, protocol.ROW_LIMIT)
    return limit


@device
def _place_by_rank(table, columns, me, size, num_experts, base, RANKS: tl.constexpr):
    """Rows that travel by rank lie by source. Returns the rows that each rank receives, [RANKS]."""
    rank = tl.arange(0, RANKS)
    is_rank = rank < size
    total, before = tl.zeros((RANKS,), tl.int64), tl.zeros((RANKS,), tl.int64)
    for source in range(size):
        at = source * columns + num_experts + rank
        count = tl.load(table.to(tl.pointer_type(tl.int32)) + at, mask=is_rank, other=0).to(tl.int64)
        before = tl.where(source < me, before + count, before)
        total += count
    tl.store(base.to(tl.pointer_type(tl.int32)) + num_experts + rank, before.to(tl.int32), mask=is_rank)
    return total


@device
def _place_by_expert(table, columns, me, size, state, base, rows_of, EXPERTS: tl.constexpr):
    """Rows of a rank lie by local expert, then by source. Returns (the most rows of a rank, all rows)."""
    num_experts, alignment = word(state, protocol.NUM_EXPERTS), word(state, protocol.ALIGNMENT)
    lane = tl.arange(0, EXPERTS)
    is_expert = lane < num_experts
    expert = tl.load(word(state, protocol.ORDER).to(tl.pointer_type(tl.int32)) + lane, mask=is_expert, other=0)
    owner = tl.load(word(state, protocol.OWNER).to(tl.pointer_type(tl.int32)) + expert, mask=is_expert, other=-1)
    total, before = tl.zeros((EXPERTS,), tl.int64), tl.zeros((EXPERTS,), tl.int64)
    for source in range(size):
        at = source * columns + expert
        count = tl.load(table.to(tl.pointer_type(tl.int32)) + at, mask=is_expert, other=0).to(tl.int64)
        before = tl.where(source < me, before + count, before)
        total += count
    is_padded = word(state, protocol.LAYOUT) == protocol.PADDED
    taken = tl.where(is_padded, total, (total + alignment - 1) // alignment * alignment)
    first = tl.cumsum(taken, 0) - taken  # as if all ranks' rows were one array
    most, all_rows = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for rank in range(size):
        is_here = owner == rank
        rows = tl.sum(tl.where(is_here, taken, 0), 0)
        first = tl.where(is_here, first - all_rows, first)
        store32(rows_of + 4 * rank, tl.minimum(rows, most_kept(state)))
        most = tl.maximum(most, rows)
        all_rows += rows
    start = tl.load(word(state, protocol.ORDER_START).to(tl.pointer_type(tl.int32)) + owner, mask=is_expert, other=0)
    slot_rows = size * word(state, protocol.MAX_TOKENS)
    first = tl.where(is_padded, (lane - start) * slot_rows, first)
    row = (first + before).to(tl.int32)
    tl.store(base.to(tl.pointer_type(tl.int32)) + expert, row, mask=is_expert)
    return most, all_rows


@device
def _place_departures(ctx, state, routing):
    """Numbers the rows that leave the node: by rank and local expert, and by rank."""
    num_experts, counts = word(state, protocol.NUM_EXPERTS), word(routing, protocol.OWN_COUNTS)
    departure, starts = word(routing, protocol.DEPARTURE), word(state, protocol.ORDER_START)
    rows, rows_by_rank = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for rank in range(word(ctx, control.SIZE)):
        if base_of(state, rank) == 0:
            for at in range(load32(starts + 4 * rank), load32(starts + 4 * (rank + 1))):
                expert = load32(word(state, protocol.ORDER) + 4 * tl.cast(at, tl.int64)).to(tl.int64)
                store32(departure + 4 * expert, rows)
                rows += load32(counts + 4 * expert).to(tl.int64)
            store32(departure + 4 * (num_experts + rank), rows_by_rank)
            rows_by_rank += load32(counts + 4 * (num_experts + rank)).to(tl.int64)


@device
def place_rows(ctx, state, routing, epoch, EXPERTS: tl.constexpr, RANKS: tl.constexpr, NETWORK: tl.constexpr):
    """Copies the table of `epoch` out and computes where rows go. CAPACITY if some rank's are too many."""
    me, size, num_experts = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NUM_EXPERTS)
    columns = num_experts + size
    table = base_of(state, me) + _table(ctx, state, epoch)
    base, rows_of = word(routing, protocol.BASE), word(routing, protocol.ROWS_OF)
    copy(word(routing, protocol.TABLE), table, 4 * size * columns)
    if NETWORK != "none":
        _place_departures(ctx, state, routing)
    most, all_rows = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if word(state, protocol.IS_BY_RANK):
        rows = _place_by_rank(table, columns, me, size, num_experts, base, RANKS)
        rank = tl.arange(0, RANKS)
        arrived = tl.minimum(tl.sum(tl.where(rank == me, rows, 0), 0), size * word(state, protocol.MAX_TOKENS))
        set_word(routing, protocol.NUM_ARRIVED, arrived)
        most, all_rows = tl.max(rows, 0), tl.sum(rows, 0)
        kept = tl.minimum(rows, most_kept(state)).to(tl.int32)
        tl.store(rows_of.to(tl.pointer_type(tl.int32)) + rank, kept, mask=rank < size)
    if word(state, protocol.LAYOUT) != protocol.FLAT:
        tl.debug_barrier()  # the ranks' rows by expert are written after those by rank
        most, all_rows = _place_by_expert(table, columns, me, size, state, base, rows_of, EXPERTS)
    set_word(routing, protocol.MOST_ROWS, most)
    set_word(routing, protocol.TOTAL_ROWS, all_rows)
    status = tl.cast(control.OK, tl.int64)
    limit, overflow = word(state, protocol.ROW_LIMIT), word(state, protocol.OVERFLOW)
    if most > limit:
        if overflow == protocol.STOP:
            status = tl.cast(control.CAPACITY, tl.int64)
        elif overflow == protocol.DROP_AND_TELL:
            tell_host(ctx, control.CAPACITY_BEFORE, most, limit)
    return status


@kernel("exchange_counts", programs=one, num_warps=4, reports=True)
def exchange_counts(ctx, args, fingerprint, routing, c1, c2, c3, c4, c5, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
                    NETWORK: tl.constexpr):  # fmt: skip
    program, status = enter(ctx, fingerprint, NETWORK)
    state = word(args, protocol.STATE)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    epoch = word(state, protocol.COUNT_EPOCH) + 1
    kind, value = protocol.COUNTS + (epoch & 1), epoch << protocol.PAYLOAD_BITS
    requires_grad, counted = word(routing, protocol.REQUIRES_GRAD), signal_word(ctx, state, kind, me, 0)
    if status == control.OK:
        set_word(state, protocol.COUNT_EPOCH, epoch)
        push_counts(ctx, state, routing, epoch, NETWORK)
        raise_everywhere(ctx, state, kind, value | requires_grad, RANKS, NETWORK)
        status = meet_everyone(ctx, fingerprint, counted, value, sites.ROUTE_COUNTS, RANKS, NETWORK)  # RAW
    if status == control.OK:
        for rank in range(size):
            requires_grad |= load64(signal_word(ctx, state, kind, me, rank)) & 1
        set_word(routing, protocol.ANY_REQUIRES_GRAD, requires_grad)
        status = place_rows(ctx, state, routing, epoch, EXPERTS, RANKS, NETWORK)
    leave(ctx, status)
