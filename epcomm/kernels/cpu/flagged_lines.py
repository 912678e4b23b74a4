"""Messages with their flags in them, between a stage, where data lies as it is, and a slot: see `protocol.lines`.

Roles   The sender packs from its own stage into a slot of the receiver's segment; the receiver unpacks to its stage.
Edge    RAW  flag: each word, or line, of a message is there.

ll      A word is stored and loaded by one access of 8 aligned bytes, which no CPU tears, so no order is needed: LLVM's
        `monotonic`, which neither splits nor merges accesses.
ll128   A line's data is stored, then its flag with release; the flag is loaded with acquire, then the data. That holds
        on every CPU, whatever a line of its caches is. On x86 neither costs more than a plain access.

Flags only grow, and a message's flag is in the upper half of a word of "ll": what is waited for is a word that is at
least the flag, as for all words that ranks raise. Whole words and lines move: what a stage has behind the data is
carried along and means nothing.
"""

from __future__ import annotations

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import (
    copy_bytes,
    load32,
    load_acquire,
    load_relaxed,
    store32,
    store_relaxed,
    store_release,
)
from epcomm.device.cpu.waiting import wait
from epcomm.kernels.protocol import sites
from epcomm.kernels.protocol.lines import (
    LINE_BYTES,
    LINE_DATA_BYTES,
    LL,
    LL_DATA_BYTES,
    LL_WORD_BYTES,
    PROTOCOLS,
)

_LL = PROTOCOLS.index(LL)


@device
def _send_words(slot, stage, num_bytes, flag):
    for index in range((num_bytes + LL_DATA_BYTES - 1) // LL_DATA_BYTES):
        data = load32(stage + LL_DATA_BYTES * index) & 0xFFFFFFFF
        store_relaxed(slot + LL_WORD_BYTES * index, flag << 32 | data)


@device
def _receive_words(ctx, stage, slot, num_bytes, flag, rank):
    for index in range((num_bytes + LL_DATA_BYTES - 1) // LL_DATA_BYTES):
        address = slot + LL_WORD_BYTES * index
        found = load_relaxed(address)
        if found < flag << 32:
            status = wait(ctx, address, flag << 32, rank, sites.PLAN_MESSAGE)  # RAW
            if status != control.OK:
                return status
            found = load_relaxed(address)
        store32(stage + LL_DATA_BYTES * index, found)
    return control.OK


@device
def _send_lines(slot, stage, num_bytes, flag):
    for index in range((num_bytes + LINE_DATA_BYTES - 1) // LINE_DATA_BYTES):
        line = slot + LINE_BYTES * index
        copy_bytes(line, stage + LINE_DATA_BYTES * index, LINE_DATA_BYTES)
        store_release(line + LINE_DATA_BYTES, flag)


@device
def _receive_lines(ctx, stage, slot, num_bytes, flag, rank):
    for index in range((num_bytes + LINE_DATA_BYTES - 1) // LINE_DATA_BYTES):
        line = slot + LINE_BYTES * index
        if load_acquire(line + LINE_DATA_BYTES) < flag:
            status = wait(ctx, line + LINE_DATA_BYTES, flag, rank, sites.PLAN_MESSAGE)  # RAW
            if status != control.OK:
                return status
        copy_bytes(stage + LINE_DATA_BYTES * index, line, LINE_DATA_BYTES)
    return control.OK


@device
def place_of(protocol, num_bytes):
    """How far into a message `num_bytes` of data reach that fill its words and lines."""
    if protocol == _LL:
        return num_bytes // LL_DATA_BYTES * LL_WORD_BYTES
    return num_bytes // LINE_DATA_BYTES * LINE_BYTES


@device
def send_flagged(protocol, slot, stage, num_bytes, flag):
    """Packs `num_bytes` of a stage, with a flag in each word or line."""
    if protocol == _LL:
        _send_words(slot, stage, num_bytes, flag)
    else:
        _send_lines(slot, stage, num_bytes, flag)


@device
def receive_flagged(ctx, protocol, stage, slot, num_bytes, flag, rank):
    """Unpacks `num_bytes` to a stage as they come from `rank`; returns a status."""
    if protocol == _LL:
        return _receive_words(ctx, stage, slot, num_bytes, flag, rank)
    return _receive_lines(ctx, stage, slot, num_bytes, flag, rank)
