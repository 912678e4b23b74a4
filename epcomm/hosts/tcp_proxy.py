"""The network of CPU ranks: what kernels write down for other hosts is sent, and what arrives is put in place.

Each pair of ranks of different hosts has a connection, with a thread that sends and one that receives (compiled, see
`device.cpu.link`): no peer waits for another one's bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from epcomm.device.cpu import link as layout
from epcomm.device.cpu import network
from epcomm.errors import EpcommError
from epcomm.heap.outboxes import Outboxes
from epcomm.world import tcp
from epcomm.world.hub import Hub

_MOST_SEGMENTS = 1 << 20  # in the life of a communicator; memory of the table is taken as it fills
_LONGEST_JOIN = 5.0  # seconds; a peer that was stopped takes nothing
#: what sending ends with when the peer has gone, or this end was closed
_GONE = {0, errno.EPIPE, errno.ECONNRESET, errno.ECONNABORTED, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class NoProxy:
    """What a rank has whose peers are all on its host."""

    transport = ""  # the target knows what it is
    address = 0

    def register(self, segment: Any) -> None:
        """See `Proxy`."""

    def settle(self, generation: int, timeout: float) -> None:
        """See `Proxy`."""

    def close(self, is_together: bool = False) -> None:
        """See `Proxy`."""


class Proxy:
    """One rank's connections to the ranks on other hosts; ``address`` is what kernels take: of outboxes, by rank.

    `sockets` are connected, by rank; it then owns them. `meet` returns once all ranks have called it. `on_error` is
    called, from a thread, when a peer sends what can't be, or can't be sent something. A peer that is gone isn't an
    error here: whoever watches it knows why.
    """

    transport = "tcp"

    def __init__(
        self, sockets: dict[int, socket.socket], meet: Callable[[], None], on_error: Callable[[int, str], None]
    ):
        self._segments, self._meet = _Segments(), meet
        self.outboxes = Outboxes(sockets)
        self.address = self.outboxes.address
        self._links = {
            rank: _Link(rank, sockets[rank], outbox, self._segments, on_error)
            for rank, outbox in self.outboxes.of_rank.items()
        }
        self._segments.links = list(self._links.values())
        self._close = weakref.finalize(self, _close, self.outboxes, self._segments.links)
        self._close.atexit = False

    @property
    def sent_bytes(self) -> int:
        """Bytes of segments that were sent so far."""
        return sum(int(link.words[layout.SENT_BYTES]) for link in self._links.values())

    def register(self, segment: Any) -> None:
        """Collective: lets peers write to this rank's part of a segment while `segment` lives."""
        segment.network = self._segments.add(segment), 0, 0
        self._meet()  # a peer that is ahead may write there at once

    def settle(self, generation: int, timeout: float) -> None:
        """Collective: returns once all that any rank wrote down before has arrived here. Raises `TimeoutError`."""
        # WAR: what arrives later would be written over what the next generation puts there
        self.outboxes.settle(generation, lambda rank: int(self._links[rank].words[layout.MARKER]), timeout)

    def close(self, is_together: bool = False) -> None:
        """Sends what is written down, then closes the links. Idempotent.

        `is_together`: all ranks are here, so that what they gave each other can be given back.
        """
        self._close()


class _Link:
    """A connection, its outbox and its threads."""

    def __init__(
        self,
        rank: int,
        connection: socket.socket,
        outbox: np.ndarray,
        segments: _Segments,
        on_error: Callable[[int, str], None],
    ):
        self.rank, self.socket, self._on_error = rank, connection, on_error
        self.outbox, self._segments = outbox, segments
        self.words = np.zeros(layout.LINK_WORDS, dtype=np.int64)
        self.words[[layout.SOCKET, layout.OUTBOX, layout.SEGMENTS]] = (
            connection.fileno(), outbox.ctypes.data, segments.table.ctypes.data
        )  # fmt: skip
        self._send_records, self._receive_records = layout.load_send_records(), layout.load_receive_records()
        self.sender = threading.Thread(target=self._send, name=f"epcomm-send-{rank}", daemon=True)
        self.receiver = threading.Thread(target=self._receive, name=f"epcomm-receive-{rank}", daemon=True)
        self.sender.start()
        self.receiver.start()

    def _send(self) -> None:
        error = self._send_records(self.words.ctypes.data)
        if error not in _GONE:
            self._on_error(self.rank, f"can't be sent anything: {os.strerror(error)}")
        if error:
            self._send_records(self.words.ctypes.data)  # drops the rest

    def _receive(self) -> None:
        if self._receive_records(self.words.ctypes.data) == layout.GOT_INVALID:
            number, offset, num_bytes, _ = self.words[layout.HEADER : layout.HEADER + 4].tolist()
            self._on_error(self.rank, f"sent {num_bytes} bytes at {offset} of segment {number}")


