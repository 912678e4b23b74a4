"""The network of CPU ranks by UCX: a thread per rank puts what kernels write down straight into peers' segments.

What a rank's part of a segment holds is read and written by adapters, or by UCX for peers, so it stays mapped until all
ranks have freed theirs and what they put before has arrived. They tell each other whenever a segment is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from epcomm.device.cpu import network
from epcomm.device.cpu import ucx_engine as layout
from epcomm.errors import EpcommError, PeerLostError, TimeoutError
from epcomm.heap import ucx
from epcomm.heap.choice import Exchange, agreed
from epcomm.heap.outboxes import Outboxes

T = TypeVar("T")

_MOST_SEGMENTS = 1 << 20  # in the life of a communicator; memory of tables is taken as they fill
_LONGEST_END = 5.0  # seconds; a peer that was stopped takes nothing
_GENERATION_SHIFT = 32  # of marks: under the generation, how many were told in it


class UcxProxy:
    """One rank's endpoints at the ranks on other hosts; to the runtime what `proxy.Proxy` is. Collective to make.

    `hosts` are by rank; `settings` are UCX's. Raises UnsupportedError, on all ranks, if one can't reach another.
    """

    transport = "ucx"

    def __init__(
        self, rank: int, hosts: Sequence[int], settings: Mapping[str, str], exchange: Exchange, timeout: float
    ):
        self._exchange, self._timeout = exchange, timeout
        self._freed: deque[int] = deque()  # segments, by this rank since it last told
        self._freed_by: list[set[int]] = [set() for _ in hosts]  # of those that aren't freed by all
        self._generation, self._marks = 0, 0
        worker = self._agree(lambda: ucx.Worker(settings))
        try:
            addresses = dict(enumerate(exchange(worker.address)))
            elsewhere = {peer: addresses[peer] for peer, host in enumerate(hosts) if host != hosts[rank]}
            self._engine = self._agree(lambda: _Engine(worker, rank, elsewhere))
        except BaseException:
            worker.close()
            raise
        self._engine.start()
        self.outboxes = self._engine.outboxes
        self.address = self.outboxes.address
        self._close = weakref.finalize(self, self._engine.close, os.getpid())
        self._close.atexit = False
        self._told = np.zeros(len(hosts), dtype=np.int64)  # by rank: its last mark
        try:
            self._add(self._told.ctypes.data, self._told.nbytes, self._told)  # segment 0, as the engine knows
            self._agree(lambda: self._settle(timeout))  # that all can be reached
        except BaseException:
            self._close()
            raise

    @property
    def sent_bytes(self) -> int:
        """Bytes of segments that were sent so far."""
        return int(self._engine.peers[:, layout.SENT_BYTES].sum())

    def register(self, segment: Any) -> None:
        """See `proxy.Proxy`. Raises UnsupportedError, on all ranks, if UCX can't map memory."""
        segment.network = self._add(segment.own.address, segment.own.size, segment.own), 0, 0
        weakref.finalize(segment, self._freed.append, segment.network[0]).atexit = False

    def settle(self, generation: int, timeout: float) -> None:
        """See `proxy.Proxy`. Raises `PeerLostError` if a rank can't be reached."""
        self._generation, self._marks = generation, 0
        self._settle(timeout)

    def close(self, is_together: bool = False) -> None:
        """See `proxy.Proxy`."""
        self._close()

    def _agree(self, attempt: Callable[[], T]) -> T:
        return agreed("UCX can't be used", self._exchange, attempt)

    def _add(self, address: int, num_bytes: int, part: Any) -> int:
        """Collective: the number of a segment, of which peers may write to this rank's part from now on."""
        newly = [self._freed.popleft() for _ in range(len(self._freed))]
        memory = self._agree(lambda: self._engine.map(address, num_bytes, part))
        own = pickle.dumps((address, self._engine.key(memory), newly))
        said = [pickle.loads(payload) for payload in self._exchange(own)]
        for freed, (_, _, more) in zip(self._freed_by, said):
            freed.update(more)
        if gone := set.intersection(*self._freed_by):
            self._settle(self._timeout)  # WAR: what comes late would be written to whoever has the memory next
            for number in gone:
                self._engine.remove(number)
            for freed in self._freed_by:
                freed -= gone
        places = [(base, key) for base, key, _ in said]
        return self._agree(lambda: self._engine.add(memory, places))  # a peer that is ahead may write there at once

    def _settle(self, timeout: float) -> None:
        self._marks += 1
        self.outboxes.settle((self._generation << _GENERATION_SHIFT) + self._marks, self._mark_of, timeout)
        self.outboxes.drain(timeout)

    def _mark_of(self, rank: int) -> int:
        if self._engine.is_broken(rank):
            raise PeerLostError(f"rank {rank} can't be reached any more: its process ended, or the way to it", rank)
        return int(self._told[rank])


