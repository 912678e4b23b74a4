"""The copy or sum of a row of a plan, see `protocol.plans`: of one chunk's part, from memory or a message to either.

Sizes and offsets are of what is summed, unless a row says that an operand is WIDE: partial sums may be float32, and so
is PARTIAL then.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import copy, set_word, word
from epcomm.kernels.gpu.reduction import reduce_listed, reduce_two
from epcomm.kernels.protocol import collectives
from epcomm.kernels.protocol import plans as protocol


@device
def _address(args, x, out, buffer, offset):
    base = word(args, collectives.SCRATCH)
    if buffer == protocol.INPUT:
        base = x
    if buffer == protocol.OUTPUT:
        base = out
    return base + offset


@device
def scaled(row, flag: tl.constexpr, num_bytes, PARTIAL: tl.constexpr):
    """What `num_bytes` are of a row's operand that is WIDE if the row has the flag."""
    if PARTIAL is not None:
        num_bytes = tl.where((word(row, protocol.FLAGS) & flag) != 0, num_bytes * protocol.WIDE, num_bytes)
    return num_bytes


@device
def _operand(args, x, out, row, buffer: tl.constexpr, offset: tl.constexpr, flag: tl.constexpr, start,
             PARTIAL: tl.constexpr):  # fmt: skip
    """Address of byte `start` of a row's chunk, of which the row's words `buffer` and `offset` say where it is."""
    return _address(args, x, out, word(row, buffer), word(row, offset) + scaled(row, flag, start, PARTIAL))


@device
def move(ctx, args, x, out, row, worker, start, num_bytes, message, slot,
         DTYPE: tl.constexpr, OP: tl.constexpr, FINISHES: tl.constexpr, PARTIAL: tl.constexpr):  # fmt: skip
    """Does a row's copy or sum of `num_bytes` from byte `start` of its chunk on; messages are at `message`, `slot`."""
    flags = word(row, protocol.FLAGS)
    source = _operand(args, x, out, row, protocol.SRC_BUFFER, protocol.SRC_OFFSET, protocol.WIDE_SRC, start, PARTIAL)
    to = _operand(args, x, out, row, protocol.DST_BUFFER, protocol.DST_OFFSET, protocol.WIDE_RESULT, start, PARTIAL)
    num_moved = scaled(row, protocol.WIDE_RESULT, num_bytes, PARTIAL)
    receives, sends = (flags & protocol.RECEIVES) != 0, (flags & protocol.SENDS) != 0
    is_sum = (flags & protocol.REDUCES) != 0
    if receives & (is_sum == 0):
        source = message
    if OP != "none":
        SUM: tl.constexpr = "sum" if FINISHES else OP
        ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
        size, num_items = word(ctx, control.SIZE), num_bytes // ITEM
        operands = word(args, collectives.SOURCES) + worker * size * 8
        if is_sum:
            other = _operand(
                args, x, out, row, protocol.OTHER_BUFFER, protocol.OTHER_OFFSET, protocol.WIDE_OTHER, start, PARTIAL
            )  # fmt: skip
            total = to
            if receives:
                other = message
            if sends:
                total = slot
            if PARTIAL is not None:
                is_source_wide, is_other_wide = (flags & protocol.WIDE_SRC) != 0, (flags & protocol.WIDE_OTHER) != 0
                is_wide = (flags & protocol.WIDE_RESULT) != 0
                reduce_two(total, source, other, num_items, size, is_source_wide, is_other_wide, is_wide, DTYPE, SUM)
            else:
                set_word(operands, 0, source)
                set_word(operands, 1, other)
                tl.debug_barrier()
                reduce_listed(total, operands, tl.cast(2, tl.int64), num_items, size, DTYPE, DTYPE, SUM)
            tl.debug_barrier()  # what is copied below may have been computed by other threads
            source, sends = total, False
        if FINISHES:
            if (flags & protocol.FINISHES) != 0:
                set_word(operands, 0, to)
                tl.debug_barrier()
                reduce_listed(to, operands, tl.cast(1, tl.int64), num_items, size, DTYPE, DTYPE, OP)
    if sends & (slot != source):
        copy(slot, source, num_moved)
    if ((flags & protocol.WRITES) != 0) & (to != source):
        copy(to, source, num_moved)
