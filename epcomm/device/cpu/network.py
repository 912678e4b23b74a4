"""Ranks that load and store don't reach: what goes to them is written down for the rank's proxy, which sends it.

There is an *outbox* per such peer: a ring of records in private memory, which programs fill and a thread of the host
empties (`device.cpu.link`). Records reach the peer in the order in which they were written down, so a word is raised
there after all that this program put there before. Bytes are read when the record is sent: they may be overwritten
once the peer has answered, by whatever word the protocol has for that.
"""

from __future__ import annotations

from numba import types

from epcomm.device import control
from epcomm.device.cpu.compile import device, host_function
from epcomm.device.cpu.memory import compare_exchange, copy, load_acquire, set_word, store_release, word
from epcomm.device.cpu.peers import aborted, stop_this_rank
from epcomm.device.cpu.system import monotonic_ns, semaphore_post, yield_core

# ---- outbox (words)
TAKEN = 0  # records whose place in the ring is free again
WRITTEN = 16  # records that have a place so far
SEMAPHORE = 32  # posted once per record
STOP = 40
RING = 48
NUM_RECORDS = 1024
# ---- record (words); the first is its number + 1 once it is complete
NUMBER, WINDOW, OFFSET, NUM_BYTES, SOURCE = range(5)
RECORD_WORDS = 8
OUTBOX_WORDS = RING + NUM_RECORDS * RECORD_WORDS
RAISES = -1  # in NUM_BYTES: SOURCE is the value of the word at that offset
MARKS = -2  # in NUM_BYTES: SOURCE is a number that the peer is told; nothing is written
NOTHING = -3  # in NUM_BYTES: the record isn't sent


@device
def record(outbox, number):
    return outbox + 8 * (RING + number % NUM_RECORDS * RECORD_WORDS)


@device
def _try_to_reserve(outbox):
    """The number of a new record, or -1 while the ring is full or someone else was faster."""
    number = load_acquire(outbox + 8 * WRITTEN)
    if load_acquire(outbox + 8 * TAKEN) + NUM_RECORDS <= number:
        return -1
    return number if compare_exchange(outbox + 8 * WRITTEN, number, number + 1) == number else -1


@device
def _complete(outbox, number, window, offset, num_bytes, source):
    at = record(outbox, number)
    set_word(at, WINDOW, window)
    set_word(at, OFFSET, offset)
    set_word(at, NUM_BYTES, num_bytes)
    set_word(at, SOURCE, source)
    store_release(at + 8 * NUMBER, number + 1)
    semaphore_post(outbox + 8 * SEMAPHORE)


@device
def _write_down(ctx, window, rank, offset, num_bytes, source):
    outbox = word(word(ctx, control.NETWORK), rank)
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
    _complete(outbox, number, handle, offset, num_bytes, source)


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


# ---- the host's side


@host_function("write_marker", types.boolean(types.int64, types.int64))
def load_write_marker(outbox, value):
    """``write_marker(outbox, value)``: tells the peer a number, after all that was written down before.

    False if there is no room for it now.
    """
    number = _try_to_reserve(outbox)
    if number < 0:
        return False
    _complete(outbox, number, 0, 0, MARKS, value)
    return True


@host_function("stop_outbox", types.void(types.int64))
def load_stop_outbox(outbox):
    """``stop_outbox(outbox)``: what is complete is sent, then the thread that sends ends."""
    store_release(outbox + 8 * STOP, 1)
    semaphore_post(outbox + 8 * SEMAPHORE)


@host_function("store_word", types.void(types.int64, types.int64))
def load_store_word(address, value):
    """``store_word(address, value)``: a release, for networks that Python plays."""
    store_release(address, value)
