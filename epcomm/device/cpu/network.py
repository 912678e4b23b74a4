"""Ranks that load and store don't reach: what goes to them is written down for the rank's proxy, which sends it.

The *outbox* is a ring of records in private memory; programs fill it, a thread of the host empties it (`epcomm.proxy`).
A rank's records reach a peer in the order in which they were written down, so a word is raised there after all that
this program put there before. Bytes are read when the record is sent: they may be overwritten once the peer has
answered, by whatever word the protocol has for that.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import compare_exchange, copy, load_acquire, set_word, store_release, word
from epcomm.device.cpu.peers import aborted
from epcomm.device.cpu.system import semaphore_post, yield_core

# ---- outbox (words)
TAKEN = 0  # records whose place in the ring is free again
WRITTEN = 16  # records that have a place so far
SEMAPHORE = 32  # posted once per record
RING = 48
NUM_RECORDS = 4096
# ---- record (words); the first is its number + 1 once it is complete
NUMBER, RANK, WINDOW, OFFSET, NUM_BYTES, SOURCE = range(6)
RECORD_WORDS = 8
OUTBOX_WORDS = RING + NUM_RECORDS * RECORD_WORDS
RAISES = -1  # in NUM_BYTES: SOURCE is the value of a word


@device
def _write_down(ctx, window, rank, offset, num_bytes, source):
    outbox = word(ctx, control.NETWORK)
    number = load_acquire(outbox + 8 * WRITTEN)
    while (
        load_acquire(outbox + 8 * TAKEN) + NUM_RECORDS <= number
        or compare_exchange(outbox + 8 * WRITTEN, number, number + 1) != number
    ):
        if aborted(ctx):
            return  # nothing more is sent; whoever waits for anything learns why
        yield_core()
        number = load_acquire(outbox + 8 * WRITTEN)
    record = outbox + 8 * (RING + number % NUM_RECORDS * RECORD_WORDS)
    set_word(record, RANK, rank)
    set_word(record, WINDOW, word(window, word(ctx, control.SIZE) + control.WINDOW_HANDLE))
    set_word(record, OFFSET, offset)
    set_word(record, NUM_BYTES, num_bytes)
    set_word(record, SOURCE, source)
    store_release(record + 8 * NUMBER, number + 1)
    semaphore_post(outbox + 8 * SEMAPHORE)


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
