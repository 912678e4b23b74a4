"""Barrier: every rank raises its word at every peer, then waits for theirs.

Edge: RAW, a peer's word at epoch e means that everything it did before its e-th barrier is visible.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import kernel
from epcomm.device.cpu.memory import fence, set_word, word
from epcomm.device.cpu.network import raise_word
from epcomm.device.cpu.peers import peer, window_of_collectives
from epcomm.device.cpu.waiting import meet
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@kernel("barrier", is_single=True)
def barrier(ctx, args, program, num_programs):
    state = word(args, protocol.STATE)
    me, size, region = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.BARRIER)
    epoch = word(state, protocol.BARRIER_EPOCH) + 1
    set_word(state, protocol.BARRIER_EPOCH, epoch)
    fence()  # streaming stores count
    for distance in range(1, size):
        raise_word(ctx, window_of_collectives(ctx), (me + distance) % size, region + me * LINE, epoch)
    for distance in range(1, size):
        rank = (me + distance) % size
        status = meet(ctx, peer(ctx, me) + region + rank * LINE, epoch, rank, sites.BARRIER)  # RAW
        if status != control.OK:
            return status
    return control.OK
