"""What a combine sends back to ranks on other nodes: rows of the output block, to their places in the returns.

The returns are in the order of the departures: by rank and local expert, or by rank. Rows of one source and expert are
consecutive in both. One program does all puts of a launch.

Edge: WAR, DONE of combine e - 1: the peer has read its returns.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import load32, word
from epcomm.device.gpu.network import start_put
from epcomm.kernels.gpu.departures import kept_rows
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def _put_rows(ctx, args, state, tensors, output, rank, to_row, row, num_rows, NETWORK: tl.constexpr):
    """Puts a run of the output block's rows into the returns of `rank`."""
    block = word(state, protocol.OUTPUTS) + output * word(state, protocol.OUTPUT_BYTES)
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = tensors + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        to = word(state, protocol.RETURNS) + word(tensor, protocol.T_RETURN) + to_row * num_bytes
        source = block + word(tensor, protocol.T_OFFSET) + row * num_bytes
        start_put(ctx, word(state, protocol.WINDOW), rank, to, source, num_rows * num_bytes, NETWORK)


@device
def send_returns(ctx, args, state, routing, tensors, output, rank, NETWORK: tl.constexpr):
    """Puts all rows of a combine for a rank on another node."""
    if word(args, protocol.BY_RANK):
        _send_by_rank(ctx, args, state, routing, tensors, output, rank, NETWORK)
    else:
        _send_by_expert(ctx, args, state, routing, tensors, output, rank, NETWORK)


@device
def _is_far(state, rank, other):
    """True if two ranks are on different nodes."""
    nodes = word(state, protocol.NODES)
    return load32(nodes + 4 * rank) != load32(nodes + 4 * other)


@device
def _count(table, columns, source, column):
    """The entry of a source in a column of everyone's counts."""
    return load32(table + 4 * (source * columns + column)).to(tl.int64)


@device
def _send_by_rank(ctx, args, state, routing, tensors, output, rank, NETWORK: tl.constexpr):
    table, num_experts = word(routing, protocol.TABLE), word(state, protocol.NUM_EXPERTS)
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    columns = num_experts + size
    row, to_row = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    for source in range(rank):
        row += _count(table, columns, source, num_experts + me)
    for other in range(me):
        if _is_far(state, other, rank):
            to_row += _count(table, columns, rank, num_experts + other)
    num_rows = _count(table, columns, rank, num_experts + me)
    if word(state, protocol.LAYOUT) == protocol.FLAT:
        num_rows = kept_rows(state, row, num_rows)
    if num_rows > 0:
        _put_rows(ctx, args, state, tensors, output, rank, to_row, row, num_rows, NETWORK)


@device
def _send_by_expert(ctx, args, state, routing, tensors, output, rank, NETWORK: tl.constexpr):
    me, size = word(ctx, control.RANK), word(ctx, control.SIZE)
    table, columns = word(routing, protocol.TABLE), word(state, protocol.NUM_EXPERTS) + size
    starts = word(state, protocol.ORDER_START)
    to_row = tl.cast(0, tl.int64)
    for owner in range(me + 1):
        if _is_far(state, owner, rank):
            for place in range(load32(starts + 4 * owner), load32(starts + 4 * (owner + 1))):
                expert = load32(word(state, protocol.ORDER) + 4 * tl.cast(place, tl.int64)).to(tl.int64)
                count = _count(table, columns, rank, expert)
                if owner == me:
                    row = _first_row(routing, table, columns, me, rank, expert)
                    num_rows = kept_rows(state, row, count)
                    if num_rows > 0:
                        _put_rows(ctx, args, state, tensors, output, rank, to_row, row, num_rows, NETWORK)
                to_row += count


@device
def _first_row(routing, table, columns, me, source, expert):
    """This rank's row of the first one of `source` for one of its own experts."""
    row = load32(word(routing, protocol.BASE) + 4 * expert).to(tl.int64)  # of the first of this rank's own
    for other in range(me, source):
        row += _count(table, columns, other, expert)
    for other in range(source, me):
        row -= _count(table, columns, other, expert)
    return row
