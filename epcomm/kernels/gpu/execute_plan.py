"""Runs a plan of a collective: interprets the table that it was lowered to, see `protocol.plans`.

A worker's row: wait for what its step needs | copy or reduce one chunk's part of the tile | tell who waits for it.
Programs wait for one another in both directions, so all of them have to be on the GPU at the same time; one alone does
all rows in an order that waits for none of its own. Messages in lines, see `protocol.lines`, it takes, computes and
passes on in pieces: the next rank has the first ones before the last ones are here. What goes to a rank of another node
is put from this rank's departures. Sizes and offsets are of what is summed, unless a row says that an operand is WIDE:
partial sums are PARTIAL.

Edges
  WAR  ARRIVED: the peer has ended its last operation: nobody reads or writes the slots, whatever they were used for,
       and what plans have put to it from departures has arrived.
  RAW  SENT: the message is in its slot; or, in lines, flags: see `flagged_lines`.
  WAR  TAKEN: the receiver has done the step that took the message `DEPTH` messages ago from this slot; so it was put.
  RAW, WAR  DONE, of this rank's workers: the step that another one has to follow is done; or worker 0 has taken flags
       of earlier operations out of this rank's slots.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device, opaque
from epcomm.device.gpu.memory import set_word, store_release, word, zero_bytes
from epcomm.device.gpu.network import quiet, raise_word, start_put
from epcomm.device.gpu.waiting import enter, leave, meet, peer, wait, window_of_collectives
from epcomm.kernels.gpu.flagged_lines import place_of, receive_flagged, send_flagged
from epcomm.kernels.gpu.plan_moves import move, scaled
from epcomm.kernels.protocol import collectives, lines, sites
from epcomm.kernels.protocol import plans as protocol


@device
def _message(args, table, fifo, row, tile, number):
    """(its number over the life of the communicator and that in this operation, from 1 on; where in its FIFO the row's
    part of it is).

    It is message `number` of a FIFO in a tile.
    """
    now = tile * word(fifo, protocol.NUM_MESSAGES) + number
    total = word(word(args, collectives.COUNTS), word(fifo, protocol.COUNT)) + now
    slot = total % word(table, protocol.DEPTH) * word(table, protocol.SLOT_BYTES)
    return total + 1, now + 1, slot + word(row, protocol.PLACE) * word(table, protocol.PLACE_BYTES)


@device
def _are_flags_used_up(args, table, worker):
    used = word(word(args, collectives.COUNTS), word(table, protocol.FLAG_COUNTS) + worker)
    return used + word(table, protocol.NUM_FLAGS) > lines.MAX_FLAG


@device
def _first_flag(args, table, worker):
    """Number before the first one of this operation."""
    used = word(word(args, collectives.COUNTS), word(table, protocol.FLAG_COUNTS) + worker)
    return tl.where(_are_flags_used_up(args, table, worker), 0, used)


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
def _raise(ctx, rank, offset, value, NETWORK: tl.constexpr):
    """Raises a word of `rank`'s segment."""
    raise_word(ctx, window_of_collectives(ctx), peer(ctx, rank), rank, offset, value, NETWORK)


@device
def _meet_everyone(ctx, args, fingerprint, table, worker, NETWORK: tl.constexpr):
    """Returns once all ranks are in this operation. (Without it they could run ahead without end, and not notice.)"""
    me, size, sequence = word(ctx, control.RANK), word(ctx, control.SIZE), word(ctx, control.SEQUENCE) + 1
    arrived = word(table, protocol.ARRIVED)
    status = tl.cast(control.OK, tl.int64)
    if _are_flags_used_up(args, table, worker):
        no_row = _done_value(ctx, 0, 0, 0)
        if worker == 0:
            zero_bytes(peer(ctx, me) + word(table, protocol.REGION), word(table, protocol.REGION_BYTES))
            store_release(_done_word(args, 0), no_row)
        status = wait(ctx, fingerprint, _done_word(args, 0), no_row, me, sites.PLAN_STEP)  # WAR
    if (worker == 0) & (status == control.OK):
        for distance in range(1, size):
            _raise(ctx, (me + distance) % size, arrived + me * control.LINE, sequence, NETWORK)
    for distance in range(1, size):
        rank = (me + distance) % size
        if status == control.OK:
            raised = peer(ctx, me) + arrived + rank * control.LINE
            status = meet(ctx, fingerprint, raised, sequence, rank, sites.PLAN_ARRIVED, NETWORK)  # WAR
    return status


@device
def _received(ctx, args, table, row, tile):
    """(the FIFO's record, and `_message`) of what a row receives."""
    fifo = table + 8 * word(row, protocol.RECEIVE)
    total, now, place = _message(args, table, fifo, row, tile, word(row, protocol.RECEIVE_NUMBER))
    return fifo, total, now, peer(ctx, word(ctx, control.RANK)) + word(fifo, protocol.SLOTS) + place


