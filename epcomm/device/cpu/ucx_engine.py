"""A thread of a rank that empties its outboxes by UCX's puts, and lets UCX carry out what peers put here.

Bytes go from segment to segment by one put. A word is a put of 8 bytes after a fence, which UCX keeps behind all that
was put before at the same endpoint. Over RDMA that is the order in which a reliable connection writes; the adapter
writes an aligned word as a whole, and PCI Express keeps its writes in order (UCX takes a strictly ordered key for what
follows a fence where memory is mapped with relaxed ordering), so a CPU whose load-acquire finds the word finds the
bytes. Over TCP a put is a message of one stream, which UCX at the peer copies into place from this thread, in order,
once it has all of it: an aligned word by one store of its memcpy, which on x86-64 comes after the stores before it.

A record stays in its outbox until its request is complete: it holds the word that is put. A peer that can't be reached
gets nothing any more; whoever watches it knows why.
"""

from __future__ import annotations

from numba import types

from epcomm.device.cpu.compile import device, host_function, kernel
from epcomm.device.cpu.function import call1, call6
from epcomm.device.cpu.memory import exchange, load_acquire, set_word, store_release, word
from epcomm.device.cpu.network import (
    ASLEEP,
    EVENTS,
    MARKS,
    NOTHING,
    NUM_BYTES,
    NUMBER,
    OFFSET,
    SOURCE,
    STOP,
    TAKEN,
    WINDOW,
)  # fmt: skip
from epcomm.device.cpu.network import record as record_at
from epcomm.device.cpu.system import poll_descriptors, read_word, yield_core

REQUEST = 5  # word of a record: UCX's request, 0 if it was done at once

# ---- engine (words): the worker, addresses of UCX's functions, then of parameters and tables
WORKER, PROGRESS, ARM, FENCE, PUT, CHECK, FREE = range(7)
PARAMETERS = 7  # of a request that puts a word
SOURCES = 8  # of requests that put bytes of a segment: a table of addresses, by the segment's number
SLEEPER, PEERS, NUM_PEERS = 9, 10, 11
MARK_OFFSET = 12  # of this rank's marks in segment 0 of any rank
DESCRIPTORS = 13  # two struct pollfd: of the worker and of the sleeper
GIVES_UP = 16  # told by the host: what isn't complete stays so
SCRATCH = 17
ENGINE_WORDS = 24
# ---- peer (words)
ENDPOINT, OUTBOX, PLACES, STARTED, SENT_BYTES, IS_BROKEN = range(6)
PEER_WORDS = 16
#: PLACES: a table, by the number of a segment, of its address at the peer and the key to it. STARTED: records.
PLACE_WORDS = 2

_IN_PROGRESS = 1  # UCS_INPROGRESS; a status has 8 bits, of which errors have the highest
_IDLE_ROUNDS = 50  # before the thread sleeps
_LONGEST_SLEEP = 100  # ms


@device
def _is_complete(outbox, number):
    return load_acquire(record_at(outbox, number) + 8 * NUMBER) == number + 1


@device
def _put(engine, peer, record):
    """Starts to put what a record says. Returns a request, 0 if it is done at once, less if it failed."""
    segment, offset, num_bytes = word(record, WINDOW), word(record, OFFSET), word(record, NUM_BYTES)
    if num_bytes == MARKS:
        segment, offset = 0, word(engine, MARK_OFFSET)
    place = word(peer, PLACES) + 8 * PLACE_WORDS * segment
    to, key = word(place, 0) + offset, word(place, 1)
    if num_bytes >= 0:
        source, parameters = word(record, SOURCE), word(word(engine, SOURCES), segment)
    elif call1(word(engine, FENCE), word(engine, WORKER)) & 0xFF:
        return -1
    else:
        source, num_bytes, parameters = record + 8 * SOURCE, 8, word(engine, PARAMETERS)
    return call6(word(engine, PUT), word(peer, ENDPOINT), source, num_bytes, to, key, parameters)


