"""Signals and waits, and how a program enters and leaves an operation. The same words and rules as on the CPU target.

Triton has no early return from a loop: a kernel carries its status along, and what comes after a failure is skipped.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import POLLS, clock_ns, device, relax
from epcomm.device.gpu.memory import (
    compare_exchange,
    fetch_add,
    load_acquire,
    set_word,
    store_release,
    word,
)
from epcomm.device.gpu.network import raise_remote, raise_word


@device
def window_of_collectives(ctx):
    """Address of the window of the collectives' segment."""
    return ctx + 8 * control.PEERS


@device
def peer(ctx, rank):
    """Base address of `rank`'s segment of the collectives; 0 where load and store don't reach.

    What peers call is told there too, in the GPU's memory.
    """
    return word(ctx, control.PEERS + rank)


@device
def control_region(ctx, rank):
    """Base address of `rank`'s control region, which is the host's memory: far from a GPU."""
    return word(ctx, control.PEERS + word(ctx, control.SIZE) + control.WINDOW_WORDS + rank)


@device
def aborted(ctx):
    """True once this rank's abort word was raised in this generation or a later one."""
    own = control_region(ctx, word(ctx, control.RANK))
    return (load_acquire(own + control.ABORT_WORD) >> control.GENERATION_SHIFT) >= word(ctx, control.GENERATION)


@device
def _header(ctx, fingerprint):
    """(what this rank tells its peers: which operation, by number and fingerprint, it is in; which slot that is in)."""
    sequence = word(ctx, control.SEQUENCE) + 1
    generation = (sequence >> control.GENERATION_SHIFT) & ((1 << control.GENERATION_BITS) - 1)
    number = (generation << control.COUNT_BITS) | (sequence & ((1 << control.COUNT_BITS) - 1))
    return (number << control.FINGERPRINT_BITS) | fingerprint, (sequence % control.HEADER_RING) * control.LINE


@device
def _push_header(ctx, fingerprint, NETWORK: tl.constexpr):
    """Tells every peer which operation this rank is in."""
    me = word(ctx, control.RANK)
    header, slot = _header(ctx, fingerprint)
    for rank in range(word(ctx, control.SIZE)):
        if rank != me:
            offset = control.HEADERS + me * control.HEADER_BYTES + slot
            raise_word(ctx, window_of_collectives(ctx), peer(ctx, rank), rank, offset, header, NETWORK)


@device
def enter(ctx, fingerprint, NETWORK: tl.constexpr):
    """(number of this program in the order of starting, which CUDA doesn't promise of its ids; status).

    The first one begins the operation: it tells the peers what has the next sequence number, unless the fingerprint is
    0 (outside of the sequence: send, recv, second halves). After a failure the host launches nothing.
    """
    program = fetch_add(ctx + control.TICKET * 8, 1)
    if program == 0:
        set_word(ctx, control.FINGERPRINT, fingerprint)
        if fingerprint != 0:
            _push_header(ctx, fingerprint, NETWORK)
    return program, tl.cast(control.OK, tl.int64)


@device
def leave(ctx, status):
    """Ends this program; the last one makes the context ready for the next launch, and gets True."""
    failure = control_region(ctx, word(ctx, control.RANK)) + control.FAILURE
    if status == control.ABORTED:
        compare_exchange(failure, control.OK, status)  # what stopped another one says more
    elif status != control.OK:
        store_release(failure, status)
    is_last = fetch_add(ctx + control.LEFT * 8, 1) == tl.num_programs(0) - 1
    if is_last:
        set_word(ctx, control.TICKET, 0)
        set_word(ctx, control.LEFT, 0)
        if word(ctx, control.FINGERPRINT) != 0:  # only now: all programs of this operation have read the number
            set_word(ctx, control.SEQUENCE, word(ctx, control.SEQUENCE) + 1)
    return is_last


@device
def _other_fingerprint(ctx, fingerprint, rank):
    """What `rank` is calling under this rank's sequence number, or 0 if that is the same operation or not known yet."""
    other = tl.cast(0, tl.int64)
    if fingerprint != 0:
        own, slot = _header(ctx, fingerprint)
        headers = peer(ctx, word(ctx, control.RANK)) + control.HEADERS
        found = load_acquire(headers + rank * control.HEADER_BYTES + slot)
        if (found != own) & ((found >> control.FINGERPRINT_BITS) == (own >> control.FINGERPRINT_BITS)):
            other = found & control.FINGERPRINT_MASK
    return other


@device
def _record(ctx, rank, site, wanted, found):
    """Leaves word, where the host looks, of what the last failed wait was waiting for."""
    failure = control_region(ctx, word(ctx, control.RANK)) + control.FAILURE
    set_word(failure, 1, rank)
    set_word(failure, 2, site)
    set_word(failure, 3, wanted)
    set_word(failure, 4, found)


