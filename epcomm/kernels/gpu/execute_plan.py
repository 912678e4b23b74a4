"""Runs a plan of a collective: interprets the table that it was lowered to, see `protocol.plans`.

A worker's row: wait for what its step needs | copy or reduce one chunk's part of the tile | tell who waits for it.
Programs wait for one another in both directions, so all of them have to be on the GPU at the same time; one alone does
all rows in an order that waits for none of its own.

Edges
  WAR  ARRIVED: the peer has ended its last operation: nobody reads or writes the slots, whatever they were used for.
  RAW  SENT: the message is in its slot.
  WAR  TAKEN: the receiver has done the step that took the message `DEPTH` messages ago from this slot.
  RAW, WAR  DONE, of this rank's workers: the step that another one has to follow is done.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, set_word, store_release, word
from epcomm.device.gpu.waiting import enter, leave, meet, peer, signal, wait
from epcomm.kernels.gpu.reduction import reduce_listed
from epcomm.kernels.protocol import collectives, sites
from epcomm.kernels.protocol import plans as protocol


@device
def _meet_everyone(ctx, fingerprint, table, worker):
    """Returns once all ranks are in this operation. (Without it they could run ahead without end, and not notice.)"""
    me, size, sequence = word(ctx, control.RANK), word(ctx, control.SIZE), word(ctx, control.SEQUENCE) + 1
    arrived = word(table, protocol.ARRIVED)
    if worker == 0:
        signal(peer(ctx, me) + arrived, sequence)
    status = tl.cast(control.OK, tl.int64)
    for distance in range(1, size):
        rank = (me + distance) % size
        if status == control.OK:
            raised = peer(ctx, rank) + arrived
            status = meet(ctx, fingerprint, raised, sequence, rank, sites.PLAN_ARRIVED, "none")  # WAR
    return status


@device
def _address(args, x, out, buffer, offset):
    base = word(args, collectives.SCRATCH)
    if buffer == protocol.INPUT:
        base = x
    if buffer == protocol.OUTPUT:
        base = out
    return base + offset


@device
def _message_number(args, fifo, tile, number):
    """Of a message, over the life of the communicator."""
    count = word(word(args, collectives.COUNTS), word(fifo, protocol.COUNT))
    return count + tile * word(fifo, protocol.NUM_MESSAGES) + number


@device
def _slot_offset(table, fifo, number):
    return word(fifo, protocol.SLOTS) + number % word(table, protocol.DEPTH) * word(table, protocol.SLOT_BYTES)


@device
def _done_value(ctx, num_rows, tile, row):
    """Of a worker's word DONE, once it has done `row` rows of a tile."""
    operation = (word(ctx, control.SEQUENCE) + 1) & ((1 << control.GENERATION_SHIFT) - 1)
    return (operation << protocol.DONE_BITS) + tile * num_rows + row


@device
def _done_word(args, worker):
    return word(args, collectives.DONE) + worker * control.LINE


@device
def _await_steps(ctx, args, fingerprint, table, row, tile):
    """Waits for the steps of this rank's other workers that come before a step."""
    first = table + 8 * word(row, protocol.FIRST_AFTER)
    status = tl.cast(control.OK, tl.int64)
    for entry in range(word(row, protocol.NUM_AFTER)):
        after = first + entry * (8 * protocol.AFTER_WORDS)
        value = _done_value(ctx, word(after, protocol.AFTER_ROWS), tile, word(after, protocol.AFTER_DONE))
        if status == control.OK:
            address = _done_word(args, word(after, protocol.AFTER_WORKER))
            status = wait(ctx, fingerprint, address, value, word(ctx, control.RANK), sites.PLAN_STEP)  # RAW, WAR
    return status


@device
def _move(ctx, args, x, out, row, worker, start, num_bytes, message, slot,
          DTYPE: tl.constexpr, OP: tl.constexpr, FINISHES: tl.constexpr):  # fmt: skip
    """Does a row's copy or sum of `num_bytes` from byte `start` of its chunk on; messages are at `message`, `slot`."""
    flags = word(row, protocol.FLAGS)
    source = _address(args, x, out, word(row, protocol.SRC_BUFFER), word(row, protocol.SRC_OFFSET) + start)
    to = _address(args, x, out, word(row, protocol.DST_BUFFER), word(row, protocol.DST_OFFSET) + start)
    receives, sends = (flags & protocol.RECEIVES) != 0, (flags & protocol.SENDS) != 0
    is_sum = (flags & protocol.REDUCES) != 0
    if receives & (is_sum == 0):
        source = message
    if OP != "none":
        SUM: tl.constexpr = "sum" if FINISHES else OP
        ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
        size, num_items = word(ctx, control.SIZE), num_bytes // ITEM
        operands = word(args, collectives.SOURCES) + worker * size * 8
        if is_sum:
            other, total = to, to
            if receives:
                other = message
            if sends:
                total = slot
            set_word(operands, 0, source)
            set_word(operands, 1, other)
            tl.debug_barrier()
            reduce_listed(total, operands, tl.cast(2, tl.int64), num_items, size, DTYPE, DTYPE, SUM)
            tl.debug_barrier()  # what is copied below may have been computed by other threads
            source, sends = total, False
        if FINISHES:
            if (flags & protocol.FINISHES) != 0:
                set_word(operands, 0, to)
                tl.debug_barrier()
                reduce_listed(to, operands, tl.cast(1, tl.int64), num_items, size, DTYPE, DTYPE, OP)
    if sends:
        copy(slot, source, num_bytes)
    if ((flags & protocol.WRITES) != 0) & (to != source):
        copy(to, source, num_bytes)