@device
def _sent(ctx, args, table, row, tile, NETWORK: tl.constexpr):
    """(the FIFO's record, and `_message`) of what a row sends."""
    fifo = table + 8 * word(row, protocol.SEND)
    total, now, place = _message(args, table, fifo, row, tile, word(row, protocol.SEND_NUMBER))
    slot = peer(ctx, word(fifo, protocol.PEER)) + word(fifo, protocol.SLOTS) + place
    if NETWORK != "none":
        if peer(ctx, word(fifo, protocol.PEER)) == 0:
            slot = peer(ctx, word(ctx, control.RANK)) + word(fifo, protocol.DEPARTURES) + place
    return fifo, total, now, slot


@device
def _put(ctx, fifo, slot, num_bytes, NETWORK: tl.constexpr):
    """Puts a row's part of a message from this rank's departures to a rank of another node; others have it already."""
    rank, from_offset = word(fifo, protocol.PEER), slot - peer(ctx, word(ctx, control.RANK))
    if peer(ctx, rank) == 0:
        to_offset = from_offset - word(fifo, protocol.DEPARTURES) + word(fifo, protocol.SLOTS)
        start_put(ctx, window_of_collectives(ctx), rank, to_offset, from_offset, num_bytes, NETWORK)


@device
def _move_lines(ctx, args, fingerprint, x, out, table, row, tile, worker,
                DTYPE: tl.constexpr, OP: tl.constexpr, PROTOCOL: tl.constexpr, PARTIAL: tl.constexpr):  # fmt: skip
    """As `plan_moves.move`, of messages in lines: from and to the worker's stage, piece by piece; returns a status."""
    PIECE_BYTES: tl.constexpr = lines.PIECE_BYTES // protocol.WIDE if PARTIAL is not None else lines.PIECE_BYTES
    at, num_bytes, status = tl.cast(0, tl.int64), _num_bytes(table, row, tile), tl.cast(control.OK, tl.int64)
    while (at < num_bytes) & (status == control.OK):
        table, row = opaque(table), opaque(row)  # what is held from outside of the loop is spilled
        stage = word(args, collectives.STAGES) + worker * lines.STAGE_BYTES
        size, first_flag = tl.minimum(num_bytes - at, PIECE_BYTES), _first_flag(args, table, worker)
        if (word(row, protocol.FLAGS) & protocol.RECEIVES) != 0:
            fifo, _, number, message = _received(ctx, args, table, row, tile)
            message += place_of(scaled(row, protocol.WIDE_OTHER, at, PARTIAL), PROTOCOL)
            rank, flag = word(fifo, protocol.PEER), first_flag + number
            num_taken = scaled(row, protocol.WIDE_OTHER, size, PARTIAL)
            status = receive_flagged(ctx, fingerprint, stage, message, num_taken, flag, rank, PROTOCOL)
            tl.debug_barrier()
        if status == control.OK:
            start, made = tile * word(table, protocol.TILE_BYTES) + at, stage
            if PARTIAL is not None:
                if (word(row, protocol.FLAGS) & protocol.REDUCES) != 0:
                    made = stage + lines.PIECE_BYTES
            move(ctx, args, x, out, row, worker, start, size, stage, made, DTYPE, OP, False, PARTIAL)
            if (word(row, protocol.FLAGS) & protocol.SENDS) != 0:
                _, _, number, slot = _sent(ctx, args, table, row, tile, "none")
                slot += place_of(scaled(row, protocol.WIDE_RESULT, at, PARTIAL), PROTOCOL)
                num_sent = scaled(row, protocol.WIDE_RESULT, size, PARTIAL)
                tl.debug_barrier()
                send_flagged(slot, made, num_sent, first_flag + number, PROTOCOL)
        tl.debug_barrier()  # all threads are done with the stage
        at += PIECE_BYTES
    return status


@device
def _num_bytes(table, row, tile):
    """Of a row in a tile; 0 or less if there are none."""
    tile_bytes = word(table, protocol.TILE_BYTES)
    return tl.minimum(tile_bytes, word(row, protocol.BYTES) - tile * tile_bytes)


