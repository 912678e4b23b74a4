"""The network of CPU ranks: threads that send what kernels write down for other hosts, and put what arrives in place.

A *frame* is what one rank sends another at a time: a count, an entry per record, then the bytes of all records. They
go by TCP from segment to segment without a copy in between. Records of a rank are sent in the order in which they were
written down, and a word is raised once the bytes before it are in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from epcomm import tcp
from epcomm.device.cpu import network
from epcomm.errors import EpcommError, TimeoutError
from epcomm.hub import Hub

_COUNT = struct.Struct("<q")
_ENTRY_WORDS = 4  # window, offset, number of bytes (or what the record does instead), value
_MOST_RECORDS = 512  # per frame: with their entries they fit into one call of the system (IOV_MAX is 1024)
_LONGEST_JOIN = 5.0  # seconds; a peer that was stopped takes nothing


class NoProxy:
    """What a rank has whose peers are all on its host."""

    address = 0

    def register(self, segment: Any) -> None:
        """See `Proxy`."""

    def settle(self, generation: int, timeout: float) -> None:
        """See `Proxy`."""

    def close(self, is_together: bool = False) -> None:
        """See `Proxy`."""


class Proxy:
    """One rank's connection to the ranks on other hosts; ``address`` is what kernels take (see `device.control`).

    `links` are connected sockets by rank, which it then owns. `meet` returns once all ranks have called it. `on_error`
    is called, from a thread, when a peer sends what can't be. A link that breaks isn't an error here: whoever watches
    the peer knows why.
    """

    def __init__(
        self, links: dict[int, socket.socket], meet: Callable[[], None], on_error: Callable[[int, str], None]
    ):
        self._outbox = np.zeros(network.OUTBOX_WORDS, dtype=np.int64)
        self.address = self._outbox.ctypes.data
        self._segments, self._meet = _Segments(), meet
        self._receiver = _Receiver(links, self._segments, on_error)
        self._ranks = sorted(links)
        self._write_marker = network.load_write_marker()
        network.load_take_records()
        threads = [
            threading.Thread(target=_send_all, args=(self._outbox, dict(links)), name="epcomm-send", daemon=True),
            threading.Thread(target=self._receiver.run, name="epcomm-receive", daemon=True),
        ]
        for thread in threads:
            thread.start()
        self._close = weakref.finalize(self, _close, self._outbox, threads, links)
        self._close.atexit = False

    def register(self, segment: Any) -> None:
        """Collective: lets peers write to this rank's part of a segment while it lives."""
        segment.network = self._segments.add(segment), 0, 0
        self._meet()  # a peer that is ahead may write there at once

    def settle(self, generation: int, timeout: float) -> None:
        """Collective: returns once all that any rank wrote down before has arrived here. Raises `TimeoutError`."""
        deadline, untold = time.monotonic() + timeout, set(self._ranks)
        # WAR: what arrives later would be written over what the next generation puts there
        while late := untold | {rank for rank in self._ranks if self._receiver.markers.get(rank, 0) < generation}:
            untold = {rank for rank in untold if not self._write_marker(self.address, rank, generation)}
            if time.monotonic() > deadline:
                raise TimeoutError(f"what goes to or comes from rank(s) {sorted(late)} did not all arrive in time")
            time.sleep(0.001)

    def close(self, is_together: bool = False) -> None:
        """Sends what is written down, then closes the links. Idempotent.

        `is_together`: all ranks are here, so that what they gave each other can be given back.
        """
        self._close()


def _close(outbox: np.ndarray, threads: list[threading.Thread], links: dict[int, socket.socket]) -> None:
    network.load_stop_outbox()(outbox.ctypes.data)
    sender, receiver = threads
    _join(sender)  # what is written down is sent
    for link in links.values():
        with contextlib.suppress(OSError):  # the peer has closed it
            link.shutdown(socket.SHUT_RDWR)  # ends what a thread still does with it
    _join(receiver)
    for link in links.values():
        link.close()


