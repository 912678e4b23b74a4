"""The hub of ranks on several hosts: one on each host, whose roots, the leaders, are connected over TCP."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping, Sequence

from epcomm.world.hub import Check, Hub, Message
from epcomm.world.links import Links


def number_nodes(hosts: Sequence[str]) -> tuple[list[int], list[int]]:
    """The node of each rank, numbered by first appearance, and the lowest rank of each node."""
    first = {host: hosts.index(host) for host in hosts}
    nodes = {host: node for node, host in enumerate(first)}
    return [nodes[host] for host in hosts], list(first.values())


class WideHub(Hub):
    """See `Hub`; descriptors come from ranks of the same host only. A leader has `between`, the hub of all leaders."""

    def __init__(
        self,
        rank: int,
        nodes: Sequence[int],
        connections: Mapping[int, socket.socket],
        between: Hub | None,
        links: Links,
        addresses: Sequence[str],
    ):
        super().__init__(rank, [peer for peer, node in enumerate(nodes) if node == nodes[rank]], connections)
        self.size, self.nodes, self.addresses, self.links = len(nodes), list(nodes), list(addresses), links
        self.leaders = [self.nodes.index(node) for node in range(max(nodes) + 1)]
        self._between = between

    def tell_lost(self, lost: int) -> None:
        super().tell_lost(lost)
        if self._between is not None:
            self._between.tell_lost(lost)

    def close(self) -> None:
        super().close()
        if self._between is not None:
            self._between.close()

    def _with_other_hosts(self, messages: list[Message], deadline: float, check: Check) -> list[Message]:
        if self._between is None:
            raise RuntimeError(f"rank {self.rank}: only a leader passes on what comes from other hosts")
        self._between.generation = self.generation
        payload = _packed([payload for payload, _ in messages])
        parts = self._between.allgather(payload, timeout=deadline - time.monotonic(), check=check)
        queues = [iter(_unpacked(part, self.nodes.count(node))) for node, (part, _) in enumerate(parts)]
        own = iter(messages)
        return [next(own) if node == self.nodes[self.rank] else (next(queues[node]), []) for node in self.nodes]


def _packed(payloads: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(payloads)}q", *map(len, payloads)) + b"".join(payloads)


def _unpacked(packed: bytes, count: int) -> list[bytes]:
    payloads, start = [], 8 * count
    for length in struct.unpack_from(f"<{count}q", packed):
        payloads.append(packed[start : start + length])
        start += length
    return payloads
