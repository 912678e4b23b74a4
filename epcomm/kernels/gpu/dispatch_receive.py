"""The receiving half of a dispatch: waits for the peers' rows and completes this rank's receive block.

Roles, by program
  EXPANDED, all: wait for every peer's ROWS, then copy every n-th row that arrived to the places of its experts.
  otherwise one: wait for every peer's ROWS.
  the first: wait for DONE of the last combine.

Edges
  RAW  ROWS: the peer's rows for this rank are delivered.
  WAR  DONE: the peer has read the output blocks of earlier combines; they may be written again.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.compile import kernel
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import (
    NARROW_TILE_BYTES,
    TILE_BYTES,
    is_wide,
    load32,
    load_tile,
    store32,
    store_tile,
    word,
)
from epcomm.device.gpu.waiting import enter, leave, wait_for_everyone
from epcomm.kernels.gpu.counts import signal_word
from epcomm.kernels.gpu.rows import arrivals_of, own_block
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol import sites


@device
def _await_readers(ctx, fingerprint, state, RANKS: tl.constexpr):
    combined = word(state, protocol.COMBINE_EPOCH)
    if combined == word(ctx, control.GENERATION) << control.GENERATION_SHIFT:
        combined = tl.cast(0, tl.int64)  # there was no combine in this generation
    done = signal_word(ctx, state, protocol.DONE, word(ctx, control.RANK), 0)
    return wait_for_everyone(ctx, fingerprint, done, combined, sites.DISPATCH_READ, RANKS)  # WAR


@device
def _place_of(state, places, row, topk, slot):
    """The receive block's row for a slot of an arrived row, or -1: from a peer, so it must not lead outside of it."""
    place = load32(places + 4 * (row * topk + slot)).to(tl.int64)
    return tl.minimum(place, word(state, protocol.BLOCK_ROWS) - 1)


@device
def _expand_row(state, tensor, places, row, topk, arrivals, block, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Copies one arrived row of one tensor to all its places."""
    num_bytes, expanded = word(tensor, protocol.T_ROW_BYTES), word(tensor, protocol.T_EXPANDED)
    source = arrivals + word(tensor, protocol.T_OFFSET) + row * num_bytes
    start = tl.cast(0, tl.int64)
    while start < num_bytes:
        left = tl.minimum(num_bytes - start, TILE)
        tile = load_tile(source + start, 0, left, WIDE, TILE)
        for slot in range(topk):
            place = _place_of(state, places, row, topk, slot)
            if place >= 0:
                store_tile(block + expanded + place * num_bytes + start, 0, left, tile, WIDE, TILE)
        start += TILE


@device
def _expand(ctx, args, state, routing, tensors, block, share, shares):
    topk, has_weights = word(routing, protocol.TOPK), word(args, protocol.HAS_WEIGHTS)
    own, arrivals = own_block(ctx, state, block), arrivals_of(state, word(ctx, control.RANK))
    places = arrivals + word(state, protocol.ARRIVED_PLACE)
    for row in range(share, word(routing, protocol.NUM_ARRIVED), shares):
        for i in range(word(args, protocol.NUM_TENSORS)):
            tensor = tensors + 8 * protocol.TENSOR_WORDS * i
            if is_wide(0, 0, word(tensor, protocol.T_ROW_BYTES)):
                _expand_row(state, tensor, places, row, topk, arrivals, own, True, TILE_BYTES)
            else:
                _expand_row(state, tensor, places, row, topk, arrivals, own, False, NARROW_TILE_BYTES)
        token = load32(arrivals + word(state, protocol.ARRIVED_TOKEN) + 4 * row)
        for slot in range(topk):
            place, at = _place_of(state, places, row, topk, slot), 4 * (row * topk + slot)
            store32(word(routing, protocol.PLACES) + at, place)
            if place >= 0:
                store32(own + word(state, protocol.TOKEN_REGION) + 4 * place, token)
                if has_weights:
                    weight = load32(arrivals + word(state, protocol.ARRIVED_WEIGHT) + at)
                    store32(own + word(state, protocol.WEIGHT_REGION) + 4 * place, weight)


@device
def receive_rows(ctx, args, fingerprint, state, routing, tensors, block, epoch, share, shares,
                 RANKS: tl.constexpr, EXPANDED: tl.constexpr):  # fmt: skip
    """A program's part in the receiving half of dispatch `epoch`."""
    delivered = signal_word(ctx, state, protocol.ROWS, word(ctx, control.RANK), 0)
    status = wait_for_everyone(ctx, fingerprint, delivered, epoch, sites.DISPATCH_ROWS, RANKS)  # RAW
    if EXPANDED:
        if status == control.OK:
            _expand(ctx, args, state, routing, tensors, block, share, shares)
    if share == 0:
        if status == control.OK:
            status = _await_readers(ctx, fingerprint, state, RANKS)
    return status


@kernel("dispatch_receive", programs=lambda shares: 1)
def dispatch_receive(ctx, args, fingerprint, routing, tensors, weights, block, c4, c5,
                     RANKS: tl.constexpr, EXPANDED: tl.constexpr):  # fmt: skip
    """For a dispatch that only sent."""
    program, status = enter(ctx, fingerprint, "none")
    if status == control.OK:
        state, shares = word(args, protocol.STATE), tl.num_programs(0)
        epoch = word(state, protocol.DISPATCH_EPOCH)
        status = receive_rows(
            ctx, args, fingerprint, state, routing, tensors, block, epoch, program, shares, RANKS, EXPANDED
        )
    leave(ctx, status)
