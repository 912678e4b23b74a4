"""Exchange of counts, and from everyone's counts the exact place of every row. Throughput routing does it once.

Edges
  RAW  COUNTS of epoch e from a peer: its counts are in this rank's table of parity e.
  WAR  the table of parity e was copied out by its owner before it raised COUNTS of e - 1, which this rank waited for.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.memory import copy_bytes, load32, load_acquire, set_word, store32, word
from epcomm.device.cpu.network import put, raise_word
from epcomm.device.cpu.waiting import meet, wait
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def base_of(state, rank):
    """Address of `rank`'s copy of the handle's segment."""
    return word(word(state, protocol.WINDOW), rank)


@device
def signal_word(ctx, state, kind, at, source):
    """Address, at rank `at`, of the word of `kind` that `source` raises."""
    return base_of(state, at) + (kind * word(ctx, control.SIZE) + source) * LINE


@device
def wait_for_everyone(ctx, state, kind, value, site):
    """Waits until every rank has raised its word of `kind` here; this one, too: another of its programs may do it."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    for distance in range(size):
        rank = (me + distance) % size
        status = wait(ctx, signal_word(ctx, state, kind, me, rank), value, rank, site)
        if status != control.OK:
            return status
    return control.OK


@device
def meet_everyone(ctx, state, kind, value, site):
    """`wait_for_everyone`, and fails if a rank is in another operation."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    for distance in range(size):
        rank = (me + distance) % size
        status = meet(ctx, signal_word(ctx, state, kind, me, rank), value, rank, site)
        if status != control.OK:
            return status
    return control.OK


@device
def raise_everywhere(ctx, state, kind, value):
    """Raises this rank's word of `kind` at every rank."""
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    for distance in range(size):
        raise_at(ctx, state, (me + distance) % size, kind, value)


@device
def raise_at(ctx, state, rank, kind, value):
    """Raises this rank's word of `kind` at `rank`."""
    offset = (kind * word(ctx, control.SIZE) + word(ctx, control.RANK)) * LINE
    raise_word(ctx, word(state, protocol.WINDOW), rank, offset, value)


@device
def _table(ctx, state, epoch):
    """Offset of the count table of an exchange."""
    size = word(ctx, control.SIZE)
    row = 4 * (word(state, protocol.NUM_EXPERTS) + size)
    return word(state, protocol.COUNT_TABLE) + (epoch & 1) * size * row


@device
def push_counts(ctx, state, routing, rank, epoch):
    """Puts this rank's counts into `rank`'s table, into its own first; the caller signals."""
    me, row = word(ctx, control.RANK), 4 * (word(state, protocol.NUM_EXPERTS) + word(ctx, control.SIZE))
    to = _table(ctx, state, epoch) + me * row
    if rank == me:
        copy_bytes(base_of(state, me) + to, word(routing, protocol.OWN_COUNTS), row)
    else:
        put(ctx, word(state, protocol.WINDOW), rank, to, to, row)


@device
def _place_by_rank(me, size, num_experts, table, base, rank):
    """Rows that travel by rank lie by source. Returns how many `rank` receives."""
    rows = 0
    for source in range(size):
        if source == me:
            store32(base + 4 * (num_experts + rank), rows)
        rows += load32(table + 4 * (source * (num_experts + size) + num_experts + rank))
    return rows


@device
def _place_by_expert(state, me, size, num_experts, table, base, rank):
    """Rows of a rank's block lie by local expert, then by source. Returns how many `rank` receives."""
    layout, alignment = word(state, protocol.LAYOUT), word(state, protocol.ALIGNMENT)
    order, order_start = word(state, protocol.ORDER), word(state, protocol.ORDER_START)
    columns, per_expert = num_experts + size, size * word(state, protocol.MAX_TOKENS)
    start = load32(order_start + 4 * rank)
    rows = 0
    for number in range(load32(order_start + 4 * (rank + 1)) - start):
        expert = load32(order + 4 * (start + number))
        row = number * per_expert if layout == protocol.PADDED else rows
        for source in range(size):
            if source == me:
                store32(base + 4 * expert, row)
            row += load32(table + 4 * (source * columns + expert))
        if layout == protocol.PADDED:
            rows += row - number * per_expert
        else:
            rows = (row + alignment - 1) // alignment * alignment
    return rows


