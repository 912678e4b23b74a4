"""Puts and signals by NVSHMEM: what `network` has for it. The symbols are those of `nvshmem_shim.mlir`.

An address of this rank's part of a segment is symmetric: with a rank it means the same place in that rank's part.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu.external import external
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import release_to_network, word

_put = external("epcomm_nvshmem_put", 4)
_raise = external("epcomm_nvshmem_raise", 3)
_quiet = external("epcomm_nvshmem_quiet", 0)


@device
def nvshmem_start_put(ctx, window, rank, to_offset, from_offset, num_bytes):
    own = word(window, word(ctx, control.SIZE) + control.WINDOW_HANDLE)
    release_to_network()
    _put(own + to_offset, own + from_offset, tl.cast(num_bytes, tl.int64), tl.cast(rank, tl.int64))


@device
def nvshmem_raise_remote(ctx, window, rank, offset, value):
    own = word(window, word(ctx, control.SIZE) + control.WINDOW_HANDLE)
    tl.debug_barrier()
    _raise(own + offset, tl.cast(value, tl.int64), tl.cast(rank, tl.int64))


@device
def nvshmem_quiet():
    tl.debug_barrier()
    _quiet()  # one thread waits, for the puts of all
    tl.debug_barrier()
