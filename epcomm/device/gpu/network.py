"""Ranks that load and store don't reach: their base address in a window is 0, and a network puts bytes there.

NETWORK names it when a kernel is compiled: "none" (all ranks are reached, and nothing here is in the code), or "remote"
(see `remote`). Offsets are in one symmetric segment, of this rank and of the other one. A put may be read from here and
arrive there at any time until a word that this program raised after a `quiet` is seen there.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import store_release
from epcomm.device.gpu.remote import order_remote, put_remote, raise_by_remote


@device
def start_put(ctx, window, rank, to_offset, from_offset, num_bytes, NETWORK: tl.constexpr):
    """Starts to copy bytes of this rank's part of a segment to `rank`'s."""
    if NETWORK == "remote":
        put_remote(ctx, window, rank, to_offset, from_offset, num_bytes)


@device
def raise_remote(ctx, window, rank, offset, value, NETWORK: tl.constexpr):
    """Raises a word of `rank`'s part of a segment, after what this program put there before its last `quiet`."""
    if NETWORK == "remote":
        raise_by_remote(ctx, window, rank, offset, value)


@device
def quiet(ctx, NETWORK: tl.constexpr):
    """What this program has put is where it belongs before any word that it raises from now on."""
    if NETWORK == "remote":
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
