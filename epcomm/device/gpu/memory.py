"""Loads, stores, atomics and copies on raw addresses (int64), as on the CPU target.

Payload moves in tiles of `TILE_BYTES`. A *wide* tile is of 16-byte accesses: its address and its rows' length must be
multiples of 16. Anything else moves in bytes.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device, fence_system

TILE_BYTES = tl.constexpr(16384)  # a bfloat16 row of 8192: the rows of most models go in one tile
NARROW_TILE_BYTES = tl.constexpr(1024)


@device
def word(address, index):
    """Word `index` of a block of 64-bit words. Not for words that others write meanwhile."""
    return tl.load((address + index * 8).to(tl.pointer_type(tl.int64)))


@device
def set_word(address, index, value):
    tl.store((address + index * 8).to(tl.pointer_type(tl.int64)), tl.cast(value, tl.int64))


@device
def load32(address):
    return tl.load(address.to(tl.pointer_type(tl.int32)))


@device
def store32(address, value):
    tl.store(address.to(tl.pointer_type(tl.int32)), tl.cast(value, tl.int32))


@device
def load64(address):
    return tl.load(address.to(tl.pointer_type(tl.int64)))


@device
def load_float(address):
    return tl.load(address.to(tl.pointer_type(tl.float32)))


@device
def store_float(address, value):
    tl.store(address.to(tl.pointer_type(tl.float32)), tl.cast(value, tl.float32))


@device
def load_words(addresses, mask):
    """Words at a tile of addresses, 0 where there is no mask."""
    return tl.load(addresses.to(tl.pointer_type(tl.int64)), mask=mask, other=0)


@device
def store_words(addresses, values, mask):
    tl.store(addresses.to(tl.pointer_type(tl.int64)), values, mask=mask)


@device
def load_acquire(address):
    """A word that another program or rank raises, and after it all that was written before it was raised."""
    return tl.atomic_add(address.to(tl.pointer_type(tl.int64)), tl.cast(0, tl.int64), sem="acquire", scope="sys")


@device
def store_release(address, value):
    """Writes a word that others wait for, after all that this program's threads wrote."""
    tl.debug_barrier()
    tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), tl.cast(value, tl.int64), sem="release", scope="sys")


@device
def release_to_network():
    """What this program's threads wrote, or acquired from other programs, is there when a network card reads it.

    Programs of one rank meet by `fetch_add`, at the scope of their GPU; a card is outside of it. Then it takes a fence
    of the whole system, and by causality it covers the other programs' stores, too.
    """
    tl.debug_barrier()
    fence_system()


@device
def fetch_add(address, value):
    """Adds to a word of this rank; what earlier adders wrote is visible afterwards."""
    tl.debug_barrier()
    return tl.atomic_add(address.to(tl.pointer_type(tl.int64)), tl.cast(value, tl.int64), sem="acq_rel", scope="gpu")


@device
def compare_exchange(address, expected, value):
    """Writes `value` if the word is `expected`; returns what it found."""
    pointer = address.to(tl.pointer_type(tl.int64))
    return tl.atomic_cas(pointer, tl.cast(expected, tl.int64), tl.cast(value, tl.int64), sem="acq_rel", scope="sys")


@device
def is_wide(a, b, num_bytes):
    """True if rows of `num_bytes` at these addresses or strides can move in 16-byte accesses."""
    return ((a | b | num_bytes) & 15) == 0


@device
def load_tile(address, start, num_bytes, WIDE: tl.constexpr, TILE: tl.constexpr):
    """Bytes [start, start + TILE) of a row of `num_bytes`; `start` is a multiple of TILE."""
    if WIDE:
        at, is_inside = _vectors(start, num_bytes, TILE)
        return tl.load(tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + at, mask=is_inside, other=0)
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
        at = start + tl.arange(0, TILE)
        return tl.load(pointer + at, mask=at < num_bytes, other=0)


@device
def store_tile(address, start, num_bytes, tile, WIDE: tl.constexpr, TILE: tl.constexpr):
    """The counterpart of `load_tile`."""
    if WIDE:
        at, is_inside = _vectors(start, num_bytes, TILE)
        tl.store(tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + at, tile, mask=is_inside)
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
        at = start + tl.arange(0, TILE)
        tl.store(pointer + at, tile, mask=at < num_bytes)


@device
def _vectors(start, num_bytes, TILE: tl.constexpr):
    """(offsets in 4-byte words, mask) of a tile as a column of 16-byte vectors.

    Not as a line: Triton gives all tiles of one shape in a kernel one layout, so a line of as many numbers of another
    size would make each copy go through shared memory.
    """
    vector = start // 16 + tl.arange(0, TILE // 16)[:, None]
    return vector * 4 + tl.arange(0, 4)[None, :], vector < num_bytes // 16


@device
def _copy_tiles(to, source, num_bytes, WIDE: tl.constexpr, TILE: tl.constexpr):
    start = tl.cast(0, tl.int64)
    while start < num_bytes:
        left = tl.minimum(num_bytes - start, TILE)
        store_tile(to + start, 0, left, load_tile(source + start, 0, left, WIDE, TILE), WIDE, TILE)
        start += TILE


@device
def copy(to, source, num_bytes):
    """Copies `num_bytes` with all threads of this program."""
    wide_bytes = tl.cast(0, tl.int64)
    if is_wide(to, source, 0):
        wide_bytes = num_bytes // 16 * 16
    _copy_tiles(to, source, wide_bytes, True, TILE_BYTES)
    _copy_tiles(to + wide_bytes, source + wide_bytes, num_bytes - wide_bytes, False, NARROW_TILE_BYTES)


@device
def _zero_tiles(to, num_bytes, WIDE: tl.constexpr, TILE: tl.constexpr):
    start = tl.cast(0, tl.int64)
    while start < num_bytes:
        left = tl.minimum(num_bytes - start, TILE)
        if WIDE:
            store_tile(to + start, 0, left, tl.zeros((TILE // 16, 4), tl.int32), WIDE, TILE)
        else:
            store_tile(to + start, 0, left, tl.zeros((TILE,), tl.int8), WIDE, TILE)
        start += TILE


@device
def zero_bytes(to, num_bytes):
    """Zeroes `num_bytes` with all threads of this program."""
    wide_bytes = tl.cast(0, tl.int64)
    if is_wide(to, 0, 0):
        wide_bytes = num_bytes // 16 * 16
    _zero_tiles(to, wide_bytes, True, TILE_BYTES)
    _zero_tiles(to + wide_bytes, num_bytes - wide_bytes, False, NARROW_TILE_BYTES)
