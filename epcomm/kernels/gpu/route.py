"""Route: which row of which rank each (token, slot) becomes, from this rank's indices alone.

A token's rows for one expert are one row, however many of its slots name that expert. The programs share out the
experts and ranks; each counts the tokens that go there, in token order, with a running sum. It waits for no one.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import all_programs, kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import set_word, store32, word
from epcomm.device.gpu.waiting import enter, leave, tell_host
from epcomm.kernels.protocol import expert_parallel as protocol

TOKENS = tl.constexpr(128)  # that are looked at together


@device
def _load_index(index, at, mask, wide):
    """The experts in slots `at`, int64; -1 where masked."""
    expert = tl.full(at.shape, -1, tl.int64)
    if wide:
        expert = tl.load(index.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=-1)
    else:
        expert = tl.load(index.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=-1).to(tl.int64)
    return expert


@device
def _route_expert(expert, index, wide, num_tokens, topk, experts, positions, counts):
    """Numbers the tokens that go to `expert`: its first slot in a token is the row, later ones refer to that slot."""
    count = tl.cast(0, tl.int64)
    start = tl.cast(0, tl.int64)
    while start < num_tokens:
        token = start + tl.arange(0, TOKENS)
        is_token = token < num_tokens
        first = tl.full((TOKENS,), -1, tl.int64)
        for slot in range(topk):
            is_here = _load_index(index, token * topk + slot, is_token, wide) == expert
            first = tl.where(is_here & (first < 0), slot, first)
        goes = (first >= 0).to(tl.int64)
        position = count + tl.cumsum(goes, 0) - goes
        for slot in range(topk):
            at = token * topk + slot
            is_here = is_token & (_load_index(index, at, is_token, wide) == expert)
            entry = tl.where(first == slot, expert, -2 - first)
            tl.store(experts.to(tl.pointer_type(tl.int32)) + at, entry.to(tl.int32), mask=is_here)
            is_row = is_here & (first == slot)
            tl.store(positions.to(tl.pointer_type(tl.int32)) + at, position.to(tl.int32), mask=is_row)
        count += tl.sum(goes, 0)
        start += TOKENS
    store32(counts + 4 * expert, count)


@device
def _route_none(index, wide, num_tokens, topk, num_experts, experts):
    """Marks the slots without expert, and those whose index is out of range; returns the first of these, or -1."""
    num_slots = num_tokens * topk
    bad = num_slots
    start = tl.cast(0, tl.int64)
    while start < num_slots:
        at = start + tl.arange(0, TOKENS)
        expert = _load_index(index, at, at < num_slots, wide)
        is_bad = (expert < -1) | (expert >= num_experts)
        is_none = (at < num_slots) & ((expert == -1) | is_bad)
        tl.store(experts.to(tl.pointer_type(tl.int32)) + at, tl.full((TOKENS,), -1, tl.int32), mask=is_none)
        bad = tl.minimum(bad, tl.min(tl.where(is_bad, at, num_slots), 0))
        start += TOKENS
    return tl.where(bad < num_slots, bad, -1)


@device
def _route_rank(rank, index, wide, num_tokens, topk, num_experts, owner, rank_positions, size, counts):
    """Numbers the tokens that go to any expert of `rank`; by rank (`rank_positions` != 0) each is one row."""
    count = tl.cast(0, tl.int64)
    start = tl.cast(0, tl.int64)
    while start < num_tokens:
        token = start + tl.arange(0, TOKENS)
        is_token = token < num_tokens
        goes = tl.zeros((TOKENS,), tl.int64)
        for slot in range(topk):
            expert = _load_index(index, token * topk + slot, is_token, wide)
            is_expert = (expert >= 0) & (expert < num_experts)
            owned = tl.load(owner.to(tl.pointer_type(tl.int32)) + expert, mask=is_expert, other=-1)
            goes = tl.where(owned == rank, 1, goes)
        if rank_positions != 0:
            position = tl.where(goes == 1, count + tl.cumsum(goes, 0) - 1, -1)
            at = rank_positions.to(tl.pointer_type(tl.int32)) + (token * size + rank)
            tl.store(at, position.to(tl.int32), mask=is_token)
        count += tl.sum(goes, 0)
        start += TOKENS
    store32(counts + 4 * (num_experts + rank), count)


@kernel("route", programs=all_programs, num_warps=4, reports=True)
def route(ctx, args, fingerprint, routing, index, c2, c3, c4, c5):
    """Ends with BAD_VALUE, and the slot in BAD_SLOT, for an index < -1 or >= num_experts."""
    program, status = enter(ctx, fingerprint, "none")
    state = word(args, protocol.STATE)
    size, num_experts = word(ctx, control.SIZE), word(state, protocol.NUM_EXPERTS)
    num_tokens, topk = word(routing, protocol.NUM_TOKENS), word(routing, protocol.TOPK)
    wide = word(routing, protocol.INDEX_BYTES) == 8
    experts, counts = word(routing, protocol.EXPERT), word(routing, protocol.OWN_COUNTS)
    rank_positions = tl.cast(0, tl.int64)
    if word(state, protocol.IS_BY_RANK):
        rank_positions = word(routing, protocol.RANK_POSITION)
    if status == control.OK:
        for item in range(program, num_experts + size + 1, tl.num_programs(0)):
            if item < num_experts:
                positions = word(routing, protocol.POSITION)
                _route_expert(item, index, wide, num_tokens, topk, experts, positions, counts)
            elif item < num_experts + size:
                owner, rank = word(state, protocol.OWNER), item - num_experts
                _route_rank(rank, index, wide, num_tokens, topk, num_experts, owner, rank_positions, size, counts)
            else:
                bad = _route_none(index, wide, num_tokens, topk, num_experts, experts)
                if bad >= 0:
                    set_word(routing, protocol.BAD_SLOT, bad)
                    if word(state, protocol.TELLS_LATER):
                        tell_host(ctx, control.BAD_VALUE_BEFORE, bad, topk)
                    else:
                        status = tl.cast(control.BAD_VALUE, tl.int64)
    leave(ctx, status)
