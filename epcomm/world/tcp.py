"""TCP connections between ranks of several hosts: addresses to try, and a token that tells ranks from strangers.

Whoever dials sends the first half of the listener's token, who it is and what for; the listener answers with the second
half. So neither talks to anything else that happens to have the address.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import fcntl
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from epcomm.errors import TimeoutError

_HALF = 16  # bytes of a token's halves
_GREETING = struct.Struct(f"<{_HALF}sqq")  # first half, purpose, rank
_TRY_SECONDS = 1.0  # for a connection to one address; a packet that nobody answers is sent twice in this time
_ANSWER_SECONDS = 5.0  # for the listener to get to it
_POLL_SECONDS = 0.02
_SIOCGIFADDR = 0x8915
# A host that loses power or its cable says nothing: without an answer for this long it is lost.
_SILENCE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}


@dataclass
class Endpoint:
    """Where a rank listens: what a rendezvous spreads."""

    rank: int
    addresses: list[str]
    port: int
    token: str


class Listener:
    """A port of this host. It is reserved at once, and answers after `listen`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        has_both = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if has_both else socket.AF_INET)
        if has_both:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))
        self._token = secrets.token_bytes(2 * _HALF)

    def endpoint(self, addresses: list[str]) -> Endpoint:
        return Endpoint(self._rank, addresses, self._socket.getsockname()[1], self._token.hex())

    def listen(self, backlog: int) -> None:
        self._socket.listen(backlog)

    def close(self) -> None:
        self._socket.close()

    def accept(
        self, wanted: Iterable[tuple[int, int]], deadline: float, check: Callable[[], None]
    ) -> dict[tuple[int, int], socket.socket]:
        """The connections of all `wanted` (purpose, rank); all are closed if one doesn't come."""
        wanted = set(wanted)
        connections: dict[tuple[int, int], socket.socket] = {}
        self._socket.settimeout(_POLL_SECONDS)
        try:
            while len(connections) < len(wanted):
                check()
                if time.monotonic() > deadline:
                    missing = sorted({rank for _, rank in wanted - set(connections)})
                    raise TimeoutError(f"rank {self._rank}: init: rank(s) {missing} did not connect in time")
                with contextlib.suppress(builtins.TimeoutError):
                    connection, _ = self._socket.accept()
                    key = self._greeted(connection)
                    if key not in wanted:
                        connection.close()
                        continue
                    if key in connections:  # it dialed again: it has given up the first one
                        connections[key].close()
                    connections[key] = connection
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        return connections

    def _greeted(self, connection: socket.socket) -> tuple[int, int] | None:
        """Who has connected, answered already; None if it doesn't know the token."""
        connection.settimeout(1.0)
        try:
            greeting = connection.recv(_GREETING.size, socket.MSG_WAITALL)
            if len(greeting) < _GREETING.size:
                return None
            half, purpose, rank = _GREETING.unpack(greeting)
            if not hmac.compare_digest(half, self._token[:_HALF]):
                return None
            connection.sendall(self._token[_HALF:])
        except OSError:
            return None
        _prepare(connection)
        return purpose, rank


def dial(endpoint: Endpoint, purpose: int, rank: int, deadline: float, check: Callable[[], None]) -> socket.socket:
    """A connection to the rank that listens at `endpoint`, at the first of its addresses where it answers."""
    token = bytes.fromhex(endpoint.token)
    while True:
        for address in endpoint.addresses:
            check()
            connection = None
            try:
                connection = socket.create_connection((address, endpoint.port), timeout=_TRY_SECONDS)
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(_GREETING.pack(token[:_HALF], purpose, rank))
                if hmac.compare_digest(connection.recv(_HALF, socket.MSG_WAITALL), token[_HALF:]):
                    _prepare(connection)
                    return connection
                connection.close()
            except OSError:  # it isn't there, or doesn't listen yet
                if connection is not None:
                    connection.close()
        if time.monotonic() > deadline:
            where = ", ".join(endpoint.addresses)
            raise TimeoutError(
                f"rank {rank}: init: rank {endpoint.rank} did not answer in time at port {endpoint.port} of {where}; "
                "wanted a network on which hosts reach each other's ports"
            )
        time.sleep(0.005)


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _SILENCE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def local_addresses(towards: Sequence[str]) -> list[str]:
    """Addresses of this host, the likeliest first: by which it reaches the hosts `towards`, and others; of interfaces.

    Names of this host are not looked up: the resolver may take seconds to fail.
    """
    routed = [address for host in (*towards, "192.0.2.1", "2001:db8::1") for address in _address_towards(host)]
    return list(dict.fromkeys([*routed, *_interface_addresses()]))


def _address_towards(host: str) -> list[str]:
    """The address from which packets to `host` would be sent; none is."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(target)
                return [probe.getsockname()[0]]
    return []


def _interface_addresses() -> list[str]:
    """The IPv4 addresses of all interfaces, loopback last."""
    return sorted((address for _, address in _interfaces()), key=lambda address: address.startswith("127."))


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address of this host."""
    return next((name for name, own in _interfaces() if own == address), None)


def _interfaces() -> Iterator[tuple[str, str]]:
    """Name and IPv4 address of all interfaces that have one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()[:15]))
            with contextlib.suppress(OSError):  # it has none
                fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                yield name, socket.inet_ntoa(request[20:24].tobytes())
