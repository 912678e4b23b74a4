"""How ranks meet: what they tell each other through a rendezvous, and the connections that they then make.

Ranks of one host connect to its leader, the lowest of them, by a Unix socket. With several hosts, leaders connect to
the first leader, and every rank to the leaders of other hosts, over TCP.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from epcomm.errors import TimeoutError
from epcomm.world.hub import Hub
from epcomm.world.links import Links
from epcomm.world.rendezvous import LaunchedRank, StoreRendezvous, host_identity
from epcomm.world.tcp import Endpoint, Listener, dial, local_addresses
from epcomm.world.wide_hub import WideHub, number_nodes

_POLL_SECONDS = 0.02
_HUB, _LINK = 1, 2  # what a TCP connection is for


def connect(rendezvous: StoreRendezvous | LaunchedRank, timeout: float) -> Hub:
    """Meets the other ranks and returns the hub connection."""
    rank, size = rendezvous.rank, rendezvous.size
    deadline = time.monotonic() + timeout
    if isinstance(rendezvous, LaunchedRank):  # all on this machine
        name = rendezvous.next_hub_name()
        with _listen(name, size) if rank == 0 else contextlib.nullcontext() as doorway:
            return Hub(rank, range(size), _meet(rank, range(size), doorway, name, deadline, rendezvous.check))
    name = f"epcomm-{uuid.uuid4().hex}"
    # listens first: whoever learns the name can connect
    with contextlib.closing(Listener(rank)) as listener, _listen(name, size) as doorway:
        endpoint = listener.endpoint(local_addresses(rendezvous.store_hosts()))
        card = _Card(host_identity(), name, asdict(endpoint))
        texts = rendezvous.allgather(json.dumps(asdict(card)), timeout)
        cards = [_Card(**json.loads(text)) for text in texts]
        nodes, leaders = number_nodes([card.host for card in cards])
        neighbours = [peer for peer, node in enumerate(nodes) if node == nodes[rank]]
        name = cards[neighbours[0]].name
        if len(leaders) == 1:
            return Hub(rank, neighbours, _meet(rank, neighbours, doorway, name, deadline, _nothing))
        endpoints = {leader: Endpoint(**cards[leader].endpoint) for leader in leaders}
        tcp = _meet_hosts(rank, nodes, endpoints, listener, deadline)
        try:
            connections = _meet(rank, neighbours, doorway, name, deadline, _nothing)
        except BaseException:
            tcp.close()
            raise
        between = Hub(rank, leaders, tcp.between) if rank in leaders else None
        return WideHub(rank, nodes, connections, between, Links(tcp.up, tcp.down), tcp.addresses(rank, nodes))


@dataclass
class _Card:
    """What a rank tells all others: its host, the name under which it would be found there, and where it listens."""

    host: str
    name: str
    endpoint: dict


def _nothing() -> None:
    return None


# ---- one host


def _meet(
    rank: int,
    ranks: Sequence[int],
    doorway: socket.socket | None,
    name: str,
    deadline: float,
    check: Callable[[], None],
) -> dict[int, socket.socket]:
    """Connects the ranks of one host: the first, at whose `doorway` the others come, with each; they with it alone."""
    if rank == ranks[0] and doorway is not None:
        return _accept(doorway, ranks, deadline, check)
    return {ranks[0]: _dial(name, rank, ranks[0], deadline, check)}


def _listen(name: str, size: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind("\0" + name)  # abstract: no file, and gone with its owner
    listener.listen(size)
    return listener


def _dial(name: str, rank: int, leader: int, deadline: float, check: Callable[[], None]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            connection.connect("\0" + name)
            connection.sendall(struct.pack("<q", rank))
            return connection
        except ConnectionRefusedError:  # the leader isn't listening yet
            check()
            if time.monotonic() > deadline:
                connection.close()
                raise TimeoutError(f"rank {rank}: init: rank {leader} did not come in time") from None
            time.sleep(0.002)


def _accept(
    listener: socket.socket, ranks: Sequence[int], deadline: float, check: Callable[[], None]
) -> dict[int, socket.socket]:
    """The connections of all ranks but the first; all are closed if one doesn't come."""
    connections: dict[int, socket.socket] = {}
    listener.settimeout(_POLL_SECONDS)
    try:
        while len(connections) < len(ranks) - 1:
            check()
            if time.monotonic() > deadline:
                missing = [rank for rank in ranks[1:] if rank not in connections]
                raise TimeoutError(
                    f"rank {ranks[0]}: init: rank(s) {missing} of {len(ranks)} on this host did not come in time"
                )
            with contextlib.suppress(builtins.TimeoutError):
                connection, _ = listener.accept()
                rank = _greeting(connection)
                if rank is not None:
                    connections[rank] = connection
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections


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


# ---- several hosts


@dataclass
class _Tcp:
    """A rank's TCP connections: leaders among each other, up to leaders of other hosts, down from ranks elsewhere."""

    between: dict[int, socket.socket]
    up: dict[int, socket.socket]
    down: dict[int, socket.socket]

    def close(self) -> None:
        for connection in (*self.between.values(), *self.up.values(), *self.down.values()):
            connection.close()

    def addresses(self, rank: int, nodes: Sequence[int]) -> list[str]:
        """By rank, the address of its host; of this one the address that others see."""
        by_node = {nodes[leader]: link.getpeername()[0] for leader, link in self.up.items()}
        by_node[nodes[rank]] = next(iter(self.up.values())).getsockname()[0]
        return [by_node[node] for node in nodes]


def _meet_hosts(
    rank: int, nodes: Sequence[int], endpoints: dict[int, Endpoint], listener: Listener, deadline: float
) -> _Tcp:
    """Makes the connections between hosts. A leader answers while it dials: so do those that it dials."""
    leaders = list(endpoints)
    elsewhere = [peer for peer, node in enumerate(nodes) if node != nodes[rank]]
    wanted = [(_LINK, peer) for peer in elsewhere] if rank in leaders else []
    wanted += [(_HUB, leader) for leader in leaders[1:] if rank == leaders[0]]
    tcp = _Tcp({}, {}, {})
    failed: list[BaseException] = []

    def check() -> None:
        if failed:
            raise failed[0]

    def answer() -> dict[tuple[int, int], socket.socket]:
        try:
            return listener.accept(wanted, deadline, check)
        except BaseException as error:
            failed.append(error)
            raise

    with ThreadPoolExecutor(1, "epcomm-answer") as pool:
        if wanted:
            listener.listen(len(wanted))
            answered = pool.submit(answer)
        try:
            for leader in leaders:
                if leader != rank and leader in elsewhere:
                    tcp.up[leader] = dial(endpoints[leader], _LINK, rank, deadline, check)
            if rank in leaders[1:]:
                tcp.between[leaders[0]] = dial(endpoints[leaders[0]], _HUB, rank, deadline, check)
            for (purpose, peer), connection in (answered.result() if wanted else {}).items():
                (tcp.between if purpose == _HUB else tcp.down)[peer] = connection
        except BaseException as error:
            failed.append(error)
            tcp.close()
            raise
    return tcp
