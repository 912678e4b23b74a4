"""The copy or sum of a row of a plan, see `protocol.plans`: of one chunk's part, from memory or a message to either.

Sizes and offsets are of what is summed, unless a row says that an operand is WIDE: partial sums may be float32.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.function import call6
from epcomm.device.cpu.memory import copy, copy_streaming, set_word, word
from epcomm.kernels.protocol import collectives
from epcomm.kernels.protocol import plans as protocol


@device
def _address(args, buffer, offset):
    if buffer == protocol.INPUT:
        return word(args, collectives.X) + offset
    return word(args, collectives.OUT if buffer == protocol.OUTPUT else collectives.SCRATCH) + offset


@device
def _store(args, flags, to, source, num_bytes):
    """Copies to a row's destination."""
    if flags & protocol.IS_FINAL and word(args, collectives.STREAMING):
        copy_streaming(to, source, num_bytes)
    elif to != source:
        copy(to, source, num_bytes)


@device
def scaled(flags, flag, num_bytes):
    """What `num_bytes` are of an operand that is WIDE if it has the flag."""
    return num_bytes * protocol.WIDE if flags & flag else num_bytes


@device
def move(ctx, args, row, worker, start, num_bytes, message, slot):
    """Does a row's copy or sum of `num_bytes` from byte `start` of its chunk on; messages are at `message`, `slot`."""
    flags = word(row, protocol.FLAGS)
    source = scaled(flags, protocol.WIDE_SRC, start) + word(row, protocol.SRC_OFFSET)
    source = _address(args, word(row, protocol.SRC_BUFFER), source)
    to = scaled(flags, protocol.WIDE_RESULT, start) + word(row, protocol.DST_OFFSET)
    to = _address(args, word(row, protocol.DST_BUFFER), to)
    num_moved = scaled(flags, protocol.WIDE_RESULT, num_bytes)
    if flags & (protocol.REDUCES | protocol.FINISHES):
        size = word(ctx, control.SIZE)
        operands = word(args, collectives.SOURCES) + worker * size * 8
        if flags & protocol.FINISHES:
            set_word(operands, 0, to)
            call6(word(args, collectives.FINISH), to, operands, 1, num_bytes, size, 0)
            return
        other = scaled(flags, protocol.WIDE_OTHER, start) + word(row, protocol.OTHER_OFFSET)
        other = _address(args, word(row, protocol.OTHER_BUFFER), other)
        set_word(operands, 0, source)
        set_word(operands, 1, message if flags & protocol.RECEIVES else other)
        total = slot if flags & protocol.SENDS else to
        streaming = 1 if flags & protocol.IS_FINAL and total == to and word(args, collectives.STREAMING) else 0
        reduce = word(args, collectives.SUMS + (flags & protocol.ANY_WIDE) // protocol.WIDE_SRC)
        call6(reduce, total, operands, 2, num_bytes, size, streaming)
        if flags & protocol.WRITES and total != to:
            _store(args, flags, to, total, num_moved)
        return
    if flags & protocol.RECEIVES:
        source = message
    if flags & protocol.SENDS and slot != source:
        copy(slot, source, num_moved)
    if flags & protocol.WRITES:
        _store(args, flags, to, source, num_moved)
