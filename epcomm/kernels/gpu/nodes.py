"""Look-ups in the table of nodes (see `kernels.protocol.nodes`)."""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import word
from epcomm.kernels.protocol import nodes as protocol


@device
def _entry(ctx, table, row, index):
    return word(table, protocol.ROWS + row * word(ctx, control.SIZE) + index)


@device
def node_of(ctx, table, rank):
    return _entry(ctx, table, protocol.NODE, rank)


@device
def number_of(ctx, table, rank):
    """Which rank of its node a rank is."""
    return _entry(ctx, table, protocol.NUMBER, rank)


@device
def num_members(ctx, table, node):
    """How many ranks a node has."""
    return _entry(ctx, table, protocol.NUM_ROWS, node + 1) - _entry(ctx, table, protocol.NUM_ROWS, node)


@device
def member(ctx, table, node, number):
    """The rank with a number on a node."""
    return _entry(ctx, table, protocol.MEMBERS, _entry(ctx, table, protocol.NUM_ROWS, node) + number)
