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
def waited_address(ctx, rank):
    """Address of the word that says how long `rank` was waited for."""
    return ctx + 8 * (control.PEERS + 2 * word(ctx, control.SIZE) + control.WINDOW_WORDS + rank)


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


@device
def stop_this_rank(ctx):
    """Raises this rank's own abort word: its programs leave their waits, and nothing more is sent."""
    me = word(ctx, control.RANK)
    generation = word(ctx, control.GENERATION) << control.GENERATION_SHIFT
    raise_abort(control_region(ctx, me) + control.ABORT_WORD, generation | control.LOCAL_ABORT << 16 | me)


@device
def stopped_itself(ctx):
    """True if `stop_this_rank` was the first cause in this generation."""
    found = load_acquire(control_region(ctx, word(ctx, control.RANK)) + control.ABORT_WORD)
    return aborted(ctx) and (found >> 16) & 0xFFFF == control.LOCAL_ABORT