def _join(thread: threading.Thread) -> None:
    if thread is not threading.current_thread():  # garbage is collected anywhere
        thread.join(timeout=_LONGEST_JOIN)


class _Segments:
    """This rank's parts of the segments that peers write to, by number."""

    def __init__(self) -> None:
        self._parts: list[weakref.ref[Any]] = []

    def add(self, segment: Any) -> int:
        self._parts.append(weakref.ref(segment.own))
        return len(self._parts) - 1

    def part(self, number: int) -> Any:
        """The part, or None if it was freed: what still arrives for it goes nowhere."""
        if not 0 <= number < len(self._parts):
            raise _Invalid(f"segment {number} of {len(self._parts)}")
        return self._parts[number]()


class _Invalid(Exception):
    """What a peer sent can't be."""


# ---- sending


def _send_all(outbox: np.ndarray, links: dict[int, socket.socket]) -> None:
    """A thread's life: takes records and sends them, a frame per peer at a time."""
    take = network.load_take_records()
    batch = np.zeros((_MOST_RECORDS, network.RECORD_WORDS), dtype=np.int64)
    first = 0
    while count := take(outbox.ctypes.data, first, batch.ctypes.data, _MOST_RECORDS):
        first += count
        frames: dict[int, list[Sequence[int]]] = {}
        for record in batch[:count].tolist():
            if record[network.NUM_BYTES] != network.NOTHING:
                frames.setdefault(record[network.RANK], []).append(record)
        for rank, records in frames.items():
            link = links.get(rank)
            if link is not None:
                try:
                    _send_buffers(link, list(_frame(records)))
                except OSError:
                    del links[rank]  # the rank is gone, or this end was closed


def _frame(records: Sequence[Sequence[int]]) -> Iterator[Any]:
    """The buffers of a frame."""
    yield _COUNT.pack(len(records)) + b"".join(
        struct.pack("<4q", record[network.WINDOW], record[network.OFFSET], num_bytes, 0 if num_bytes >= 0 else source)
        for record in records
        for num_bytes, source in [record[network.NUM_BYTES :][:2]]
    )
    for record in records:
        num_bytes, source = record[network.NUM_BYTES], record[network.SOURCE]
        if num_bytes > 0:
            yield (ctypes.c_uint8 * num_bytes).from_address(source)


def _send_buffers(link: socket.socket, buffers: list[Any]) -> None:
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    while left:
        _drop(left, link.sendmsg(left))


def _drop(buffers: list[memoryview], num_bytes: int) -> None:
    """Takes what was transferred from the front of buffers."""
    while buffers and num_bytes >= len(buffers[0]):
        num_bytes -= len(buffers.pop(0))
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]


# ---- receiving


