"""Links: connections between hosts that carry no payload, but failures, texts of operations and goodbyes.

Each rank has one to the leader of each other host. The leader's end raises the abort words of its host for a rank that
fails elsewhere, or whose link ends without a goodbye: its process has ended. The process's monitor thread reads links.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from epcomm.world import monitor

_FRAME = struct.Struct("<qqqqq")  # kind, then what `_Link.send` says
_NOTICE, _ASK, _ANSWER, _GOODBYE = range(4)
_READ_BYTES = 1 << 16


class Listener(Protocol):
    """What a rank does with what it hears from other hosts."""

    def lost(self, rank: int) -> None:
        """A rank of another host, which a leader hears of for its host, or the leader of another host, is gone."""

    def failed(self, rank: int, generation: int, reason: int, text: bytes) -> None:
        """A rank of another host failed; only a leader is told, for its host."""

    def text_of(self, rank: int, fingerprint: int) -> str | None:
        """The text of an operation that a rank of this leader's host is in."""


@dataclass
class _Link:
    """One end of a connection; `rank` is at the other."""

    rank: int
    connection: socket.socket
    received: bytearray = field(default_factory=bytearray)

    def send(self, kind: int, number: int = 0, reason: int = 0, rank: int = 0, text: bytes = b"") -> None:
        """Sends a frame (number: generation or fingerprint). Never waits: a peer that reads nothing isn't told.

        A frame is one call, which the kernel doesn't mix with another thread's.
        """
        with contextlib.suppress(OSError):  # gone: whoever reads this end finds out
            self.connection.send(_FRAME.pack(kind, number, reason, rank, len(text)) + text, socket.MSG_DONTWAIT)

    def receive(self) -> bool:
        """Takes what has come; False once the other end is gone."""
        try:
            chunk = self.connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += chunk
        return bool(chunk)

    def next_frame(self) -> tuple[int, int, int, int, bytes] | None:
        """(kind, number, reason, rank, text), once it is complete."""
        if len(self.received) < _FRAME.size:
            return None
        *numbers, length = _FRAME.unpack_from(self.received)
        end = _FRAME.size + length
        if len(self.received) < end:
            return None
        text = bytes(self.received[_FRAME.size : end])
        del self.received[:end]
        kind, number, reason, rank = numbers
        return kind, number, reason, rank, text


class Links:
    """The links of one rank: `up` to the leaders of other hosts; on a leader also `down`, from the ranks elsewhere."""

    def __init__(self, up: Mapping[int, socket.socket], down: Mapping[int, socket.socket]):
        self._up = {rank: _Link(rank, connection) for rank, connection in up.items()}
        self._all = [*self._up.values(), *(_Link(rank, connection) for rank, connection in down.items())]
        self._answers: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._is_closed = False

    def listen(self, listener: Listener) -> None:
        """From now on tells `listener`, from the monitor's thread."""
        for link in self._all:
            monitor.watch(link.connection.fileno(), partial(self._read, link, listener))

    def tell_failure(self, generation: int, reason: int, text: bytes) -> None:
        """Tells all other hosts that this rank has failed."""
        for link in self._up.values():
            link.send(_NOTICE, generation, reason, text=text)

    def ask_text(self, leader: int, rank: int, fingerprint: int, seconds: float) -> str | None:
        """The text of an operation that `rank` is in, whose host has that leader; None if it isn't known there."""
        while not self._answers.empty():  # of an earlier question, that came too late
            self._answers.get()
        self._up[leader].send(_ASK, fingerprint, rank=rank)
        try:
            number, text = self._answers.get(timeout=seconds)
        except queue.Empty:
            return None
        return text.decode(errors="replace") if text and number == fingerprint else None

    def leave(self) -> None:
        """Says goodbye, so that nobody takes the end of the links for that of this process, and closes them."""
        if not self._is_closed:
            for link in self._all:
                link.send(_GOODBYE)
        self.close()

    def close(self) -> None:
        """Closes this process's ends."""
        if not self._is_closed:
            self._is_closed = True
            monitor.forget([link.connection.fileno() for link in self._all])
            for link in self._all:
                link.connection.close()

    def _read(self, link: _Link, listener: Listener) -> bool:
        """Handles what has come on a link; False if nothing more will."""
        is_alive = link.receive()
        while (frame := link.next_frame()) is not None:
            kind, number, reason, rank, text = frame
            if kind == _GOODBYE:
                return False
            if kind == _NOTICE:
                listener.failed(link.rank, number, reason, text)
            elif kind == _ASK:
                link.send(_ANSWER, number, text=(listener.text_of(rank, number) or "").encode())
            elif kind == _ANSWER:
                self._answers.put((number, text))
        if not is_alive and not self._is_closed:
            listener.lost(link.rank)
        return is_alive