def _close(outboxes: Outboxes, links: list[_Link]) -> None:
    deadline = time.monotonic() + _LONGEST_JOIN
    outboxes.stop()
    for link in links:
        _join(link.sender, deadline)  # what is written down is sent
    for link in links:
        with contextlib.suppress(OSError):  # the peer has closed it
            link.socket.shutdown(socket.SHUT_RDWR)  # ends what a thread still does with it
    deadline = time.monotonic() + _LONGEST_JOIN
    for link in links:
        _join(link.sender, deadline)
        _join(link.receiver, deadline)
        if not (link.sender.is_alive() or link.receiver.is_alive()):  # else the number must not be another socket's
            link.socket.close()


def _join(thread: threading.Thread, deadline: float) -> None:
    if thread is not threading.current_thread():  # garbage is collected anywhere
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


class _Segments:
    """This rank's parts of the segments that peers write to, by number."""

    def __init__(self) -> None:
        self.table = np.zeros(layout.SEGMENT + layout.SEGMENT_WORDS * _MOST_SEGMENTS, dtype=np.int64)
        self.links: list[_Link] = []
        self._parts: dict[int, Any] = {}  # they keep their memory
        self._freed: dict[int, list[int]] = {}  # of those: how many records each link had then

    def add(self, segment: Any) -> int:
        """The number of a segment, the same on all ranks; links write to its memory until it is garbage."""
        number = int(self.table[layout.NUM_SEGMENTS])
        if number == _MOST_SEGMENTS:
            raise EpcommError(f"{number} segments were made for ranks on several hosts: wanted no more")
        place = layout.SEGMENT + layout.SEGMENT_WORDS * number
        self.table[place : place + layout.SEGMENT_WORDS] = segment.own.address, segment.own.size
        self.table[layout.NUM_SEGMENTS] = number + 1
        self._parts[number] = segment.own
        weakref.finalize(segment, self._free, number).atexit = False
        self._drop_freed()
        return number

    def _free(self, number: int) -> None:
        layout.load_free_segment()(self.table.ctypes.data, number)
        self._freed[number] = [int(link.outbox[network.WRITTEN]) for link in self.links]
        self._drop_freed()

    def _drop_freed(self) -> None:
        """Lets go of freed parts that no link writes to any more, and that nothing is left to be sent from."""
        written_to = {int(link.words[layout.WRITES]) - 1 for link in self.links}
        sent = [int(link.words[layout.SENT]) for link in self.links]
        for number, counts in list(self._freed.items()):
            if number not in written_to and all(done >= count for done, count in zip(sent, counts)):
                self._freed.pop(number, None)
                self._parts.pop(number, None)


# ---- connecting

_PAYLOAD = 0  # purpose of a connection


def connect_tcp(
    hub: Hub, timeout: float, check: Callable[[], None], fail: weakref.ref[Callable[[EpcommError], Any]]
) -> Proxy:
    """Collective: the way to ranks on other hosts by TCP; `fail` is called if what they send can't be.

    Raises `TimeoutError` if one doesn't come, or what `check` raises.
    """

    def meet() -> None:
        hub.barrier(timeout=timeout, check=_nothing)

    def on_error(rank: int, text: str) -> None:
        tell = fail()
        if tell is not None:
            tell(EpcommError(f"rank {hub.rank}: rank {rank}, on another host, {text}"))

    return Proxy(_connect(hub, timeout, check), meet, on_error)


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
