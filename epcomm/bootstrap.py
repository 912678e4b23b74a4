"""The side channel that ranks keep: a Unix socket per rank to rank 0, the hub.

A rendezvous only has to spread the hub's name. All that follows, descriptors of shared memory included, travels through
the hub, so a communicator outlives the group or store that introduced its ranks.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence

from epcomm.errors import ConfigError, PeerLostError, TimeoutError, UnsupportedError
from epcomm.rendezvous import LaunchedRank, Rendezvous, host_identity

_POLL_MS = 20
_HEADER = struct.Struct("<qiiq")  # payload bytes, descriptors, rank that was lost (-1: none), generation
_WHOLE = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC
Message = tuple[bytes, list[int]]


def connect(rendezvous: Rendezvous | LaunchedRank, timeout: float) -> Hub:
    """Meets the other ranks and returns the hub connection. Raises `UnsupportedError` if they are on several hosts."""
    rank, size = rendezvous.rank, rendezvous.size
    deadline = time.monotonic() + timeout
    listener, check = None, _nothing
    if isinstance(rendezvous, LaunchedRank):
        name, check = rendezvous.next_hub_name(), rendezvous.check
        if rank == 0:
            listener = _listen(name, size)
    else:
        name = f"epcomm-{uuid.uuid4().hex}"
        if rank == 0:  # listen first: whoever learns the name can connect
            listener = _listen(name, size)
        texts = rendezvous.allgather(f"{host_identity()} {name}", timeout)
        hosts, names = zip(*(text.rsplit(" ", 1) for text in texts), strict=True)
        if len(set(hosts)) > 1:
            raise UnsupportedError(
                f"rank {rank}: init: the CPU target has no network, and the ranks are on several hosts: "
                + ", ".join(f"rank {r} on {host}" for r, host in enumerate(hosts))
                + "; make one communicator per host (a group or store of the ranks that share it)"
            )
        name = names[0]
    if listener is None:
        return Hub(rank, size, [_dial(name, rank, deadline, check)])
    with listener:
        return Hub(rank, size, _accept(listener, size, deadline, check))


def _nothing() -> None:
    return None


def agree_on_programs(hub: Hub, num_programs: int, kind: str, timeout: float) -> int:
    """How many programs each rank runs: the least that any asks for. All ranks must be on the same kind of device."""
    payload = struct.pack("<q", num_programs) + kind.encode()
    payloads = [message for message, _ in hub.allgather(payload, timeout=timeout, check=lambda: None)]
    kinds = [payload[8:].decode() for payload in payloads]
    if len(set(kinds)) > 1:
        raise ConfigError(f"init: argument `device`: wanted the same kind on all ranks, got {', '.join(kinds)} by rank")
    return min(struct.unpack("<q", payload[:8])[0] for payload in payloads)


def _listen(name: str, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)  # abstract: no file, and gone with its owner
    listener.listen(size)
    return listener


def _dial(name: str, rank: int, deadline: float, check: Callable[[], None]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            connection.connect("\0" + name)
            connection.sendall(struct.pack("<q", rank))
            return connection
        except ConnectionRefusedError:  # rank 0 isn't listening yet
            check()
            if time.monotonic() > deadline:
                connection.close()
                raise TimeoutError(f"rank {rank}: init: rank 0 did not come in time") from None
            time.sleep(0.002)


def _accept(
    listener: socket.socket, size: int, deadline: float, check: Callable[[], None]
) -> list[socket.socket]:
    """The connections of ranks 1.. in rank order; all are closed if one doesn't come."""
    connections: dict[int, socket.socket] = {}
    listener.settimeout(_POLL_MS / 1000)
    try:
        while len(connections) < size - 1:
            check()
            if time.monotonic() > deadline:
                missing = [rank for rank in range(1, size) if rank not in connections]
                raise TimeoutError(f"rank 0: init: rank(s) {missing} of {size} did not come in time")
            with contextlib.suppress(builtins.TimeoutError):
                connection, _ = listener.accept()
                rank = _greeting(connection)
                if rank is not None:
                    connections[rank] = connection
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return [connections[rank] for rank in range(1, size)]


