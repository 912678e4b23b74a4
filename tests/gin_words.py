"""Raises words by GIN's device function, interpreted, and adds up what it adds. A script: Triton is an interpreter."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import triton.language as tl

from epcomm.device import control
from epcomm.device.gpu import gin
from epcomm.device.gpu.compile import kernel, one
from epcomm.device.gpu.network import raise_remote

SIZE, LINES, HANDLE, COMMUNICATOR, NUM_CONTEXTS = 3, 5, 4711, 128, 4
added: Counter[tuple[int, int]] = Counter()


def number(value: Any) -> int:
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


def add(communicator: Any, context: Any, rank: Any, handle: Any, offset: Any, amount: Any) -> None:
    """NCCL's signal: the word of that rank's window becomes larger."""
    assert number(handle) == HANDLE and number(context) == number(rank) % NUM_CONTEXTS
    assert number(amount) > 0
    added[number(rank), number(offset)] += number(amount)


@kernel("raise_words", programs=one)
def raise_words(ctx, window, rank, offset, value, NETWORK: tl.constexpr):
    raise_remote(tl.cast(ctx, tl.int64), tl.cast(window, tl.int64), rank, offset, value, NETWORK)


def main() -> None:
    gin._add = add
    communicator = np.array([NUM_CONTEXTS, *[0] * 16], np.int64)  # what `gin` reads lies `PREFIX` bytes before
    raised = np.zeros((SIZE, LINES), np.int64)
    window = np.array([0] * SIZE + [HANDLE, raised.ctypes.data, LINES], np.int64)
    ctx = np.zeros(control.CONTEXT_WORDS, np.int64)
    ctx[control.SIZE], ctx[control.NETWORK] = SIZE, communicator.ctypes.data + gin.PREFIX.value
    wanted: dict[tuple[int, int], int] = {}
    generator = np.random.default_rng(3)
    for step in range(1, 60):
        rank, line = int(generator.integers(SIZE)), int(generator.integers(LINES))
        value = (1 + step // 30 << control.GENERATION_SHIFT) + step  # a reset comes in between
        raise_words.function[(1,)](ctx.ctypes.data, window.ctypes.data, rank, line * control.LINE, value, NETWORK="gin")
        wanted[rank, line * control.LINE] = value
        assert dict(added) == wanted, (step, added)
    assert len(wanted) == SIZE * LINES
    print("ok")


if __name__ == "__main__":
    main()
