"""Where peers' memory is, and whether one of them has stopped this rank."""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import compare_exchange, load_acquire, word


@device
def window_of_collectives(ctx):
    """Address of the window of the collectives' segment."""
    return ctx + 8 * control.PEERS


@device
def peer(ctx, rank):
    """Base address of `rank`'s segment of the collectives; 0 for a rank on another host."""
    return word(ctx, control.PEERS + rank)


@device
def control_region(ctx, rank):
    """Base address of `rank`'s control region."""
    return word(ctx, control.PEERS + word(ctx, control.SIZE) + control.WINDOW_WORDS + rank)


@device
def aborted(ctx):
    """True once this rank's abort word was raised in this generation or a later one."""
    own = control_region(ctx, word(ctx, control.RANK))
    return (load_acquire(own + control.ABORT_WORD) >> control.GENERATION_SHIFT) >= word(ctx, control.GENERATION)


@device
def raise_abort(address, value):
    """Raises the abort word at `address` to `value` unless this generation's first cause is already there."""
    while True:
        found = load_acquire(address)
        if (found >> control.GENERATION_SHIFT) >= (value >> control.GENERATION_SHIFT):
            return
        if compare_exchange(address, found, value) == found:
            return