@device
def stopped(ctx, status, rank, site, wanted, found):
    """Records what a failed wait was waiting for; returns the status."""
    _record(ctx, rank, site, wanted, found)
    return tl.cast(status, tl.int64)


@device
def wait(ctx, fingerprint, address, value, rank, site):
    """Waits until the word at `address`, raised by `rank`, is >= `value`; `site` says which edge that closes.

    Returns OK, or why it gave up: ABORTED, MISMATCH (the peer is in another operation), TIMEOUT.
    """
    status = tl.cast(control.OK, tl.int64)
    found = load_acquire(address)
    if found < value:
        started = clock_ns()
        timeout = word(ctx, control.TIMEOUT_NS)
        while (found < value) & (status == control.OK):
            polls = 0
            while (found < value) & (polls < POLLS):
                relax()
                found = load_acquire(address)
                polls += 1
            stop = aborted(ctx)
            late = clock_ns() - started > timeout
            other = _other_fingerprint(ctx, fingerprint, rank)
            found = load_acquire(address)  # after the others: what a peer raised before it failed counts
            if found < value:
                if stop:
                    status = tl.cast(control.ABORTED, tl.int64)
                elif other != 0:
                    status = tl.cast(control.MISMATCH, tl.int64)
                    _record(ctx, rank, site, value, other)
                elif late:
                    status = tl.cast(control.TIMEOUT, tl.int64)
                    _record(ctx, rank, site, value, found)
    return status


@device
def _hear(ctx, fingerprint, rank, site):
    """Waits until `rank` has told what it calls under this rank's sequence number: by a network that may come late."""
    status, me = tl.cast(control.OK, tl.int64), word(ctx, control.RANK)
    if (fingerprint != 0) & (rank != me):
        own, slot = _header(ctx, fingerprint)
        told = peer(ctx, me) + control.HEADERS + rank * control.HEADER_BYTES + slot
        started, found = clock_ns(), load_acquire(told)
        while ((found >> control.FINGERPRINT_BITS) != (own >> control.FINGERPRINT_BITS)) & (status == control.OK):
            relax()
            if aborted(ctx):
                status = tl.cast(control.ABORTED, tl.int64)
            elif clock_ns() - started > word(ctx, control.TIMEOUT_NS):
                status = stopped(ctx, control.TIMEOUT, rank, site, own, found)
            found = load_acquire(told)
    return status


@device
def meet(ctx, fingerprint, address, value, rank, site, NETWORK: tl.constexpr):
    """`wait`, for the first wait on a peer in an operation: fails if the peer is in another one."""
    status = wait(ctx, fingerprint, address, value, rank, site)
    if NETWORK != "none":
        if status == control.OK:
            status = _hear(ctx, fingerprint, rank, site)
    if status == control.OK:
        other = _other_fingerprint(ctx, fingerprint, rank)
        if other != 0:
            status = tl.cast(control.MISMATCH, tl.int64)
            _record(ctx, rank, site, value, other)
    return status


@device
def signal(address, value):
    """Raises the word at `address`, after every earlier store of this program's threads."""
    store_release(address, value)


@device
def tell_host(ctx, status, wanted, found):
    """Leaves a status for the host, which raises it later; nothing stops."""
    failure = control_region(ctx, word(ctx, control.RANK)) + control.FAILURE
    if load_acquire(failure) == control.OK:  # what was left before is told first, with its details
        _record(ctx, word(ctx, control.RANK), 0, wanted, found)
        compare_exchange(failure, control.OK, status)


# ---- all peers at once: a lane each, so that eight peers cost no more than one


@device
def signal_everyone(ctx, window, offset, value, size, RANKS: tl.constexpr, NETWORK: tl.constexpr):
    """Raises a word of every rank's part of a segment, after every earlier store of this program's threads."""
    lane = tl.arange(0, RANKS)
    is_rank = lane < size
    base = tl.load(window.to(tl.pointer_type(tl.int64)) + lane, mask=is_rank, other=0)
    if NETWORK != "none":
        is_rank = is_rank & (base != 0)
    values = tl.full((RANKS,), 0, tl.int64) + value
    tl.debug_barrier()
    tl.atomic_xchg((base + offset).to(tl.pointer_type(tl.int64)), values, mask=is_rank, sem="release", scope="sys")
    if NETWORK != "none":
        for rank in range(size):
            if word(window, rank) == 0:
                raise_remote(ctx, window, rank, offset, value, NETWORK)