def _greeting(connection: socket.socket) -> int | None:
    """The rank that a new connection says it is; None (and closed) if it isn't one of this user's ranks."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    connection.settimeout(1.0)
    try:
        greeting = connection.recv(8, socket.MSG_WAITALL) if uid == os.getuid() else b""
    except OSError:
        greeting = b""
    if len(greeting) < 8:
        connection.close()
        return None
    connection.settimeout(None)
    return struct.unpack("<q", greeting)[0]


def _close_all(messages: list[Message]) -> None:
    for _, descriptors in messages:
        for descriptor in descriptors:
            os.close(descriptor)


class Hub:
    """All-gather of bytes and file descriptors between the ranks of one machine, through rank 0."""

    def __init__(self, rank: int, size: int, connections: list[socket.socket]):
        self.rank, self.size, self.nodes = rank, size, [0] * size
        self._connections = connections  # on rank 0: ranks 1, 2, ...; elsewhere: rank 0
        self.generation = 2  # twice the runtime's, odd in a reset: tells exchanges apart that a failure cut short
        self._early: dict[int, tuple[int, Message]] = {}  # from ranks that have reset already

    def allgather(
        self, payload: bytes, descriptors: Sequence[int] = (), *, timeout: float, check: Callable[[], None]
    ) -> list[Message]:
        """Everyone's payload and (duplicated) descriptors, by rank. `check` is called while waiting and may raise.

        Raises `PeerLostError` if a rank's end is closed, `TimeoutError` at the deadline.
        """
        deadline = time.monotonic() + timeout
        messages: list[Message] = []
        others = range(1, self.size)
        try:
            if self.rank != 0:  # rank 0 passes on what comes from all ranks, this one included
                with contextlib.suppress(PeerLostError):  # what rank 0 sent last says who was lost
                    self._send(0, payload, descriptors)
                for _ in range(self.size):
                    messages.append(self._receive(0, deadline, check))
                return messages
            messages.append((payload, [os.dup(descriptor) for descriptor in descriptors]))
            for rank in others:
                messages.append(self._receive(rank, deadline, check))
            for rank in others:
                for message, received in messages:
                    self._send(rank, message, received)
            return messages
        except BaseException as error:
            _close_all(messages)
            if self.rank == 0 and isinstance(error, PeerLostError):
                for rank in others:
                    self._try_send_lost(rank, error.rank)
            raise

    def barrier(self, *, timeout: float, check: Callable[[], None]) -> None:
        """Returns once every rank has come."""
        _close_all(self.allgather(b"", timeout=timeout, check=check))

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections = []

    def _socket(self, rank: int) -> socket.socket:
        return self._connections[rank - 1 if self.rank == 0 else 0]

    def _lost(self, rank: int) -> PeerLostError:
        return PeerLostError(f"rank {self.rank}: rank {rank} closed its connection: its process ended or closed", rank)

    def _send(self, rank: int, payload: bytes, descriptors: Sequence[int]) -> None:
        try:
            header = _HEADER.pack(len(payload), len(descriptors), -1, self.generation)
            socket.send_fds(self._socket(rank), [header], list(descriptors))
            if payload:  # a peer that has all it waits for may already have closed
                self._socket(rank).sendall(payload)
        except OSError:
            raise self._lost(rank) from None

    def _try_send_lost(self, rank: int, lost: int) -> None:
        try:
            self._socket(rank).sendall(_HEADER.pack(0, 0, lost, self.generation))
        except OSError:
            return  # that rank is lost as well

    def _receive(self, rank: int, deadline: float, check: Callable[[], None]) -> Message:
        poller = select.poll()
        poller.register(self._socket(rank), select.POLLIN)
        while True:
            if rank in self._early and self._early[rank][0] == self.generation:
                return self._early.pop(rank)[1]
            if rank not in self._early and poller.poll(_POLL_MS):
                generation, message = self._read(rank)
                if generation == self.generation:
                    return message
                if generation > self.generation:
                    self._early[rank] = generation, message
                else:
                    _close_all([message])
                continue
            check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: rank {rank} did not come to the exchange in time")
            if rank in self._early:
                time.sleep(_POLL_MS / 1000)

    def _read(self, rank: int) -> tuple[int, Message]:
        """One message and its generation."""
        connection = self._socket(rank)
        try:
            header, ancillary, _, _ = connection.recvmsg(_HEADER.size, socket.CMSG_SPACE(4 * 253), _WHOLE)
            if len(header) < _HEADER.size:
                raise self._lost(rank)
            length, num_descriptors, lost, generation = _HEADER.unpack(header)
            if lost >= 0:
                raise self._lost(lost)
            payload = connection.recv(length, socket.MSG_WAITALL) if length else b""
        except OSError:
            raise self._lost(rank) from None
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % 4])
        if len(descriptors) != num_descriptors or len(payload) < length:
            raise self._lost(rank)
        return generation, (payload, descriptors.tolist())
