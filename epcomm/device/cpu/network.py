"""Ranks that load and store don't reach: what goes to them is written down for the rank's proxy, which sends it.

The *outbox* is a ring of records in private memory; programs fill it, a thread of the host empties it (`epcomm.proxy`).
A rank's records reach a peer in the order in which they were written down, so a word is raised there after all that
this program put there before. Bytes are read when the record is sent: they may be overwritten once the peer has
answered, by whatever word the protocol has for that.
"""

from __future__ import annotations

from numba import types

from epcomm.device import control
from epcomm.device.cpu.compile import device, host_function
from epcomm.device.cpu.memory import compare_exchange, copy, copy_bytes, load_acquire, set_word, store_release, word
from epcomm.device.cpu.peers import aborted, stop_this_rank
from epcomm.device.cpu.system import monotonic_ns, semaphore_post, semaphore_wait, yield_core

# ---- outbox (words)
TAKEN = 0  # records whose place in the ring is free again
WRITTEN = 16  # records that have a place so far
SEMAPHORE = 32  # posted once per record
STOP = 40
RING = 48
NUM_RECORDS = 4096
# ---- record (words); the first is its number + 1 once it is complete
NUMBER, RANK, WINDOW, OFFSET, NUM_BYTES, SOURCE = range(6)
RECORD_WORDS = 8
OUTBOX_WORDS = RING + NUM_RECORDS * RECORD_WORDS
RAISES = -1  # in NUM_BYTES: SOURCE is the value of the word at that offset
MARKS = -2  # in NUM_BYTES: SOURCE is a number that the peer is told; nothing is written
NOTHING = -3  # in NUM_BYTES: the record isn't sent


@device
def _record(outbox, number):
    return outbox + 8 * (RING + number % NUM_RECORDS * RECORD_WORDS)


@device
def _try_to_reserve(outbox):
    """The number of a new record, or -1 while the ring is full or someone else was faster."""
    number = load_acquire(outbox + 8 * WRITTEN)
    if load_acquire(outbox + 8 * TAKEN) + NUM_RECORDS <= number:
        return -1
    return number if compare_exchange(outbox + 8 * WRITTEN, number, number + 1) == number else -1


@device
def _complete(outbox, number, rank, window, offset, num_bytes, source):
    record = _record(outbox, number)
    set_word(record, RANK, rank)
    set_word(record, WINDOW, window)
    set_word(record, OFFSET, offset)
    set_word(record, NUM_BYTES, num_bytes)
    set_word(record, SOURCE, source)
    store_release(record + 8 * NUMBER, number + 1)
    semaphore_post(outbox + 8 * SEMAPHORE)


@device
def _write_down(ctx, window, rank, offset, num_bytes, source):
    outbox = word(ctx, control.NETWORK)
    number, started = _try_to_reserve(outbox), 0
    while number < 0 and not aborted(ctx):
        now = monotonic_ns()
        if started == 0:
            started = now
        if now - started > word(ctx, control.TIMEOUT_NS):  # WAR: the proxy has not sent what is in the ring
            set_word(ctx, control.FAILED_PEER, rank)
            set_word(ctx, control.FAILED_SITE, control.OUTBOX_SITE)
            set_word(ctx, control.FAILED_WANTED, load_acquire(outbox + 8 * WRITTEN) + 1 - NUM_RECORDS)
            set_word(ctx, control.FAILED_FOUND, load_acquire(outbox + 8 * TAKEN))
            stop_this_rank(ctx)
        yield_core()
        number = _try_to_reserve(outbox)
    if number < 0:
        return  # from here on whoever waits for anything learns why, and nothing that follows is sent, either
    if aborted(ctx):
        num_bytes = NOTHING  # once a record was left out, a word behind it must not be raised
    handle = word(window, word(ctx, control.SIZE) + control.WINDOW_HANDLE)
    _complete(outbox, number, rank, handle, offset, num_bytes, source)


@device
def put(ctx, window, rank, to_offset, from_offset, num_bytes):
    """Copies bytes of this rank's part of a segment to another place in `rank`'s, or starts to."""
    own, base = word(window, word(ctx, control.RANK)), word(window, rank)
    if base != 0:
        copy(base + to_offset, own + from_offset, num_bytes)
    elif num_bytes > 0:
        _write_down(ctx, window, rank, to_offset, num_bytes, own + from_offset)


@device
def raise_word(ctx, window, rank, offset, value):
    """Raises a word of `rank`'s part of a segment, after what this program stored (through caches) and put there."""
    base = word(window, rank)
    if base != 0:
        store_release(base + offset, value)
    else:
        _write_down(ctx, window, rank, offset, RAISES, value)


# ---- the proxy's side


@host_function("take_records", types.int64(types.int64, types.int64, types.int64, types.int64))
def load_take_records(outbox, first, to, capacity):
    """``take_records(outbox, first, to, capacity)``: waits for record `first`, copies it and complete ones behind it.

    Returns how many; 0 once the outbox was stopped.
    """
    while load_acquire(_record(outbox, first) + 8 * NUMBER) != first + 1:
        if load_acquire(outbox + 8 * STOP):
            return 0
        semaphore_wait(outbox + 8 * SEMAPHORE)
    count = 0
    while count < capacity and load_acquire(_record(outbox, first + count) + 8 * NUMBER) == first + count + 1:
        copy_bytes(to + 8 * RECORD_WORDS * count, _record(outbox, first + count), 8 * RECORD_WORDS)
        count += 1
    store_release(outbox + 8 * TAKEN, first + count)
    return count


@host_function("write_marker", types.boolean(types.int64, types.int64, types.int64))
def load_write_marker(outbox, rank, value):
    """``write_marker(outbox, rank, value)``: tells `rank` a number, after all that was written down before.

    False if there is no room for it now.
    """
    number = _try_to_reserve(outbox)
    if number < 0:
        return False
    _complete(outbox, number, rank, 0, 0, MARKS, value)
    return True


@host_function("stop_outbox", types.void(types.int64))
def load_stop_outbox(outbox):
    """``stop_outbox(outbox)``: whoever takes records gets what is complete, then 0."""
    store_release(outbox + 8 * STOP, 1)
    semaphore_post(outbox + 8 * SEMAPHORE)


@host_function("raise_words", types.void(types.int64, types.int64))
def load_raise_words(pairs, count):
    """``raise_words(pairs, count)``: stores values; `pairs` is the address of (address, value) words."""
    for i in range(count):
        store_release(word(pairs, 2 * i), word(pairs, 2 * i + 1))
