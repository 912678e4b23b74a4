"""One-shot allreduce and reduce: every rank stages its input, then reads everyone's and reduces all of it itself.

Up to TINY_BYTES the data shares a line with its flag, so a peer's input arrives in one line transfer. All ranks reduce
in rank order: the result has the same bits everywhere.

Edges
  RAW  a peer's flag at epoch e: its input of epoch e is staged.
  WAR  the slot of epoch e was read by every peer at e - 2: each raised its flag e - 1 after that, and this rank waited
       for all of those at e - 1.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.control import LINE
from epcomm.device.cpu.compile import kernel
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import copy, copy_bytes, set_word, word
from epcomm.device.cpu.peers import peer
from epcomm.device.cpu.waiting import meet, signal
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import sites


@kernel("allreduce_one_shot", is_single=True)
def allreduce_one_shot(ctx, args, program, num_programs):
    state, sources = word(args, protocol.STATE), word(args, protocol.SOURCES)
    x, out, num_bytes = word(args, protocol.X), word(args, protocol.OUT), word(args, protocol.NUM_BYTES)
    me, size, root = word(ctx, control.RANK), word(ctx, control.SIZE), word(args, protocol.ROOT)
    epoch = word(state, protocol.ONE_SHOT_EPOCH) + 1
    set_word(state, protocol.ONE_SHOT_EPOCH, epoch)
    parity = epoch & 1
    if num_bytes <= protocol.TINY_BYTES:
        flag = word(state, protocol.TINY) + parity * LINE
        data = flag + 8
        copy_bytes(peer(ctx, me) + data, x, num_bytes)
    else:
        flag = word(state, protocol.ONE_SHOT_FLAGS) + parity * LINE
        data = word(state, protocol.ONE_SHOT) + parity * protocol.ONE_SHOT_BYTES
        copy(peer(ctx, me) + data, x, num_bytes)
    signal(peer(ctx, me) + flag, epoch)
    for distance in range(1, size):
        rank = (me + distance) % size
        status = meet(ctx, peer(ctx, rank) + flag, epoch, rank, sites.ONE_SHOT_STAGED)  # RAW
        if status != control.OK:
            return status
    if root < 0 or root == me:
        for rank in range(size):
            set_word(sources, rank, x if rank == me else peer(ctx, rank) + data)
        call6(word(args, protocol.REDUCE), out, sources, size, num_bytes, size, 0)
    return control.OK