@device
def _place_departures(ctx, state, routing):
    """Numbers the rows that leave the node: by rank and local expert, and by rank."""
    num_experts, counts = word(state, protocol.NUM_EXPERTS), word(routing, protocol.OWN_COUNTS)
    departure, order = word(routing, protocol.DEPARTURE), word(state, protocol.ORDER)
    order_start = word(state, protocol.ORDER_START)
    rows, rows_by_rank = 0, 0
    for rank in range(word(ctx, control.SIZE)):
        if base_of(state, rank) == 0:
            for at in range(load32(order_start + 4 * rank), load32(order_start + 4 * (rank + 1))):
                expert = load32(order + 4 * at)
                store32(departure + 4 * expert, rows)
                rows += load32(counts + 4 * expert)
            store32(departure + 4 * (num_experts + rank), rows_by_rank)
            rows_by_rank += load32(counts + 4 * (num_experts + rank))


@device
def place_rows(ctx, state, routing, epoch):
    """Copies the table of `epoch` out and computes where rows go. CAPACITY if some rank's are too many."""
    me, size, num_experts = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NUM_EXPERTS)
    is_flat = word(state, protocol.LAYOUT) == protocol.FLAT
    table, base, rows_of = word(routing, protocol.TABLE), word(routing, protocol.BASE), word(routing, protocol.ROWS_OF)
    copy_bytes(table, base_of(state, me) + _table(ctx, state, epoch), 4 * size * (num_experts + size))
    if word(state, protocol.DEPARTURES):
        _place_departures(ctx, state, routing)
    most, all_rows = 0, 0
    for rank in range(size):
        rows = 0
        if word(state, protocol.IS_BY_RANK):
            rows = _place_by_rank(me, size, num_experts, table, base, rank)
            if rank == me:
                set_word(routing, protocol.NUM_ARRIVED, min(rows, size * word(state, protocol.MAX_TOKENS)))
        if not is_flat:
            rows = _place_by_expert(state, me, size, num_experts, table, base, rank)
        most = max(most, rows)
        if word(state, protocol.OVERFLOW) != protocol.STOP:
            rows = min(rows, word(state, protocol.ROW_LIMIT))  # what is dropped doesn't count
        store32(rows_of + 4 * rank, rows)
        all_rows += rows
    set_word(routing, protocol.MOST_ROWS, most)
    set_word(routing, protocol.TOTAL_ROWS, all_rows)
    if most > word(state, protocol.ROW_LIMIT) and word(state, protocol.OVERFLOW) == protocol.STOP:
        return control.CAPACITY
    return control.OK


@kernel("exchange_counts", is_single=True)
def exchange_counts(ctx, args, program, num_programs):
    routing, state = word(args, protocol.ROUTING), word(args, protocol.STATE)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    epoch = word(state, protocol.COUNT_EPOCH) + 1
    set_word(state, protocol.COUNT_EPOCH, epoch)
    kind, value = protocol.COUNTS + (epoch & 1), epoch << protocol.PAYLOAD_BITS
    requires_grad = word(routing, protocol.REQUIRES_GRAD)
    for distance in range(size):
        rank = (me + distance) % size
        push_counts(ctx, state, routing, rank, epoch)
        raise_at(ctx, state, rank, kind, value | requires_grad)
    for distance in range(1, size):
        rank = (me + distance) % size
        counted = signal_word(ctx, state, kind, me, rank)
        status = meet(ctx, counted, value, rank, sites.ROUTE_COUNTS)  # RAW
        if status != control.OK:
            return status
        requires_grad |= load_acquire(counted) & 1
    set_word(routing, protocol.ANY_REQUIRES_GRAD, requires_grad)
    return place_rows(ctx, state, routing, epoch)