@device
def _do_row(ctx, args, fingerprint, x, out, table, row, tile, worker,
            DTYPE: tl.constexpr, OP: tl.constexpr, FINISHES: tl.constexpr):  # fmt: skip
    flags, me = word(row, protocol.FLAGS), word(ctx, control.RANK)
    is_first, is_last = (flags & protocol.IS_FIRST) != 0, (flags & protocol.IS_LAST) != 0
    receives, sends = (flags & protocol.RECEIVES) != 0, (flags & protocol.SENDS) != 0
    tile_bytes = word(table, protocol.TILE_BYTES)
    place = word(row, protocol.PLACE) * tile_bytes
    status = tl.cast(control.OK, tl.int64)
    if is_first:
        status = _await_steps(ctx, args, fingerprint, table, row, tile)
    source, received, message = table, tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if receives:
        source = table + 8 * word(row, protocol.RECEIVE)
        received = _message_number(args, source, tile, word(row, protocol.RECEIVE_NUMBER))
        message = peer(ctx, me) + _slot_offset(table, source, received) + place
        if is_first & (status == control.OK):
            raised = peer(ctx, me) + word(source, protocol.SENT_WORD)
            rank = word(source, protocol.PEER)
            status = wait(ctx, fingerprint, raised, received + 1, rank, sites.PLAN_MESSAGE)  # RAW
    to, sent, slot = table, tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if sends:
        to = table + 8 * word(row, protocol.SEND)
        sent = _message_number(args, to, tile, word(row, protocol.SEND_NUMBER))
        slot = peer(ctx, word(to, protocol.PEER)) + _slot_offset(table, to, sent) + place
        reused = sent + 1 - word(table, protocol.DEPTH)
        is_reused = reused > word(ctx, control.GENERATION) << control.GENERATION_SHIFT
        if is_first & is_reused & (status == control.OK):
            raised = peer(ctx, me) + word(to, protocol.TAKEN_WORD)
            status = wait(ctx, fingerprint, raised, reused, word(to, protocol.PEER), sites.PLAN_SLOT)  # WAR
    if status == control.OK:
        start = tile * tile_bytes
        num_bytes = tl.minimum(tile_bytes, word(row, protocol.BYTES) - start)
        if num_bytes > 0:
            _move(ctx, args, x, out, row, worker, start, num_bytes, message, slot, DTYPE, OP, FINISHES)
        tl.debug_barrier()  # the next row may read what other threads wrote, or write what they read
        if is_last & sends:
            signal(peer(ctx, word(to, protocol.PEER)) + word(to, protocol.SENT_WORD), sent + 1)
        if is_last & receives:
            signal(peer(ctx, word(source, protocol.PEER)) + word(source, protocol.TAKEN_WORD), received + 1)
    return status


@kernel("execute_plan", programs=all_programs, cooperative=True)
def execute_plan(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                 DTYPE: tl.constexpr, OP: tl.constexpr, FINISHES: tl.constexpr):  # fmt: skip
    program, status = enter(ctx, fingerprint, "none")
    x, out, table = tl.cast(x, tl.int64), tl.cast(out, tl.int64), word(args, collectives.TABLE)
    status = _meet_everyone(ctx, fingerprint, table, program)
    worker = table + 8 * (protocol.HEADER_WORDS + program * protocol.WORKER_WORDS)
    rows, num_rows = table + 8 * word(worker, protocol.FIRST_ROW), word(worker, protocol.NUM_ROWS)
    num_tiles = word(table, protocol.NUM_TILES)
    for tile in range(num_tiles):
        for number in range(num_rows):
            if status == control.OK:
                row = rows + number * (8 * protocol.ROW_WORDS)
                status = _do_row(ctx, args, fingerprint, x, out, table, row, tile, program, DTYPE, OP, FINISHES)
                if (status == control.OK) & ((word(row, protocol.FLAGS) & protocol.IS_AWAITED) != 0):
                    store_release(_done_word(args, program), _done_value(ctx, num_rows, tile, number + 1))
    tl.debug_barrier()  # all threads have read the counts
    counts = word(args, collectives.COUNTS)
    for number in range(word(worker, protocol.NUM_FIFOS)):
        fifo = table + 8 * (word(worker, protocol.FIRST_FIFO) + number * protocol.FIFO_WORDS)
        count = word(fifo, protocol.COUNT)
        total = word(counts, count) + num_tiles * word(fifo, protocol.NUM_MESSAGES)
        tl.debug_barrier()
        set_word(counts, count, total)
    leave(ctx, status)
