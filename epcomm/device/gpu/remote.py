"""The network of interpreted ranks: a thread puts bytes and raises words in peers' memory, late and out of order.

It stands for any network that kernels know: it promises no more than `network` says. Each put and each word has a delay
of its own. A word waits for what was put, to whomever, before the last `quiet`; words at one place keep their order.
Puts are read when they arrive. The interpreter is slow: so that whoever reads too early does so before the bytes come,
half of the puts are held back until the next `quiet`, or for `_HELD`. The ranks are processes of one machine; which of
them are reached by it alone is said.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import random
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.network import load_store_word
from epcomm.device.gpu.machine import INTERPRETED
from epcomm.errors import TimeoutError

# seconds
_LONGEST_DELAY, _HELD = 0.003, 0.3


class RemoteNetwork:
    """One rank's way to the ranks of other nodes; ``address`` is what kernels have in their context."""

    def __init__(self, rank: int, nodes: Sequence[int], longest_delay: float = _LONGEST_DELAY):
        self.rank, self.nodes, self.address = rank, list(nodes), next(_addresses)
        self._longest, self._random = longest_delay, random.Random(rank)
        self._segments: list[weakref.ref[Any]] = []
        self._word_bytes: list[int] = []
        self._deliveries: list[tuple[float, int, Any]] = []  # (when, number, what), a heap
        self._count = self._delivered = 0
        self._unordered: list[Any] = []  # what was put since the last quiet
        self._ordered = 0.0  # when all that was put before has arrived
        self._raised: dict[tuple[int, int, int], float] = {}  # when the last word for a place arrives
        self._changed = threading.Condition()
        self._is_closed = False
        self._store_word = load_store_word()
        _networks[self.address] = self
        threading.Thread(target=self._deliver_all, name="epcomm-remote", daemon=True).start()

    def register(self, segment: Any) -> None:
        """See `proxy.Proxy`. What kernels write to was added when it was made."""

    def add(self, segment: Any, word_bytes: int) -> None:
        """Hides other nodes' parts of a segment from kernels: they are reached by this network.

        Words are raised in the first `word_bytes` only, a line each: a network that can only add keeps count of those.
        """
        self._segments.append(weakref.ref(segment))
        self._word_bytes.append(word_bytes)
        segment.network = len(self._segments) - 1, 0, 0
        is_near = np.array([node == self.nodes[self.rank] for node in self.nodes])
        segment.bases = np.where(is_near, segment.bases, 0)

    def settle(self, generation: int, timeout: float) -> None:
        """Returns once all that this rank has sent before has arrived. Raises `TimeoutError`."""
        with self._changed:
            wanted = self._count
            if not self._changed.wait_for(lambda: self._delivered >= wanted, timeout):
                raise TimeoutError(f"rank {self.rank}: what it sent to other nodes did not all arrive in time")

    def close(self, is_together: bool = False) -> None:
        """Delivers what is left, then ends the thread. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ---- what kernels call

    def put(self, window: int, rank: int, to_offset: int, from_offset: int, num_bytes: int) -> None:
        segment = self._segments[window]()
        if segment is not None and num_bytes > 0:
            put = ["put", segment.mappings[rank], to_offset, segment.own, from_offset, num_bytes]
            self._unordered.append(put)
            self._count += 1
            self._add(self._soon() + self._random.choice((0.0, _HELD)), put)

    def raise_word(self, window: int, rank: int, offset: int, value: int) -> None:
        segment, place = self._segments[window](), (window, rank, offset)
        if offset % control.LINE or offset >= self._word_bytes[window]:
            raise ValueError(f"a word at {offset}: wanted the start of a line below {self._word_bytes[window]}")
        if segment is not None:
            arrives = max(self._soon(), self._ordered, self._raised.get(place, 0.0))
            self._raised[place] = arrives
            self._count += 1
            self._add(arrives, ["raise", segment.mappings[rank], offset, value])

    def quiet(self) -> None:
        for put in self._unordered:
            arrives = self._soon()
            self._ordered = max(self._ordered, arrives)
            self._add(arrives, put)  # once more, if it is held: what has arrived is empty
        self._unordered.clear()

    # ---- the thread

    def _soon(self) -> float:
        return time.monotonic() + self._random.random() * self._longest

    def _add(self, arrives: float, what: list[Any]) -> None:
        with self._changed:
            heapq.heappush(self._deliveries, (arrives, next(_numbers), what))  # equal times: by their numbers
            self._changed.notify_all()

    def _deliver_all(self) -> None:
        with self._changed:
            while self._deliveries or not self._is_closed:
                wait = self._deliveries[0][0] - time.monotonic() if self._deliveries else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                else:
                    what = heapq.heappop(self._deliveries)[2]
                    if what:
                        self._deliver(what)
                        what.clear()
                        self._delivered += 1
                        self._changed.notify_all()

    def _deliver(self, what: list[Any]) -> None:
        if what[0] == "put":
            _, mapping, to_offset, own, from_offset, num_bytes = what
            _require_inside(mapping, to_offset, num_bytes)
            _require_inside(own, from_offset, num_bytes)
            ctypes.memmove(mapping.address + to_offset, own.address + from_offset, num_bytes)
        else:
            _, mapping, offset, value = what
            _require_inside(mapping, offset, 8)
            self._store_word(mapping.address + offset, value)


def _require_inside(mapping: Any, offset: int, num_bytes: int) -> None:
    if not 0 <= offset <= mapping.size - num_bytes:
        raise ValueError(f"{num_bytes} bytes at {offset} of a segment of {mapping.size}")


_addresses, _numbers = itertools.count(1), itertools.count(1)
_networks: weakref.WeakValueDictionary[int, RemoteNetwork] = weakref.WeakValueDictionary()


if INTERPRETED:
    from epcomm.device.gpu.memory import word

    def _number(value: Any) -> int:
        """A kernel's number as Python's."""
        return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)

    def _found(ctx: Any, window: Any) -> tuple[RemoteNetwork, int]:
        """The network of a context, and what it calls a segment."""
        handle = word(window, word(ctx, control.SIZE) + control.WINDOW_HANDLE)
        return _networks[_number(word(ctx, control.NETWORK))], _number(handle)

    def put_remote(ctx: Any, window: Any, *numbers: Any) -> None:
        """`network.start_put`."""
        network, handle = _found(ctx, window)
        network.put(handle, *map(_number, numbers))

    def raise_by_remote(ctx: Any, window: Any, *numbers: Any) -> None:
        """`network.raise_remote`."""
        network, handle = _found(ctx, window)
        network.raise_word(handle, *map(_number, numbers))

    def order_remote(ctx: Any) -> None:
        """`network.quiet`."""
        _networks[_number(word(ctx, control.NETWORK))].quiet()

else:
    import triton
    import triton.language as tl

    @triton.jit
    def put_remote(ctx, window, rank, to_offset, from_offset, num_bytes):
        """There is none in compiled code."""
        tl.static_assert(False, "this network is of interpreted kernels only")

    @triton.jit
    def raise_by_remote(ctx, window, rank, offset, value):
        """There is none in compiled code."""
        tl.static_assert(False, "this network is of interpreted kernels only")

    @triton.jit
    def order_remote(ctx):
        """There is none in compiled code."""
        tl.static_assert(False, "this network is of interpreted kernels only")