class _Engine:
    """The thread, and the tables that it reads."""

    def __init__(self, worker: ucx.Worker, rank: int, addresses: Mapping[int, bytes]):
        self._worker, self._ranks = worker, sorted(addresses)
        self.outboxes = Outboxes(addresses)
        self._parts: dict[int, tuple[int, Any]] = {}  # by number: UCX's handle, and what keeps the memory
        self._num_segments = 0
        self._for_words = ucx.RequestParameters()
        self._for_bytes: dict[int, ucx.RequestParameters] = {}  # by number
        self._sources = np.zeros(_MOST_SEGMENTS, dtype=np.int64)
        self._places = np.zeros((len(addresses), _MOST_SEGMENTS, layout.PLACE_WORDS), dtype=np.int64)
        self._sleeper = np.zeros(network.SLEEPER_WORDS, dtype=np.int64)
        self.peers = np.zeros((len(addresses), layout.PEER_WORDS), dtype=np.int64)
        for peer, places, each in zip(self.peers, self._places, self._ranks):
            endpoint = worker.connect(addresses[each], layout.endpoint_failed.address, peer.ctypes.data)
            outbox = self.outboxes.of_rank[each]
            outbox[network.SLEEPER] = self._sleeper.ctypes.data
            peer[[layout.ENDPOINT, layout.OUTBOX, layout.PLACES]] = endpoint, outbox.ctypes.data, places.ctypes.data
        self._words = self._new_words(rank)
        run = layout.load_run_ucx_engine()
        self._thread = threading.Thread(target=run, args=(self._words.ctypes.data,), name="epcomm-ucx", daemon=True)

    def start(self) -> None:
        """Starts the thread: from now on there is something to `close`."""
        self._events = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._sleeper[[network.EVENTS, network.ONE]] = self._events, 1
        self._words[layout.DESCRIPTORS : layout.DESCRIPTORS + 2] = [
            select.POLLIN << 32 | descriptor for descriptor in (self._worker.descriptor, self._events)
        ]
        self._thread.start()

    def _new_words(self, rank: int) -> np.ndarray:
        words = np.zeros(layout.ENGINE_WORDS, dtype=np.int64)
        for name, function in ucx.HOT.items():
            words[getattr(layout, name)] = ucx.address_of(function)
        words[layout.WORKER], words[layout.PARAMETERS] = self._worker.handle, ctypes.addressof(self._for_words)
        words[layout.SOURCES], words[layout.SLEEPER] = self._sources.ctypes.data, self._sleeper.ctypes.data
        words[layout.PEERS], words[layout.NUM_PEERS] = self.peers.ctypes.data, len(self.peers)
        words[layout.MARK_OFFSET] = 8 * rank
        return words

    def is_broken(self, rank: int) -> bool:
        return bool(self.peers[self._ranks.index(rank), layout.IS_BROKEN])

    def map(self, address: int, num_bytes: int, part: Any) -> int:
        """Lets UCX reach memory that `part` keeps, as the next segment."""
        if self._num_segments == _MOST_SEGMENTS:
            raise EpcommError(f"{_MOST_SEGMENTS} segments were made for ranks on several hosts: wanted no more")
        memory = self._worker.map(address, num_bytes)
        self._parts[self._num_segments] = memory, part
        return memory

    def key(self, memory: int) -> bytes:
        return self._worker.key(memory)

    def add(self, memory: int, places: Sequence[tuple[int, bytes]]) -> int:
        """The number of the segment that was mapped last, once it is known where it is at each rank, and the key."""
        number, self._num_segments = self._num_segments, self._num_segments + 1
        self._for_bytes[number] = ucx.RequestParameters.of_memory(memory)
        self._sources[number] = ctypes.addressof(self._for_bytes[number])
        for peer, table, rank in zip(self.peers, self._places, self._ranks):
            address, key = places[rank]
            table[number] = address, self._worker.unpack(int(peer[layout.ENDPOINT]), key)
        return number

    def remove(self, number: int) -> None:
        """Gives back what a segment had, when nothing is on its way from it or to it."""
        self._forget_keys(number)
        memory, _ = self._parts.pop(number)
        self._worker.unmap(memory)
        del self._for_bytes[number]

    def _forget_keys(self, number: int) -> None:
        for table in self._places:
            if key := int(table[number, 1]):
                self._worker.forget(key)
            table[number] = 0

    def close(self, owner: int) -> None:
        """Sends what is written down, then closes the endpoints, in a bounded time."""
        if os.getpid() != owner:
            return  # a fork's child has copies of what its parent uses
        deadline = time.monotonic() + _LONGEST_END
        self.outboxes.stop()
        self._join(_LONGEST_END)
        self._words[layout.GIVES_UP] = 1
        self._join(1.0)
        if self._thread.is_alive():
            return  # in UCX, for whatever reason: all that it may use has to stay
        endpoints = self.peers[:, layout.ENDPOINT].tolist()
        with contextlib.suppress(TimeoutError):
            self._worker.flush(endpoints, max(0.1, deadline - time.monotonic()))
        for number in self._parts:
            self._forget_keys(number)
        with contextlib.suppress(TimeoutError):
            self._worker.disconnect(endpoints, 1.0)
        self._worker.close()
        os.close(self._events)
        self._parts.clear()

    def _join(self, seconds: float) -> None:
        if self._thread is not threading.current_thread():  # garbage is collected anywhere
            self._thread.join(timeout=seconds)