class _Receiver:
    """The thread that puts what arrives in place."""

    def __init__(
        self, links: dict[int, socket.socket], segments: _Segments, on_error: Callable[[int, str], None]
    ):
        self._links, self._segments, self._on_error = dict(links), segments, on_error
        self._raise_words = network.load_raise_words()
        self._pairs = np.zeros((_MOST_RECORDS, 2), dtype=np.int64)
        self._nowhere = bytearray()
        self.markers: dict[int, int] = {}

    def run(self) -> None:
        poller = select.poll()
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLIN)
        while ranks:
            for descriptor, _ in poller.poll():
                rank = ranks[descriptor]
                try:
                    is_open = self._receive(rank, self._links[rank])
                except OSError:
                    is_open = False
                except _Invalid as error:
                    self._on_error(rank, str(error))
                    is_open = False
                if not is_open:
                    poller.unregister(descriptor)
                    del ranks[descriptor]

    def _receive(self, rank: int, link: socket.socket) -> bool:
        """Takes a frame; False if the peer has closed the link."""
        header = bytearray(_COUNT.size)
        if not _fill(link, [memoryview(header)]):
            return False
        count = _COUNT.unpack(header)[0]
        if not 0 < count <= _MOST_RECORDS:
            raise _Invalid(f"a frame of {count} records")
        table = np.empty((count, _ENTRY_WORDS), dtype=np.int64)
        if not _fill(link, [memoryview(table.data).cast("B")]):
            return False
        entries = table.tolist()
        parts = {number: self._segments.part(number) for number in {entry[0] for entry in entries}}
        steps: list[tuple[list[memoryview], list[tuple[int, int]]]] = [([], [])]  # bytes, then words behind them
        marker = self.markers.get(rank, 0)
        for number, offset, num_bytes, value in entries:
            part = parts[number]
            if num_bytes == network.MARKS:
                marker = value
                continue
            length = 8 if num_bytes == network.RAISES else num_bytes
            if length < 0 or not (part is None or 0 <= offset <= part.size - length):
                raise _Invalid(f"{num_bytes} bytes at {offset} of segment {number}")
            if num_bytes != network.RAISES:
                if steps[-1][1]:
                    steps.append(([], []))
                steps[-1][0].append(self._place(part, offset, num_bytes))
            elif part is not None:
                steps[-1][1].append((part.address + offset, value))
        for buffers, words in steps:
            if not _fill(link, buffers):
                return False
            if words:
                self._pairs[: len(words)] = words
                self._raise_words(self._pairs.ctypes.data, len(words))
        self.markers[rank] = marker
        return True

    def _place(self, part: Any, offset: int, num_bytes: int) -> memoryview:
        if part is None:
            if len(self._nowhere) < num_bytes:
                self._nowhere = bytearray(num_bytes)
            return memoryview(self._nowhere)[:num_bytes]
        return memoryview((ctypes.c_uint8 * num_bytes).from_address(part.address + offset)).cast("B")


def _fill(link: socket.socket, buffers: list[memoryview]) -> bool:
    """Receives as many bytes as the buffers have; False if the peer closes the link before."""
    while buffers:
        num_bytes = link.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]  # woken once, not for each packet
        if num_bytes == 0:
            return False
        _drop(buffers, num_bytes)
    return True


# ---- connecting

_PAYLOAD = 0  # purpose of a connection


def connect_proxy(
    hub: Hub, timeout: float, check: Callable[[], None], fail: weakref.ref[Callable[[EpcommError], Any]]
) -> Proxy | NoProxy:
    """Collective: the way to ranks on other hosts; `fail` is called if what they send can't be.

    Raises `TimeoutError` if one doesn't come, or what `check` raises.
    """

    def meet() -> None:
        hub.barrier(timeout=timeout, check=_nothing)

    def on_error(rank: int, text: str) -> None:
        tell = fail()
        if tell is not None:
            tell(EpcommError(f"rank {hub.rank}: rank {rank}, on another host, sent {text}"))

    return NoProxy() if len(hub.leaders) == 1 else Proxy(_connect(hub, timeout, check), meet, on_error)


def _nothing() -> None:
    return None


def _connect(hub: Hub, timeout: float, check: Callable[[], None]) -> dict[int, socket.socket]:
    """A connected socket by rank to each that is on another host. The lower of two ranks listens."""
    deadline = time.monotonic() + timeout
    elsewhere = [rank for rank in range(hub.size) if hub.nodes[rank] != hub.nodes[hub.rank]]
    listener = tcp.Listener(hub.rank)
    with contextlib.closing(listener):
        listener.listen(hub.size)
        own = listener.endpoint([])
        messages = hub.allgather(f"{own.port} {own.token}".encode(), timeout=timeout, check=check)
        links: dict[int, socket.socket] = {}
        try:
            for rank in elsewhere:
                if rank < hub.rank:
                    port, token = messages[rank][0].decode().split()
                    endpoint = tcp.Endpoint(rank, [hub.addresses[rank]], int(port), token)
                    links[rank] = tcp.dial(endpoint, _PAYLOAD, hub.rank, deadline, check)
            wanted = {(_PAYLOAD, rank): rank for rank in elsewhere if rank > hub.rank}
            links |= {wanted[key]: link for key, link in listener.accept(wanted, deadline, check).items()}
        except BaseException:
            for link in links.values():
                link.close()
            raise
    return links
