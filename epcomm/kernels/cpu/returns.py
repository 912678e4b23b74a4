"""What a combine sends back to ranks on other nodes: rows of the output block, to their places in the returns.

The returns are in the order of the departures: by rank and local expert, or by rank. Rows of one source and expert are
consecutive in both.

Edge: WAR, DONE of combine e - 1: the peer has read its returns.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import load32, word
from epcomm.device.cpu.network import put
from epcomm.kernels.cpu.counts import base_of
from epcomm.kernels.cpu.departures import kept_rows
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def returns(ctx, state):
    """Address of this rank's returns."""
    return base_of(state, word(ctx, control.RANK)) + word(state, protocol.RETURNS)


@device
def _put_rows(ctx, args, state, rank, to_row, row, num_rows):
    """Puts a run of the output block's rows into the returns of `rank`."""
    block = word(state, protocol.OUTPUTS) + word(args, protocol.BLOCK) * word(state, protocol.OUTPUT_BYTES)
    for i in range(word(args, protocol.NUM_TENSORS)):
        tensor = word(args, protocol.TENSORS) + 8 * protocol.TENSOR_WORDS * i
        num_bytes = word(tensor, protocol.T_ROW_BYTES)
        to = word(state, protocol.RETURNS) + word(tensor, protocol.T_RETURN) + to_row * num_bytes
        source = block + word(tensor, protocol.T_OFFSET) + row * num_bytes
        put(ctx, word(state, protocol.WINDOW), rank, to, source, num_rows * num_bytes)


@device
def send_returns(ctx, args, state, rank):
    """Puts all rows of a combine for a rank on another node."""
    if word(args, protocol.BY_RANK):
        _send_by_rank(ctx, args, state, rank)
    else:
        _send_by_expert(ctx, args, state, rank)


@device
def _send_by_rank(ctx, args, state, rank):
    table, num_experts = word(word(args, protocol.ROUTING), protocol.TABLE), word(state, protocol.NUM_EXPERTS)
    me, size, nodes = word(ctx, control.RANK), word(ctx, control.SIZE), word(state, protocol.NODES)
    row, to_row = 0, 0
    for source in range(rank):
        row += load32(table + 4 * (source * (num_experts + size) + num_experts + me))
    for other in range(me):
        if load32(nodes + 4 * other) != load32(nodes + 4 * rank):
            to_row += load32(table + 4 * (rank * (num_experts + size) + num_experts + other))
    num_rows = load32(table + 4 * (rank * (num_experts + size) + num_experts + me))
    if word(state, protocol.LAYOUT) == protocol.FLAT:
        num_rows = kept_rows(state, row, num_rows)
    if num_rows > 0:
        _put_rows(ctx, args, state, rank, to_row, row, num_rows)


@device
def _send_by_expert(ctx, args, state, rank):
    routing, me, size = word(args, protocol.ROUTING), word(ctx, control.RANK), word(ctx, control.SIZE)
    table, columns = word(routing, protocol.TABLE), word(state, protocol.NUM_EXPERTS) + size
    nodes, order = word(state, protocol.NODES), word(state, protocol.ORDER)
    order_start = word(state, protocol.ORDER_START)
    to_row = 0
    for owner in range(me + 1):
        if load32(nodes + 4 * owner) != load32(nodes + 4 * rank):
            for place in range(load32(order_start + 4 * owner), load32(order_start + 4 * (owner + 1))):
                expert = load32(order + 4 * place)
                count = load32(table + 4 * (rank * columns + expert))
                if owner == me and count > 0:
                    row = _first_row(routing, table, columns, me, rank, expert)
                    num_rows = kept_rows(state, row, count)
                    if num_rows > 0:
                        _put_rows(ctx, args, state, rank, to_row, row, num_rows)
                to_row += count


@device
def _first_row(routing, table, columns, me, source, expert):
    """This rank's row of the first one of `source` for one of its own experts."""
    row = load32(word(routing, protocol.BASE) + 4 * expert)  # of the first of this rank's own
    for other in range(min(me, source), max(me, source)):
        count = load32(table + 4 * (other * columns + expert))
        row += count if source > me else -count
    return row
