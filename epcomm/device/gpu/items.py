"""Tiles of numbers at raw addresses, in the format that is computed with: that of 16-bit floats is float32.

``ACCESS`` says how a tile moves: 16 bytes at a time (address and length must be multiples of that), an item at a time
(the address must be a multiple of its size), or a byte at a time (any address).
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device, rounded, widened

WIDE = tl.constexpr(16)


@device
def load_items(address, num_items, DTYPE: tl.constexpr, ACCESS: tl.constexpr, TILE: tl.constexpr):
    """The first `num_items` (at most TILE) of the numbers at an address, then zeros."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    at = tl.arange(0, TILE)
    if ACCESS == WIDE:
        pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        items = tl.load(pointer + at, mask=at < tl.multiple_of(num_items, 16 // ITEM), other=0)
    elif ACCESS == ITEM:
        items = tl.load(address.to(tl.pointer_type(DTYPE)) + at, mask=at < num_items, other=0)
    else:
        pointer = address.to(tl.pointer_type(tl.uint8)) + at * ITEM
        bits = tl.zeros((TILE,), tl.uint64)
        for byte in tl.static_range(ITEM):
            bits = bits | (tl.load(pointer + byte, mask=at < num_items, other=0).to(tl.uint64) << (8 * byte))
        items = _lowest_bytes(bits, ITEM).to(DTYPE, bitcast=True)
    if ITEM == 2 and DTYPE.is_floating():
        return widened(items, tl.float32)
    else:
        return items


@device
def store_items(address, items, num_items, DTYPE: tl.constexpr, ACCESS: tl.constexpr, TILE: tl.constexpr):
    """The counterpart of `load_items`; rounds to nearest even."""
    ITEM: tl.constexpr = DTYPE.primitive_bitwidth // 8
    items = rounded(items, DTYPE)
    at = tl.arange(0, TILE)
    if ACCESS == WIDE:
        pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
        tl.store(pointer + at, items, mask=at < tl.multiple_of(num_items, 16 // ITEM))
    elif ACCESS == ITEM:
        tl.store(address.to(tl.pointer_type(DTYPE)) + at, items, mask=at < num_items)
    else:
        pointer = address.to(tl.pointer_type(tl.uint8)) + at * ITEM
        bits = _as_integers(items, ITEM)
        for byte in tl.static_range(ITEM):
            tl.store(pointer + byte, (bits >> (8 * byte)).to(tl.uint8), mask=at < num_items)


@device
def _lowest_bytes(bits, ITEM: tl.constexpr):
    """The lowest ITEM bytes of 64-bit integers."""
    if ITEM == 2:
        return bits.to(tl.uint16)
    elif ITEM == 4:
        return bits.to(tl.uint32)
    else:
        return bits


@device
def _as_integers(items, ITEM: tl.constexpr):
    """The bits of numbers of ITEM bytes as 64-bit integers, with zeros above."""
    if ITEM == 2:
        return items.to(tl.uint16, bitcast=True).to(tl.uint64)
    elif ITEM == 4:
        return items.to(tl.uint32, bitcast=True).to(tl.uint64)
    else:
        return items.to(tl.uint64, bitcast=True)
