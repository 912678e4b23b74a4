"""Phases among the programs of one rank: the last to arrive ends one, the first program announces what others follow.

A kernel's programs are numbered in the order in which they start, and earlier phases have the lower numbers. A program
waits only for earlier phases, its own rank's or a peer's: so no two programs need to be on the GPU at the same time.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import fetch_add, load_acquire, set_word, store_release
from epcomm.device.gpu.waiting import wait
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def arrive(state, num_programs):
    """Counts this program at the end of a phase; True for the last one, which sees what all of them wrote."""
    is_last = fetch_add(state + 8 * protocol.TICKET, 1) == num_programs - 1
    if is_last:
        set_word(state, protocol.TICKET, 0)
    return is_last


@device
def announce(state, phase, epoch, status):
    """Ends a phase of one program, well or badly; `phase` is the word that later programs follow."""
    store_release(state + 8 * phase, (epoch << protocol.PAYLOAD_BITS) | status)


@device
def follow(ctx, fingerprint, state, phase, epoch, me, site):
    """Waits until the first program of this rank has ended its phase; returns its status."""
    address = state + 8 * phase
    status = wait(ctx, fingerprint, address, epoch << protocol.PAYLOAD_BITS, me, site)  # RAW
    if status == control.OK:
        status = load_acquire(address) & tl.cast(protocol.PAYLOAD_MASK, tl.int64)
    return status
