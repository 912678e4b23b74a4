"""Barrier: every rank raises its word at every peer, then waits for theirs.

Edge: RAW, a peer's word at epoch e means that everything it did before its e-th barrier is visible.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.memory import set_word, word
from epcomm.device.gpu.network import raise_word
from epcomm.device.gpu.waiting import enter, leave, meet, peer, window_of_collectives
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@kernel("barrier", programs=one, num_warps=1, reports=True)
def barrier(ctx, args, fingerprint, c0, c1, c2, c3, c4, c5, NETWORK: tl.constexpr):
    program, status = enter(ctx, fingerprint, NETWORK)
    state = word(args, protocol.STATE)
    me, size, region = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.BARRIER)
    epoch = word(state, protocol.BARRIER_EPOCH) + 1
    if status == control.OK:
        set_word(state, protocol.BARRIER_EPOCH, epoch)
        for distance in range(1, size):
            rank = (me + distance) % size
            offset = region + me * control.LINE
            raise_word(ctx, window_of_collectives(ctx), peer(ctx, rank), rank, offset, epoch, NETWORK)
    for distance in range(1, size):
        rank = (me + distance) % size
        if status == control.OK:
            raised = peer(ctx, me) + region + rank * control.LINE
            status = meet(ctx, fingerprint, raised, epoch, rank, sites.BARRIER, NETWORK)  # RAW
    leave(ctx, status)
