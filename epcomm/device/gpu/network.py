"""Puts and signals to ranks that load and store don't reach, by the network that a kernel's constant NETWORK names.

"none"     there is no such rank: nothing here may be called, and none of it is in the code
"nvshmem"  NVSHMEM, by whichever of its transports reaches the peer
"gin"      NCCL's GPU-initiated networking

A ``window`` is the address of words that describe a segment, see `control.WINDOW_HANDLE`. Whoever waits needs nothing
from here: a signal is a word of the waiter's own segment.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.gin import gin_quiet, gin_raise_remote, gin_start_put
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.nvshmem import nvshmem_quiet, nvshmem_raise_remote, nvshmem_start_put


@device
def start_put(ctx, window, rank, to_offset, from_offset, num_bytes, NETWORK: tl.constexpr):
    """Starts a copy of bytes of this rank's own segment to the same segment of `rank`, by all threads of the program.

    They may be anywhere until a signal that was raised afterwards is seen, and the source be read until `quiet`.
    """
    if NETWORK == "nvshmem":
        nvshmem_start_put(ctx, window, rank, to_offset, from_offset, num_bytes)
    elif NETWORK == "gin":
        gin_start_put(ctx, window, rank, to_offset, from_offset, num_bytes)


@device
def raise_remote(ctx, window, rank, offset, value, NETWORK: tl.constexpr):
    """Raises a monotone word of a rank's segment, after all that this program put to that rank. One writer per word."""
    if NETWORK == "nvshmem":
        nvshmem_raise_remote(ctx, window, rank, offset, value)
    elif NETWORK == "gin":
        gin_raise_remote(ctx, window, rank, offset, value)


@device
def quiet(ctx, NETWORK: tl.constexpr):
    """Returns when the sources of this program's puts may be overwritten."""
    if NETWORK == "nvshmem":
        nvshmem_quiet()
    elif NETWORK == "gin":
        gin_quiet(ctx)
