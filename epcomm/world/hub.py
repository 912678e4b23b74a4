"""All-gather of bytes and file descriptors over sockets, outside of the kernels: every rank to one root, and back.

All that follows a rendezvous, descriptors of shared memory included, travels through the hub, so a communicator
outlives the group or store that introduced its ranks.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from epcomm.errors import PeerLostError, TimeoutError
from epcomm.world.links import Links

_POLL_MS = 20
_HEADER = struct.Struct("<qiiq")  # payload bytes, descriptors, rank that was lost (-1: none), generation
_WHOLE = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
Message = tuple[bytes, list[int]]
Check = Callable[[], None]


def _receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes. One call may return fewer: if the process is stopped in it and goes on."""
    received = bytearray()
    while len(received) < num_bytes:
        chunk = connection.recv(num_bytes - len(received), socket.MSG_WAITALL)
        if not chunk:
            raise ConnectionResetError("the connection ended within a message")
        received += chunk
    return bytes(received)


def _close_all(messages: Iterable[Message]) -> None:
    for _, descriptors in messages:
        for descriptor in descriptors:
            os.close(descriptor)


class Hub:
    """The ranks of one machine. Descriptors are passed if `connections`, by rank, are Unix sockets.

    `members` are the ranks that are connected, the root first; the root has a connection to each other one, they have
    one to the root. Attributes that tell one machine from several: ``nodes``, the node of each rank, numbered by first
    appearance; ``leaders``, the lowest rank of each node; ``addresses``, by rank, an address at which its host can be
    reached from here; ``links``.
    """

    def __init__(self, rank: int, members: Sequence[int], connections: Mapping[int, socket.socket]):
        self.rank, self.size = rank, len(members)
        self.nodes, self.leaders, self.addresses = [0] * self.size, [members[0]], ["127.0.0.1"] * self.size
        self.links = Links({}, {})
        self.generation = 2  # twice the runtime's, odd in a reset: tells exchanges apart that a failure cut short
        self._members, self._root = members, members[0]
        self._connections = dict(connections)
        self._early: dict[int, tuple[int, Message]] = {}  # from ranks that have reset already
        self._first_lost: int | None = None  # those that leave because of it must not be taken for the cause

    def allgather(
        self, payload: bytes, descriptors: Sequence[int] = (), *, timeout: float, check: Check
    ) -> list[Message]:
        """Everyone's payload and (duplicated) descriptors, by rank. `check` is called while waiting and may raise.

        Raises `PeerLostError` if a rank's end is closed, `TimeoutError` at the deadline.
        """
        if self._first_lost is not None:
            raise self._lost(self._first_lost)
        deadline = time.monotonic() + timeout
        messages: list[Message] = []
        try:
            if self.rank != self._root:  # the root passes on what comes from all ranks, this one included
                with contextlib.suppress(PeerLostError):  # what the root sent last says who was lost
                    self._send(self._root, payload, descriptors)
                while len(messages) < self.size:
                    messages += self._receive([self._root], deadline, check)
                return messages
            messages.append((payload, [os.dup(descriptor) for descriptor in descriptors]))
            messages += self._receive(self._members[1:], deadline, check)
            messages = self._with_other_hosts(messages, deadline, check)
            for rank in self._members[1:]:
                for message, received in messages:
                    self._send(rank, message, received)
            return messages
        except BaseException as error:
            _close_all(messages)
            if isinstance(error, PeerLostError):
                self._first_lost = error.rank
                if self.rank == self._root:
                    self.tell_lost(error.rank)
            raise

    def barrier(self, *, timeout: float, check: Check) -> None:
        """Returns once every rank has come."""
        _close_all(self.allgather(b"", timeout=timeout, check=check))

    def tell_lost(self, lost: int) -> None:
        """Tells those at the other ends that they wait in vain."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # that rank is lost as well
                connection.sendall(_HEADER.pack(0, 0, lost, self.generation))

    def close(self) -> None:
        self.links.close()
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def _with_other_hosts(self, messages: list[Message], deadline: float, check: Check) -> list[Message]:
        """The messages of all ranks of the communicator; called on the root with those of the members."""
        return messages

    def _lost(self, rank: int) -> PeerLostError:
        return PeerLostError(f"rank {self.rank}: rank {rank} closed its connection: its process ended or closed", rank)

    def _send(self, rank: int, payload: bytes, descriptors: Sequence[int]) -> None:
        try:
            connection = self._connections[rank]
            header = _HEADER.pack(len(payload), len(descriptors), -1, self.generation)
            socket.send_fds(connection, [header], list(descriptors))
            if payload:  # a peer that has all it waits for may already have closed
                connection.sendall(payload)
        except (OSError, KeyError):
            raise self._lost(rank) from None

    def _receive(self, ranks: Sequence[int], deadline: float, check: Check) -> list[Message]:
        """One message of this generation from each of `ranks`, in their order."""
        messages: dict[int, Message] = {}
        try:
            for rank in ranks:
                if rank in self._early and self._early[rank][0] == self.generation:
                    messages[rank] = self._early.pop(rank)[1]
            while missing := [rank for rank in ranks if rank not in messages]:
                ready = self._readable([rank for rank in missing if rank not in self._early])
                for rank in ready:
                    generation, message = self._read(rank)
                    if generation == self.generation:
                        messages[rank] = message
                    elif generation > self.generation:
                        self._early[rank] = generation, message
                    else:
                        _close_all([message])
                if not ready:
                    check()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"rank {self.rank}: rank(s) {missing} did not come to the exchange in time")
        except BaseException:
            _close_all(messages.values())
            raise
        return [messages[rank] for rank in ranks]

    def _readable(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that have sent something or are gone; waits a moment if none has."""
        poller = select.poll()
        try:
            by_descriptor = {self._connections[rank].fileno(): rank for rank in ranks}
        except KeyError as error:  # closed
            raise self._lost(error.args[0]) from None
        for descriptor in by_descriptor:
            poller.register(descriptor, select.POLLIN)
        return [by_descriptor[descriptor] for descriptor, _ in poller.poll(_POLL_MS)]

    def _read(self, rank: int) -> tuple[int, Message]:
        """One message and its generation."""
        connection = self._connections[rank]
        try:
            header, ancillary, _, _ = connection.recvmsg(_HEADER.size, socket.CMSG_SPACE(4 * 253), _WHOLE)
            header += _receive_exactly(connection, _HEADER.size - len(header))
            length, num_descriptors, lost, generation = _HEADER.unpack(header)
            if lost >= 0:
                raise self._lost(lost)
            payload = _receive_exactly(connection, length)
        except OSError:
            raise self._lost(rank) from None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % 4])
        if len(descriptors) != num_descriptors:
            raise self._lost(rank)
        return generation, (payload, descriptors.tolist())
