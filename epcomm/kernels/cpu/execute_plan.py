"""Runs a plan of a collective: interprets the table that it was lowered to, see `protocol.plans`.

A worker's row: wait for what its step needs | copy or reduce one chunk's part of the tile | tell who waits for it.
What goes to a rank of another host is put from this rank's departures. Messages in lines, see `protocol.lines`, it
takes, computes and passes on in pieces: the next rank has the first ones before the last ones are here. Partial sums
may be wider than what is summed: sizes and offsets are of that, unless a row says that an operand is WIDE.

Edges
  WAR  ARRIVED: the peer has ended its last operation: nobody reads or writes the slots, whatever they were used for,
       and what plans have put to it from departures has arrived.
  RAW  SENT: the message is in its slot; or, in lines, flags: see `flagged_lines`.
  WAR  TAKEN: the receiver has done the step that took the message `DEPTH` messages ago from this slot; so it was put.
  RAW, WAR  DONE, of this rank's workers: the step that another one has to follow is done; or worker 0 has taken flags
       of earlier operations out of this rank's slots.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import device, kernel
from epcomm.device.cpu.memory import fence, set_word, store_release, word, zero_bytes
from epcomm.device.cpu.network import put, raise_word
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.device.cpu.waiting import meet, wait
from epcomm.kernels.cpu.flagged_lines import place_of, receive_flagged, send_flagged
from epcomm.kernels.cpu.plan_moves import move, scaled
from epcomm.kernels.protocol import collectives, lines, sites
from epcomm.kernels.protocol import plans as protocol

_SIMPLE = lines.PROTOCOLS.index(lines.SIMPLE)


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
    if _are_flags_used_up(args, table, worker):
        return 0
    return word(word(args, collectives.COUNTS), word(table, protocol.FLAG_COUNTS) + worker)


@device
def _done_value(ctx, num_rows, tile, row):
    """Of a worker's word DONE, once it has done `row` rows of a tile."""
    operation = word(ctx, control.SEQUENCE) & ((1 << control.GENERATION_SHIFT) - 1)
    return (operation << protocol.DONE_BITS) + tile * num_rows + row


@device
def _done_word(args, worker):
    return word(args, collectives.DONE) + worker * LINE


@device
def _await_steps(ctx, args, table, row, tile):
    """Waits for the steps of this rank's other workers that come before a step."""
    first = table + 8 * word(row, protocol.FIRST_AFTER)
    for entry in range(word(row, protocol.NUM_AFTER)):
        after = first + 8 * protocol.AFTER_WORDS * entry
        value = _done_value(ctx, word(after, protocol.AFTER_ROWS), tile, word(after, protocol.AFTER_DONE))
        address = _done_word(args, word(after, protocol.AFTER_WORKER))
        status = wait(ctx, address, value, word(ctx, control.RANK), sites.PLAN_STEP)  # RAW, WAR
        if status != control.OK:
            return status
    return control.OK


@device
def _meet_everyone(ctx, args, worker):
    """Returns once all ranks are in this operation. (Without it they could run ahead without end, and not notice.)"""
    me, size, sequence = word(ctx, control.RANK), word(ctx, control.SIZE), word(ctx, control.SEQUENCE)
    table = word(args, collectives.TABLE)
    arrived = word(table, protocol.ARRIVED)
    if _are_flags_used_up(args, table, worker):
        no_row = _done_value(ctx, 0, 0, 0)
        if worker == 0:
            zero_bytes(peer(ctx, me) + word(table, protocol.REGION), word(table, protocol.REGION_BYTES))
            store_release(_done_word(args, 0), no_row)
        status = wait(ctx, _done_word(args, 0), no_row, me, sites.PLAN_STEP)  # WAR
        if status != control.OK:
            return status
    if worker == 0:
        for distance in range(1, size):
            rank = (me + distance) % size
            raise_word(ctx, window_of_collectives(ctx), rank, arrived + me * LINE, sequence)
    for distance in range(1, size):
        rank = (me + distance) % size
        status = meet(ctx, peer(ctx, me) + arrived + rank * LINE, sequence, rank, sites.PLAN_ARRIVED)  # WAR
        if status != control.OK:
            return status
    return control.OK


@device
def _move_lines(ctx, args, table, row, worker, start, num_bytes, rank, message, flag, slot, sent_flag):
    """As `plan_moves.move`, of messages in lines, `rank`'s with `flag`: by the worker's stage, piece by piece."""
    flags, way = word(row, protocol.FLAGS), word(table, protocol.PROTOCOL)
    stage = made = word(args, collectives.STAGES) + worker * lines.STAGE_BYTES
    piece_bytes = lines.PIECE_BYTES
    if flags & protocol.ANY_WIDE:
        piece_bytes = lines.PIECE_BYTES // protocol.WIDE
        if flags & protocol.REDUCES:
            made = stage + lines.PIECE_BYTES
    for at in range(0, num_bytes, piece_bytes):
        size = min(piece_bytes, num_bytes - at)
        if flags & protocol.RECEIVES:
            taken = message + place_of(way, scaled(flags, protocol.WIDE_OTHER, at))
            num_taken = scaled(flags, protocol.WIDE_OTHER, size)
            status = receive_flagged(ctx, way, stage, taken, num_taken, flag, rank)
            if status != control.OK:
                return status
        move(ctx, args, row, worker, start + at, size, stage, made)
        if flags & protocol.SENDS:
            left = slot + place_of(way, scaled(flags, protocol.WIDE_RESULT, at))
            send_flagged(way, left, made, scaled(flags, protocol.WIDE_RESULT, size), sent_flag)
    return control.OK


