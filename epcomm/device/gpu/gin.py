"""Puts and signals by NCCL's GIN: what `network` has for it. The symbols are those of `gin_shim.ll`.

A peer is always reached through the same one of the communicator's contexts: a signal is visible after the puts that
went before it to the same peer through the same context. Signals add, so each raise adds what is missing to the value.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.external import external
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import load64, release_to_network, set_word, word

_put = external("epcomm_gin_put", 7)
_add = external("epcomm_gin_add", 6)
_flush = external("epcomm_gin_flush", 2)

#: bytes before the device's ncclDevComm; their first word is the number of its contexts (see `heap.nccl`)
PREFIX = tl.constexpr(128)


@device
def _num_contexts(communicator):
    return load64(communicator - PREFIX)


@device
def gin_start_put(ctx, window, rank, to_offset, from_offset, num_bytes):
    communicator = word(ctx, control.NETWORK)
    handle = word(window, word(ctx, control.SIZE) + control.WINDOW_HANDLE)
    rank = tl.cast(rank, tl.int64)
    to_offset, from_offset = tl.cast(to_offset, tl.int64), tl.cast(from_offset, tl.int64)
    num_bytes, context = tl.cast(num_bytes, tl.int64), rank % _num_contexts(communicator)
    release_to_network()
    _put(communicator, context, rank, handle, to_offset, from_offset, num_bytes)


@device
def gin_raise_remote(ctx, window, rank, offset, value):
    communicator, size = word(ctx, control.NETWORK), word(ctx, control.SIZE)
    handle = word(window, size + control.WINDOW_HANDLE)
    rank, offset = tl.cast(rank, tl.int64), tl.cast(offset, tl.int64)
    raised, line = word(window, size + control.WINDOW_RAISED), offset // control.LINE
    line += rank * word(window, size + control.WINDOW_LINES)
    tl.debug_barrier()
    missing = tl.cast(value, tl.int64) - word(raised, line)
    tl.debug_barrier()  # all threads have read it
    set_word(raised, line, value)  # by one thread
    _add(communicator, rank % _num_contexts(communicator), rank, handle, offset, missing)


@device
def gin_quiet(ctx):
    communicator = word(ctx, control.NETWORK)
    tl.debug_barrier()
    context, num_contexts = tl.cast(0, tl.int64), _num_contexts(communicator)
    while context < num_contexts:
        _flush(communicator, context)
        context += 1
    tl.debug_barrier()
