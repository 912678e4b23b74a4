"""One-shot allreduce and reduce: every rank stages its input, then reads everyone's and reduces all of it itself.

Up to TINY_BYTES the data shares a line with its flag, so a peer's input arrives in one line transfer. All ranks reduce
in rank order: the result has the same bits everywhere.

Edges
  RAW  a peer's flag at epoch e: its input of epoch e is staged.
  WAR  the slot of epoch e was read by every peer at e - 2: each raised its flag e - 1 after that, and this rank waited
       for all of those at e - 1.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.device.gpu.waiting import enter, leave, meet, peer, signal
from epcomm.kernels.gpu.reduction import reduce
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@kernel("allreduce_one_shot", programs=one)
def allreduce_one_shot(ctx, args, fingerprint, x, out, num_bytes, streaming, c4, c5,
                       DTYPE: tl.constexpr, OP: tl.constexpr):  # fmt: skip
    program, status = enter(ctx, fingerprint, "none")
    x, out, num_bytes = tl.cast(x, tl.int64), tl.cast(out, tl.int64), tl.cast(num_bytes, tl.int64)
    state, root = word(args, protocol.STATE), word(args, protocol.ROOT)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    epoch = word(state, protocol.ONE_SHOT_EPOCH) + 1
    parity = epoch & 1
    flag = word(state, protocol.ONE_SHOT_FLAGS) + parity * control.LINE
    data = word(state, protocol.ONE_SHOT) + parity * protocol.ONE_SHOT_BYTES
    if num_bytes <= protocol.TINY_BYTES:
        flag = word(state, protocol.TINY) + parity * control.LINE
        data = flag + 8
    if status == control.OK:
        copy(peer(ctx, me) + data, x, num_bytes)
        signal(peer(ctx, me) + flag, epoch)
        set_word(state, protocol.ONE_SHOT_EPOCH, epoch)  # behind a barrier: all threads have read it
    for distance in range(1, size):
        rank = (me + distance) % size
        if status == control.OK:
            raised = peer(ctx, rank) + flag
            status = meet(ctx, fingerprint, raised, epoch, rank, sites.ONE_SHOT_STAGED, "none")  # RAW
    if (status == control.OK) & ((root < 0) | (root == me)):
        reduce(ctx, out, x, data, num_bytes, DTYPE, OP)
    leave(ctx, status)
