"""Phases among the programs of one rank: the last to arrive ends one, program 0 announces what others follow."""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import exchange, fetch_add, load_acquire, store_release, word
from epcomm.device.cpu.waiting import wait
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def arrive(state, num_programs):
    """Counts this program at the end of a phase; True for the last one, which sees what all of them wrote."""
    if fetch_add(state + 8 * protocol.TICKET, 1) + 1 < num_programs:
        return False
    exchange(state + 8 * protocol.TICKET, 0)
    return True


@device
def announce(state, phase, epoch, status):
    """Ends program 0's phase, well or badly; `phase` is the word that the other programs follow."""
    store_release(state + 8 * phase, epoch << protocol.PAYLOAD_BITS | status)


@device
def follow(ctx, state, phase, epoch, site):
    """Waits until program 0 of this rank has ended its phase; returns its status."""
    address = state + 8 * phase
    status = wait(ctx, address, epoch << protocol.PAYLOAD_BITS, word(ctx, control.RANK), site)  # RAW
    if status != control.OK:
        return status
    return load_acquire(address) & protocol.PAYLOAD_MASK
