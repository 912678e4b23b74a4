"""A token's slots and rows: what they weigh, which are dropped, and where a quantised one has its scales."""

from __future__ import annotations

from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import load32, load_float, word
from epcomm.kernels.protocol import expert_parallel as protocol


@device
def slot_weight(routing, weights, token, slot, topk):
    """The weight of a (token, expert): its slot's and those of later slots that name the same expert."""
    given, experts = weights + 4 * token * topk, word(routing, protocol.EXPERT) + 4 * token * topk
    total = load_float(given + 4 * slot)
    for later in range(slot + 1, topk):
        if load32(experts + 4 * later) == -2 - slot:
            total += load_float(given + 4 * later)
    return total


@device
def scales_of(row, columns):
    """Address of the scales of a quantised row of a combine: see `protocol.quantized_row`."""
    return row + ((columns + protocol.SCALES_ALIGNMENT - 1) & -protocol.SCALES_ALIGNMENT)


@device
def is_dropped(state, row):
    """True for a row of a receive block past its limit, in a handle that drops those."""
    return row >= word(state, protocol.ROW_LIMIT) and word(state, protocol.LAYOUT) != protocol.PADDED
