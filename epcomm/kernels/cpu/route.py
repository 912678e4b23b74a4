"""Route: which row of which rank each (token, slot) becomes, from this rank's indices alone.

A token's rows for one expert are one row, however many of its slots name that expert. Program 0 does all of it: rows
are numbered in token order. It waits for no one.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import kernel
from epcomm.device.cpu.memory import load32, load64, set_word, store32, word
from epcomm.kernels.protocol import expert_parallel as protocol


@kernel("route", is_single=True)
def route(ctx, args, program, num_programs):
    """Returns BAD_VALUE, with the slot in BAD_SLOT, for an index < -1 or >= num_experts."""
    routing, state, index = word(args, protocol.ROUTING), word(args, protocol.STATE), word(args, protocol.INDEX)
    size, num_experts, owner = word(ctx, control.SIZE), word(state, protocol.NUM_EXPERTS), word(state, protocol.OWNER)
    num_tokens, topk = word(routing, protocol.NUM_TOKENS), word(routing, protocol.TOPK)
    wide = word(routing, protocol.INDEX_BYTES) == 8
    experts, positions = word(routing, protocol.EXPERT), word(routing, protocol.POSITION)
    rank_positions, counts = word(routing, protocol.RANK_POSITION), word(routing, protocol.OWN_COUNTS)
    by_rank = word(state, protocol.IS_BY_RANK)
    # marks: the last token that named the expert, the slot it did so in, and the last token sent to the rank
    marks = word(state, protocol.MARKS)
    slots, rank_marks = marks + 4 * num_experts, marks + 8 * num_experts
    for expert in range(num_experts):
        store32(marks + 4 * expert, -1)
        store32(counts + 4 * expert, 0)
    for rank in range(size):
        store32(rank_marks + 4 * rank, -1)
        store32(counts + 4 * (num_experts + rank), 0)
    for token in range(num_tokens):
        if by_rank:
            for rank in range(size):
                store32(rank_positions + 4 * (token * size + rank), -1)
        for slot in range(topk):
            at = token * topk + slot
            expert = load64(index + 8 * at) if wide else load32(index + 4 * at)
            if expert < -1 or expert >= num_experts:
                set_word(routing, protocol.BAD_SLOT, at)
                return control.BAD_VALUE
            if expert == -1:
                store32(experts + 4 * at, -1)
            elif load32(marks + 4 * expert) == token:
                store32(experts + 4 * at, -2 - load32(slots + 4 * expert))
            else:
                store32(marks + 4 * expert, token)
                store32(slots + 4 * expert, slot)
                position = load32(counts + 4 * expert)
                store32(experts + 4 * at, expert)
                store32(positions + 4 * at, position)
                store32(counts + 4 * expert, position + 1)
                rank = load32(owner + 4 * expert)
                if load32(rank_marks + 4 * rank) != token:
                    store32(rank_marks + 4 * rank, token)
                    count = counts + 4 * (num_experts + rank)
                    if by_rank:
                        store32(rank_positions + 4 * (token * size + rank), load32(count))
                    store32(count, load32(count) + 1)
    return control.OK