@device
def _do_row(ctx, args, table, row, tile, worker):
    flags, me = word(row, protocol.FLAGS), word(ctx, control.RANK)
    is_first, is_last = flags & protocol.IS_FIRST, flags & protocol.IS_LAST
    is_simple = word(table, protocol.PROTOCOL) == _SIMPLE
    if is_first and word(row, protocol.NUM_AFTER):
        status = _await_steps(ctx, args, table, row, tile)
        if status != control.OK:
            return status
    message = received = received_now = source = received_from = 0
    if flags & protocol.RECEIVES:
        source, number = table + 8 * word(row, protocol.RECEIVE), word(row, protocol.RECEIVE_NUMBER)
        received_from = word(source, protocol.PEER)
        received, received_now, message = _message(args, table, source, row, tile, number)
        message += peer(ctx, me) + word(source, protocol.SLOTS)
        if is_first and is_simple:
            address = peer(ctx, me) + word(source, protocol.SENT_WORD)
            status = wait(ctx, address, received, received_from, sites.PLAN_MESSAGE)  # RAW
            if status != control.OK:
                return status
    slot = place = sent = sent_now = to = sent_to = 0
    if flags & protocol.SENDS:
        to, number = table + 8 * word(row, protocol.SEND), word(row, protocol.SEND_NUMBER)
        sent_to = word(to, protocol.PEER)
        sent, sent_now, place = _message(args, table, to, row, tile, number)
        slot = peer(ctx, sent_to) + word(to, protocol.SLOTS) + place
        if peer(ctx, sent_to) == 0:
            slot = peer(ctx, me) + word(to, protocol.DEPARTURES) + place
        reused = sent - word(table, protocol.DEPTH)
        if is_first and reused > word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
            address = peer(ctx, me) + word(to, protocol.TAKEN_WORD)
            status = wait(ctx, address, reused, sent_to, sites.PLAN_SLOT)  # WAR
            if status != control.OK:
                return status
    start = tile * word(table, protocol.TILE_BYTES)
    num_bytes = min(word(table, protocol.TILE_BYTES), word(row, protocol.BYTES) - start)
    if num_bytes > 0 and (is_simple or not flags & (protocol.RECEIVES | protocol.SENDS)):
        move(ctx, args, row, worker, start, num_bytes, message, slot)
        if flags & protocol.SENDS and peer(ctx, sent_to) == 0:
            to_offset, from_offset = word(to, protocol.SLOTS) + place, word(to, protocol.DEPARTURES) + place
            num_put = scaled(flags, protocol.WIDE_RESULT, num_bytes)
            put(ctx, window_of_collectives(ctx), sent_to, to_offset, from_offset, num_put)
    elif num_bytes > 0:
        before = _first_flag(args, table, worker)
        status = _move_lines(
            ctx, args, table, row, worker, start, num_bytes,
            received_from, message, before + received_now, slot, before + sent_now,
        )  # fmt: skip
        if status != control.OK:
            return status
    if is_last:
        if flags & protocol.SENDS and is_simple:
            raise_word(ctx, window_of_collectives(ctx), sent_to, word(to, protocol.SENT_WORD), sent)
        if flags & protocol.RECEIVES:
            raise_word(ctx, window_of_collectives(ctx), received_from, word(source, protocol.TAKEN_WORD), received)
    return control.OK


@kernel("execute_plan")
def execute_plan(ctx, args, program, num_programs):
    status = _meet_everyone(ctx, args, program)
    if status != control.OK:
        return status
    table = word(args, collectives.TABLE)
    worker = table + 8 * (protocol.HEADER_WORDS + program * protocol.WORKER_WORDS)
    rows, num_rows = table + 8 * word(worker, protocol.FIRST_ROW), word(worker, protocol.NUM_ROWS)
    num_tiles = word(table, protocol.NUM_TILES)
    for tile in range(num_tiles):
        for number in range(num_rows):
            row = rows + 8 * protocol.ROW_WORDS * number
            status = _do_row(ctx, args, table, row, tile, program)
            if status != control.OK:
                return status
            if word(row, protocol.FLAGS) & protocol.IS_AWAITED:
                store_release(_done_word(args, program), _done_value(ctx, num_rows, tile, number + 1))
    used = word(table, protocol.FLAG_COUNTS) + program
    last_flag = _first_flag(args, table, program) + word(table, protocol.NUM_FLAGS)
    set_word(word(args, collectives.COUNTS), used, last_flag)
    for number in range(word(worker, protocol.NUM_FIFOS)):
        fifo = table + 8 * (word(worker, protocol.FIRST_FIFO) + protocol.FIFO_WORDS * number)
        counts, count = word(args, collectives.COUNTS), word(fifo, protocol.COUNT)
        set_word(counts, count, word(counts, count) + num_tiles * word(fifo, protocol.NUM_MESSAGES))
    if word(args, collectives.STREAMING):
        fence()
    return control.OK
