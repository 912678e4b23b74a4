"""Puts and signals to ranks that load and store don't reach, by the network that a kernel's constant NETWORK names.

"none"     there is no such rank: nothing here may be called, and none of it is in the code
"nvshmem"  NVSHMEM, by whichever of its transports reaches the peer
"gin"      NCCL's GPU-initiated networking
"remote"   software, for interpreted kernels: see `remote`

A ``window`` is the address of words that describe a segment, see `control.WINDOW_HANDLE`; the base address of a rank
that load and store don't reach is 0. Whoever waits needs nothing from here: a signal is a word of the waiter's own
segment.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.gin import gin_quiet, gin_raise_remote, gin_start_put
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import store_release
from epcomm.device.gpu.nvshmem import nvshmem_quiet, nvshmem_raise_remote, nvshmem_start_put
from epcomm.device.gpu.remote import order_remote, put_remote, raise_by_remote


@device
def start_put(ctx, window, rank, to_offset, from_offset, num_bytes, NETWORK: tl.constexpr):
    """Starts a copy of bytes of this rank's own segment to the same segment of `rank`, by all threads of the program.

    What is sent may have been written by this program, or by others that it knows (by `fetch_add`) to have ended.
    They may be anywhere until a signal that was raised after a `quiet` is seen, and the source be read until then.
    """
    if NETWORK == "nvshmem":
        nvshmem_start_put(ctx, window, rank, to_offset, from_offset, num_bytes)
    elif NETWORK == "gin":
        gin_start_put(ctx, window, rank, to_offset, from_offset, num_bytes)
    elif NETWORK == "remote":
        put_remote(ctx, window, rank, to_offset, from_offset, num_bytes)


@device
def raise_remote(ctx, window, rank, offset, value, NETWORK: tl.constexpr):
    """Raises a word of `rank`'s segment, after what this program put there before its last `quiet`.

    One writer per word, whose values arrive in order; those of different words needn't. (NVSHMEM and GIN order it after
    later puts, too; the software network doesn't, on purpose.)
    """
    if NETWORK == "nvshmem":
        nvshmem_raise_remote(ctx, window, rank, offset, value)
    elif NETWORK == "gin":
        gin_raise_remote(ctx, window, rank, offset, value)
    elif NETWORK == "remote":
        raise_by_remote(ctx, window, rank, offset, value)


@device
def quiet(ctx, NETWORK: tl.constexpr):
    """What this program has put is there before any word that it raises from now on, and its sources are free."""
    if NETWORK == "nvshmem":
        nvshmem_quiet()
    elif NETWORK == "gin":
        gin_quiet(ctx)
    elif NETWORK == "remote":
        order_remote(ctx)


@device
def raise_word(ctx, window, base, rank, offset, value, NETWORK: tl.constexpr):
    """Raises a word of `rank`'s part of a segment, at `base`, after every earlier store of this program's threads."""
    if NETWORK == "none":
        store_release(base + offset, value)
    else:
        if base != 0:
            store_release(base + offset, value)
        else:
            raise_remote(ctx, window, rank, offset, value, NETWORK)