@device
def _start_records(engine, peer):
    """Starts what is complete in the peer's outbox; returns how many records that were."""
    outbox, first = word(peer, OUTBOX), word(peer, STARTED)
    number = first
    while _is_complete(outbox, number):
        record, request = record_at(outbox, number), 0
        if word(record, NUM_BYTES) != NOTHING and not word(peer, IS_BROKEN):
            request = _put(engine, peer, record)
            if request < 0:
                set_word(peer, IS_BROKEN, 1)
                request = 0
            store_release(peer + 8 * SENT_BYTES, word(peer, SENT_BYTES) + max(word(record, NUM_BYTES), 0))
        set_word(record, REQUEST, request)
        number += 1
    set_word(peer, STARTED, number)
    return number - first


@device
def _finish_records(engine, peer):
    """Gives the places of records back whose requests, and all before them, are complete; returns how many."""
    outbox, started = word(peer, OUTBOX), word(peer, STARTED)
    first = number = load_acquire(outbox + 8 * TAKEN)
    while number < started:
        request = word(record_at(outbox, number), REQUEST)
        if request != 0:
            status = call1(word(engine, CHECK), request) & 0xFF
            if status == _IN_PROGRESS:
                break
            call1(word(engine, FREE), request)
            if status != 0:
                set_word(peer, IS_BROKEN, 1)
        number += 1
    store_release(outbox + 8 * TAKEN, number)
    return number - first


@device
def _has_ended(engine):
    """True once every outbox was stopped and is empty, or the host gives up."""
    if load_acquire(engine + 8 * GIVES_UP):
        return True
    for index in range(word(engine, NUM_PEERS)):
        peer = word(engine, PEERS) + 8 * PEER_WORDS * index
        outbox, started = word(peer, OUTBOX), word(peer, STARTED)
        if not load_acquire(outbox + 8 * STOP) or load_acquire(outbox + 8 * TAKEN) < started:
            return False
        if _is_complete(outbox, started):
            return False
    return True


@device
def _has_news(engine):
    """True if the host or a program wants something."""
    stopped = 0
    for index in range(word(engine, NUM_PEERS)):
        peer = word(engine, PEERS) + 8 * PEER_WORDS * index
        outbox = word(peer, OUTBOX)
        if _is_complete(outbox, word(peer, STARTED)):
            return True
        stopped += load_acquire(outbox + 8 * STOP)
    return stopped > 0 or load_acquire(engine + 8 * GIVES_UP) != 0


@device
def _sleep(engine):
    """Sleeps until the worker has something to do, or a program or the host; at most for a moment."""
    sleeper = word(engine, SLEEPER)
    exchange(sleeper + 8 * ASLEEP, 1)  # whoever stores something after this wakes; what was stored before is seen here
    if not _has_news(engine) and call1(word(engine, ARM), word(engine, WORKER)) & 0xFF == 0:
        poll_descriptors(engine + 8 * DESCRIPTORS, 2, _LONGEST_SLEEP)
    store_release(sleeper + 8 * ASLEEP, 0)
    read_word(word(sleeper, EVENTS), engine + 8 * SCRATCH)  # doesn't block if nobody woke it


@host_function("run_ucx_engine", types.void(types.int64))
def load_run_ucx_engine(engine):
    """``run_ucx_engine(engine)``: puts what is written down, and takes what comes, until all outboxes have ended."""
    idle_rounds = 0
    while not _has_ended(engine):
        done = call1(word(engine, PROGRESS), word(engine, WORKER)) & 0xFFFFFFFF
        for index in range(word(engine, NUM_PEERS)):
            peer = word(engine, PEERS) + 8 * PEER_WORDS * index
            done += _start_records(engine, peer) + _finish_records(engine, peer)
        if done > 0:
            idle_rounds = 0
        elif idle_rounds < _IDLE_ROUNDS:
            idle_rounds += 1
            yield_core()
        else:
            _sleep(engine)


@kernel("ucx_endpoint_failed", types.void(types.int64, types.int64, types.int8))
def endpoint_failed(peer, endpoint, status):
    """UCX's error handler: the peer has gone, or the way to it."""
    set_word(peer, IS_BROKEN, 1)
