"""Messages with their flags in them, between a stage, where data lies as it is, and a slot: see `protocol.lines`.

Roles   The sender packs from its own stage into a slot of the receiver's segment; the receiver unpacks to its stage.
Edge    RAW  flag: each word, or line, of a message is there.

A thread moves 16 bytes at once, a *pair* of 8-byte words, by accesses that are relaxed at the scope of the system.

ll      A pair is two words with a flag each. PTX's memory model has accesses of vectors as accesses of their elements,
        in any order, and each element, of 64 bits, as one that isn't torn. So no order is needed.
ll128   Eight threads of a warp store a line's eight pairs by one instruction, the last one's second word is the flag;
        as many threads load it by one. That such 128 bytes, aligned, arrive and are read as a whole is no promise of
        PTX's: it is how these GPUs and NVLink work, and what NCCL's LL128 relies on, and it doesn't hold over PCIe.
        `Target.moves_whole_lines` says where it is used. A tile is one number per pair, consecutive ones in consecutive
        threads, so a line never is split between instructions.
        Interpreted, pairs move one after the other: data first, then flags with release; flags first with acquire, then
        data, as on the CPU target.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.machine import WHOLE_LINES, device, load_pairs, store_pairs
from epcomm.device.gpu.memory import load_words, store_words
from epcomm.device.gpu.waiting import wait
from epcomm.kernels.protocol import lines, sites

_TILE = tl.constexpr(512)  # pairs; of lines, as many as a piece has
_NONE = tl.constexpr(1 << 30)  # no word is late
_PAIR_BYTES = tl.constexpr(16)
_LINE_BYTES, _LINE_DATA_BYTES = tl.constexpr(lines.LINE_BYTES), tl.constexpr(lines.LINE_DATA_BYTES)
_LINE_PAIRS = tl.constexpr(lines.LINE_BYTES // 16)
_DATA = tl.constexpr((1 << 32) - 1)  # the lower half of a word
_WORD_DATA_BYTES = tl.constexpr(lines.LL_DATA_BYTES)


@device
def _pairs_of_words(start, num_bytes):
    """Of a tile of a message in words: (numbers of its pairs, which exist, which of those have a second word)."""
    num_words = (num_bytes + _WORD_DATA_BYTES - 1) // _WORD_DATA_BYTES
    pair = start + tl.arange(0, _TILE).to(tl.int64)
    return pair, pair * 2 < num_words, pair * 2 + 1 < num_words


@device
def _pairs_of_lines(num_bytes):
    """Of a piece in lines: (offsets of its pairs in the slot, in the stage, which exist, which have a flag)."""
    num_lines = (num_bytes + _LINE_DATA_BYTES - 1) // _LINE_DATA_BYTES
    pair = tl.arange(0, _TILE).to(tl.int64)
    line, part = pair // _LINE_PAIRS, pair % _LINE_PAIRS
    is_inside = line < num_lines
    return pair * _PAIR_BYTES, line * _LINE_DATA_BYTES + part * _PAIR_BYTES, is_inside, part == _LINE_PAIRS - 1


@device
def _send_words(slot, stage, num_bytes, flag):
    start, num_pairs = tl.cast(0, tl.int64), (num_bytes + 2 * _WORD_DATA_BYTES - 1) // (2 * _WORD_DATA_BYTES)
    while start < num_pairs:
        pair, is_inside, has_second = _pairs_of_words(start, num_bytes)
        data = load_words(stage + pair * 8, is_inside)
        low, high = (data & _DATA) | (flag << 32), ((data >> 32) & _DATA) | (flag << 32)
        high = tl.where(has_second, high, 0)  # nobody waits for that word: its flag must not outlive this message
        store_pairs(slot + pair * _PAIR_BYTES, low, high, is_inside)
        start += _TILE


@device
def _late_word(slot, start, num_bytes, flag):
    """(a tile's pairs, the first word, counted in the piece, that isn't there)."""
    pair, is_inside, has_second = _pairs_of_words(start, num_bytes)
    low, high = load_pairs(slot + tl.where(is_inside, pair, start) * _PAIR_BYTES)
    late = tl.where(has_second & (high < flag << 32), pair * 2 + 1, _NONE)
    late = tl.where(is_inside & (low < flag << 32), pair * 2, late)
    return low, high, tl.min(late, 0)


@device
def _receive_words(ctx, fingerprint, stage, slot, num_bytes, flag, rank):
    status = tl.cast(control.OK, tl.int64)
    start, num_pairs = tl.cast(0, tl.int64), (num_bytes + 2 * _WORD_DATA_BYTES - 1) // (2 * _WORD_DATA_BYTES)
    while (start < num_pairs) & (status == control.OK):
        low, high, late = _late_word(slot, start, num_bytes, flag)
        while (late < _NONE) & (status == control.OK):
            status = wait(ctx, fingerprint, slot + late * 8, flag << 32, rank, sites.PLAN_MESSAGE)  # RAW
            low, high, late = _late_word(slot, start, num_bytes, flag)
        pair, is_inside, _ = _pairs_of_words(start, num_bytes)
        store_words(stage + pair * 8, (low & _DATA) | (high << 32), is_inside)
        start += _TILE
    return status


@device
def _send_lines(slot, stage, num_bytes, flag):
    to, source, is_inside, is_last = _pairs_of_lines(num_bytes)
    low = load_words(stage + source, is_inside)
    high = load_words(stage + source + 8, is_inside & (is_last == 0))
    if WHOLE_LINES:
        store_pairs(slot + to, low, tl.where(is_last, flag, high), is_inside)
    else:
        store_words(slot + to, low, is_inside)
        store_words(slot + to + 8, high, is_inside & (is_last == 0))
        pointer = (slot + to + 8).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(pointer, tl.where(is_last, flag, 0), mask=is_inside & is_last, sem="release", scope="sys")


@device
def _late_line(slot, num_bytes, flag):
    """(a piece's pairs, the offset of the first flag that isn't there)."""
    source, _, is_inside, is_last = _pairs_of_lines(num_bytes)
    if WHOLE_LINES:
        low, high = load_pairs(slot + tl.where(is_inside, source, 0))
        found = high
    else:
        pointer = (slot + source + 8).to(tl.pointer_type(tl.int64))
        found = tl.atomic_add(pointer, source * 0, mask=is_inside & is_last, sem="acquire", scope="sys")
        low, high = load_words(slot + source, is_inside), load_words(slot + source + 8, is_inside & (is_last == 0))
    late = tl.where(is_inside & is_last & (found < flag), source + 8, _NONE)
    return low, high, tl.min(late, 0)


@device
def _receive_lines(ctx, fingerprint, stage, slot, num_bytes, flag, rank):
    status = tl.cast(control.OK, tl.int64)
    low, high, late = _late_line(slot, num_bytes, flag)
    while (late < _NONE) & (status == control.OK):
        status = wait(ctx, fingerprint, slot + late, flag, rank, sites.PLAN_MESSAGE)  # RAW
        low, high, late = _late_line(slot, num_bytes, flag)
    _, to, is_inside, is_last = _pairs_of_lines(num_bytes)
    store_words(stage + to, low, is_inside)
    store_words(stage + to + 8, high, is_inside & (is_last == 0))
    return status


@device
def place_of(num_bytes, PROTOCOL: tl.constexpr):
    """How far into a message `num_bytes` of data reach that fill its words and lines."""
    if PROTOCOL == "ll":
        return num_bytes * 2
    else:
        return num_bytes // _LINE_DATA_BYTES * _LINE_BYTES


@device
def send_flagged(slot, stage, num_bytes, flag, PROTOCOL: tl.constexpr):
    """Packs `num_bytes` of a stage, at most a piece, with a flag in each word or line."""
    if PROTOCOL == "ll":
        _send_words(slot, stage, num_bytes, flag)
    else:
        _send_lines(slot, stage, num_bytes, flag)


@device
def receive_flagged(ctx, fingerprint, stage, slot, num_bytes, flag, rank, PROTOCOL: tl.constexpr):
    """Unpacks `num_bytes`, at most a piece, to a stage as they come from `rank`; returns a status."""
    if PROTOCOL == "ll":
        return _receive_words(ctx, fingerprint, stage, slot, num_bytes, flag, rank)
    else:
        return _receive_lines(ctx, fingerprint, stage, slot, num_bytes, flag, rank)