@device
def _load_words(address, stride, size, RANKS: tl.constexpr):
    """One word of each rank, `stride` bytes apart: acquired."""
    lane = tl.arange(0, RANKS)
    pointer = (address + lane.to(tl.int64) * stride).to(tl.pointer_type(tl.int64))
    nothing = tl.zeros((RANKS,), tl.int64)
    return tl.atomic_add(pointer, nothing, mask=lane < size, sem="acquire", scope="sys")


@device
def _first(condition, RANKS: tl.constexpr):
    """The first lane where the condition holds, RANKS if it holds nowhere."""
    return tl.min(tl.where(condition, tl.arange(0, RANKS), RANKS), 0).to(tl.int64)


@device
def _at(values, lane, RANKS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, RANKS) == lane, values, 0), 0)


@device
def _first_mismatch(ctx, fingerprint, size, RANKS: tl.constexpr):
    """(the first rank that calls something else under this sequence number, what it calls); RANKS if none does.

    A fingerprint of 0 has no sequence number.
    """
    own, slot = _header(ctx, fingerprint)
    headers = peer(ctx, word(ctx, control.RANK)) + control.HEADERS
    is_peer = (tl.arange(0, RANKS) < size) & (tl.arange(0, RANKS) != word(ctx, control.RANK))
    found = _load_words(headers + slot, control.HEADER_BYTES, size, RANKS)
    is_same = (found >> control.FINGERPRINT_BITS) == (own >> control.FINGERPRINT_BITS)
    rank = _first(is_peer & is_same & (found != own) & (fingerprint != 0), RANKS)
    return rank, _at(found & control.FINGERPRINT_MASK, rank, RANKS)


@device
def wait_for_everyone(ctx, fingerprint, address, value, site, RANKS: tl.constexpr):
    """`wait` for all ranks: each raises a word of its own, a line after the one before."""
    size = word(ctx, control.SIZE)
    is_rank = tl.arange(0, RANKS) < size
    status = tl.cast(control.OK, tl.int64)
    found = _load_words(address, control.LINE, size, RANKS)
    late = _first(is_rank & (found < value), RANKS)
    if late < RANKS:
        started = clock_ns()
        timeout = word(ctx, control.TIMEOUT_NS)
        while (late < RANKS) & (status == control.OK):
            polls = 0
            while (late < RANKS) & (polls < POLLS):
                relax()
                found = _load_words(address, control.LINE, size, RANKS)
                late = _first(is_rank & (found < value), RANKS)
                polls += 1
            stop = aborted(ctx)
            is_too_late = clock_ns() - started > timeout
            other, called = _first_mismatch(ctx, fingerprint, size, RANKS)
            found = _load_words(address, control.LINE, size, RANKS)
            late = _first(is_rank & (found < value), RANKS)
            if late < RANKS:
                if stop:
                    status = tl.cast(control.ABORTED, tl.int64)
                elif other < RANKS:
                    status = stopped(ctx, control.MISMATCH, other, site, value, called)
                elif is_too_late:
                    status = stopped(ctx, control.TIMEOUT, late, site, value, _at(found, late, RANKS))
    tl.debug_barrier()  # what the lanes' threads acquired, all threads see
    return status


@device
def _first_untold(ctx, fingerprint, RANKS: tl.constexpr):
    """The first rank of which it isn't known what it calls under this sequence number; RANKS if there is none."""
    own, slot = _header(ctx, fingerprint)
    size, headers = word(ctx, control.SIZE), peer(ctx, word(ctx, control.RANK)) + control.HEADERS
    is_peer = (tl.arange(0, RANKS) < size) & (tl.arange(0, RANKS) != word(ctx, control.RANK))
    found = _load_words(headers + slot, control.HEADER_BYTES, size, RANKS)
    is_other = (found >> control.FINGERPRINT_BITS) != (own >> control.FINGERPRINT_BITS)
    return _first(is_peer & is_other & (fingerprint != 0), RANKS)


@device
def meet_everyone(ctx, fingerprint, address, value, site, RANKS: tl.constexpr, NETWORK: tl.constexpr):
    """`meet` all ranks: `wait_for_everyone`, and fail if one of them is in another operation."""
    status = wait_for_everyone(ctx, fingerprint, address, value, site, RANKS)
    if NETWORK != "none":
        if status == control.OK:
            untold = _first_untold(ctx, fingerprint, RANKS)
            while (untold < RANKS) & (status == control.OK):
                status = _hear(ctx, fingerprint, untold, site)
                untold = _first_untold(ctx, fingerprint, RANKS)
    if status == control.OK:
        other, called = _first_mismatch(ctx, fingerprint, word(ctx, control.SIZE), RANKS)
        if other < RANKS:
            status = stopped(ctx, control.MISMATCH, other, site, value, called)
    return status
