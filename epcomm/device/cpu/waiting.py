"""Signals and waits: monotone 64-bit words, acquire and release, with a deadline, an abort word and a mismatch check.

A waiter first polls with pauses, then yields its core on every poll, and after a while sleeps between polls: worlds
larger than the machine stay fast, and a rank that waits for a computing peer leaves it the core.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import fence, fetch_add, load_acquire, set_word, store_release, word
from epcomm.device.cpu.network import raise_word
from epcomm.device.cpu.peers import aborted, peer, waited_address, window_of_collectives
from epcomm.device.cpu.system import interrupted, monotonic_ns, pause, sleep_ns, yield_core

_YIELDS_BEFORE_SLEEP = 4000  # about 2 ms of sched_yield on an idle core
_SLEEP_NS = 100_000
_CHECK_SIGNALS_NS = 50_000_000


@device
def _header(ctx):
    """What this rank tells its peers: which operation, by number and fingerprint, it is in."""
    sequence = word(ctx, control.SEQUENCE)
    generation = (sequence >> control.GENERATION_SHIFT) & ((1 << control.GENERATION_BITS) - 1)
    number = generation << control.COUNT_BITS | (sequence & ((1 << control.COUNT_BITS) - 1))
    return number << control.FINGERPRINT_BITS | word(ctx, control.FINGERPRINT)


@device
def _header_offset(ctx, source):
    """Where `source` leaves its header of the operation in progress, in each peer's control region."""
    slot = word(ctx, control.SEQUENCE) % control.HEADER_RING
    return control.HEADERS + source * control.HEADER_BYTES + slot * control.LINE


@device
def push_header(ctx):
    """Tells every peer which operation this rank is in."""
    me, header = word(ctx, control.RANK), _header(ctx)
    offset = _header_offset(ctx, me)
    for rank in range(word(ctx, control.SIZE)):
        if rank != me:
            raise_word(ctx, window_of_collectives(ctx), rank, offset, header)


@device
def _other_fingerprint(ctx, rank):
    """What `rank` is calling under this rank's sequence number, or 0 if that is the same operation or not known yet."""
    if word(ctx, control.SEQUENCE) == 0:
        return 0
    found = load_acquire(peer(ctx, word(ctx, control.RANK)) + _header_offset(ctx, rank))
    own = _header(ctx)
    if found >> control.FINGERPRINT_BITS != own >> control.FINGERPRINT_BITS or found == own:
        return 0
    return found & control.FINGERPRINT_MASK


@device
def stopped(ctx, status, rank, site, wanted, found):
    """Records why a program stops; returns the status. (Where it was aborted doesn't matter: something else did it.)"""
    if status == control.ABORTED:
        return status
    set_word(ctx, control.FAILED_PEER, rank)
    set_word(ctx, control.FAILED_SITE, site)
    set_word(ctx, control.FAILED_WANTED, wanted)
    set_word(ctx, control.FAILED_FOUND, found)
    return status


@device
def _wait_slowly(ctx, address, value, rank, site):
    for _ in range(word(ctx, control.SPINS)):
        pause()
        if load_acquire(address) >= value:
            return control.OK
    started = monotonic_ns()
    if word(ctx, control.DEADLINE_NS) == 0:
        set_word(ctx, control.DEADLINE_NS, started + word(ctx, control.TIMEOUT_NS))
    deadline = word(ctx, control.DEADLINE_NS)
    signals_checked = started
    polls = 0
    while load_acquire(address) < value:
        if aborted(ctx) and load_acquire(address) < value:  # what a peer raised before it failed counts
            return stopped(ctx, control.ABORTED, rank, site, value, load_acquire(address))
        other = _other_fingerprint(ctx, rank)
        if other != 0:
            return stopped(ctx, control.MISMATCH, rank, site, value, other)
        now = monotonic_ns()
        if now > deadline:
            return stopped(ctx, control.TIMEOUT, rank, site, value, load_acquire(address))
        if now - signals_checked > _CHECK_SIGNALS_NS:
            signals_checked = now
            if interrupted():
                return stopped(ctx, control.INTERRUPTED, rank, site, value, load_acquire(address))
        polls += 1
        if polls < _YIELDS_BEFORE_SLEEP:
            yield_core()
        else:
            sleep_ns(_SLEEP_NS)
    fetch_add(waited_address(ctx, rank), monotonic_ns() - started)
    return control.OK


@device
def wait(ctx, address, value, rank, site):
    """Waits until the word at `address`, raised by `rank`, is >= `value`; `site` says which edge that closes."""
    if load_acquire(address) >= value:
        return control.OK
    return _wait_slowly(ctx, address, value, rank, site)


@device
def meet(ctx, address, value, rank, site):
    """`wait`, for the first wait on a peer in an operation: fails if the peer is in another one."""
    status = wait(ctx, address, value, rank, site)
    if status == control.OK:
        other = _other_fingerprint(ctx, rank)
        if other != 0:
            return stopped(ctx, control.MISMATCH, rank, site, value, other)
    return status


@device
def signal(address, value):
    """Raises the word at `address`, after every earlier cached store of this program."""
    store_release(address, value)


@device
def signal_after_streaming(address, value):
    """Raises the word at `address`, after every earlier store of this program, streaming ones included."""
    fence()
    store_release(address, value)
