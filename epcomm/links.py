"""TCP connections between every two ranks on different hosts."""

from __future__ import annotations

import pickle
import secrets
import socket
import struct
import time
from collections.abc import Callable

from epcomm.bootstrap import Hub
from epcomm.errors import TimeoutError

_GREETING = struct.Struct("<q16s")  # rank, token
_STEP = 0.5  # seconds that a connection attempt takes before the caller's check is called


def connect_links(hub: Hub, timeout: float, check: Callable[[], None]) -> dict[int, socket.socket]:
    """Collective: a connected socket by rank, to each that is on another host. The lower of two ranks listens.

    Raises `TimeoutError` if one doesn't come, or what `check` raises.
    """
    deadline, others = time.monotonic() + timeout, [
        rank for rank in range(hub.size) if hub.nodes[rank] != hub.nodes[hub.rank]
    ]
    with socket.create_server((hub.addresses[hub.rank], 0), backlog=hub.size) as listener:
        offer = pickle.dumps((listener.getsockname()[1], secrets.token_bytes(16)))
        offers = [pickle.loads(message) for message, _ in hub.allgather(offer, timeout=timeout, check=check)]
        links: dict[int, socket.socket] = {}
        try:
            for rank in others:
                if rank < hub.rank:
                    port, token = offers[rank]
                    links[rank] = _dial((hub.addresses[rank], port), rank, deadline, check)
                    links[rank].sendall(_GREETING.pack(hub.rank, token))
            while missing := [rank for rank in others if rank not in links]:
                _accept(listener, offers[hub.rank][1], missing, links, deadline, check)
        except BaseException:
            for link in links.values():
                link.close()
            raise
    for link in links.values():
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return links


def _too_late(deadline: float, what: str, check: Callable[[], None]) -> None:
    check()
    if time.monotonic() > deadline:
        raise TimeoutError(f"init: {what} in time")


def _dial(address: tuple[str, int], rank: int, deadline: float, check: Callable[[], None]) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=_STEP)
        except OSError as error:
            _too_late(deadline, f"rank {rank} could not be reached at {address[0]}:{address[1]} ({error})", check)
            time.sleep(0.01)


def _accept(
    listener: socket.socket, token: bytes, missing: list[int], links: dict[int, socket.socket], deadline: float,
    check: Callable[[], None],
) -> None:  # fmt: skip
    """Takes one connection, if it is that of a missing rank."""
    listener.settimeout(_STEP)
    try:
        link, _ = listener.accept()
    except OSError:
        return _too_late(deadline, f"rank(s) {missing} did not connect", check)
    link.settimeout(_STEP)
    try:
        greeting = link.recv(_GREETING.size, socket.MSG_WAITALL)
    except OSError:
        greeting = b""
    rank, given = _GREETING.unpack(greeting) if len(greeting) == _GREETING.size else (-1, b"")
    if rank in missing and secrets.compare_digest(given, token):
        links[rank] = link
    else:
        link.close()