@device
def _do_row(ctx, args, fingerprint, x, out, table, row, tile, worker,
            DTYPE: tl.constexpr, OP: tl.constexpr, FINISHES: tl.constexpr, PARTIAL: tl.constexpr,
            PROTOCOL: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    flags, status = word(row, protocol.FLAGS), tl.cast(control.OK, tl.int64)
    is_first = (flags & protocol.IS_FIRST) != 0
    receives, sends = (flags & protocol.RECEIVES) != 0, (flags & protocol.SENDS) != 0
    if is_first:
        status = _await_steps(ctx, args, fingerprint, table, row, tile)
    message, slot = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if receives:
        source, received, _, message = _received(ctx, args, table, row, tile)
        if PROTOCOL == "simple":
            if is_first & (status == control.OK):
                raised = peer(ctx, word(ctx, control.RANK)) + word(source, protocol.SENT_WORD)
                rank = word(source, protocol.PEER)
                status = wait(ctx, fingerprint, raised, received, rank, sites.PLAN_MESSAGE)  # RAW
    if sends:
        to, sent, _, slot = _sent(ctx, args, table, row, tile, NETWORK)
        reused = sent - word(table, protocol.DEPTH)
        is_reused = reused > word(ctx, control.GENERATION) << control.GENERATION_SHIFT
        if is_first & is_reused & (status == control.OK):
            raised = peer(ctx, word(ctx, control.RANK)) + word(to, protocol.TAKEN_WORD)
            status = wait(ctx, fingerprint, raised, reused, word(to, protocol.PEER), sites.PLAN_SLOT)  # WAR
    num_bytes = _num_bytes(table, row, tile)
    if (num_bytes > 0) & (status == control.OK):
        if (PROTOCOL == "simple") | ((receives | sends) == 0):
            start = tile * word(table, protocol.TILE_BYTES)
            move(ctx, args, x, out, row, worker, start, num_bytes, message, slot, DTYPE, OP, FINISHES, PARTIAL)
            if NETWORK != "none":
                if sends:
                    num_put = scaled(row, protocol.WIDE_RESULT, num_bytes, PARTIAL)
                    _put(ctx, table + 8 * word(row, protocol.SEND), slot, num_put, NETWORK)
        elif PROTOCOL != "simple":
            SUM: tl.constexpr = "sum" if FINISHES else OP  # results are finished in rows without messages
            status = _move_lines(
                ctx, args, fingerprint, x, out, table, row, tile, worker, DTYPE, SUM, PROTOCOL, PARTIAL
            )  # fmt: skip
    if status == control.OK:
        tl.debug_barrier()  # the next row may read what other threads wrote, or write what they read
        table, row = opaque(table), opaque(row)  # what is held while items are in registers is spilled
        flags = word(row, protocol.FLAGS)
        is_last = (flags & protocol.IS_LAST) != 0
        if PROTOCOL == "simple":
            if is_last & ((flags & protocol.SENDS) != 0):
                to, sent, _, _ = _sent(ctx, args, table, row, tile, NETWORK)
                quiet(ctx, NETWORK)
                _raise(ctx, word(to, protocol.PEER), word(to, protocol.SENT_WORD), sent, NETWORK)
        if is_last & ((flags & protocol.RECEIVES) != 0):
            source, received, _, _ = _received(ctx, args, table, row, tile)
            _raise(ctx, word(source, protocol.PEER), word(source, protocol.TAKEN_WORD), received, NETWORK)
    return status


@kernel("execute_plan", programs=all_programs, cooperative=True, max_registers=200)
def execute_plan(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                 DTYPE: tl.constexpr, OP: tl.constexpr, FINISHES: tl.constexpr, PARTIAL: tl.constexpr,
                 PROTOCOL: tl.constexpr, NETWORK: tl.constexpr):  # fmt: skip
    program, status = enter(ctx, fingerprint, NETWORK)
    x, out, table = tl.cast(x, tl.int64), tl.cast(out, tl.int64), word(args, collectives.TABLE)
    status = _meet_everyone(ctx, args, fingerprint, table, program, NETWORK)
    worker = table + 8 * (protocol.HEADER_WORDS + program * protocol.WORKER_WORDS)
    rows, num_rows = table + 8 * word(worker, protocol.FIRST_ROW), word(worker, protocol.NUM_ROWS)
    num_tiles = word(table, protocol.NUM_TILES)
    for tile in range(num_tiles):
        for number in range(num_rows):
            if status == control.OK:
                row = rows + number * (8 * protocol.ROW_WORDS)
                status = _do_row(
                    ctx, args, fingerprint, x, out, table, row, tile, program,
                    DTYPE, OP, FINISHES, PARTIAL, PROTOCOL, NETWORK,
                )  # fmt: skip
                if (status == control.OK) & ((word(row, protocol.FLAGS) & protocol.IS_AWAITED) != 0):
                    store_release(_done_word(args, program), _done_value(ctx, num_rows, tile, number + 1))
    tl.debug_barrier()  # all threads have read the counts
    counts = word(args, collectives.COUNTS)
    last_flag = _first_flag(args, table, program) + word(table, protocol.NUM_FLAGS)
    tl.debug_barrier()
    set_word(counts, word(table, protocol.FLAG_COUNTS) + program, last_flag)
    for number in range(word(worker, protocol.NUM_FIFOS)):
        fifo = table + 8 * (word(worker, protocol.FIRST_FIFO) + number * protocol.FIFO_WORDS)
        count = word(fifo, protocol.COUNT)
        total = word(counts, count) + num_tiles * word(fifo, protocol.NUM_MESSAGES)
        tl.debug_barrier()
        set_word(counts, count, total)
    leave(ctx, status)
