"""From operations to steps: who waits for whom through memory, what one step can do, what need not be stored."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from epcomm.collectives.language.operations import Operation
from epcomm.collectives.plan import Collective, Location, Op


@dataclass(eq=False)
class Node:
    """A step in the making. `sends` and `receives` are the nodes at the other ends of its messages."""

    rank: int
    op: Op
    src: Location | None
    dst: Location | None
    count: int
    channel: int  # as the program says; the compiler may add to it
    number: int  # nodes in the order made: each waits for earlier ones only
    piece: int = 0
    after: set[Node] = field(default_factory=set)
    sends: Node | None = None
    receives: Node | None = None
    hops: int = 0  # the most messages that it waits for, one after the other
    depth: int = 0  # of the longest chain of nodes that it waits for
    turn: int = 0  # which it is of its rank's with these hops and this depth


def copies(nodes: list[Node], piece: int) -> list[Node]:
    """The same steps for a piece, joined as they are."""
    copy_of = {node: replace(node, piece=piece) for node in nodes}
    for copy in copy_of.values():
        copy.after = {copy_of[node] for node in copy.after}
        copy.sends = None if copy.sends is None else copy_of[copy.sends]
        copy.receives = None if copy.receives is None else copy_of[copy.receives]
    return list(copy_of.values())


#: What a receiving step becomes when it also sends what it got.
_AND_SEND = {Op.RECV: Op.RECV_COPY_SEND, Op.RECV_REDUCE_COPY: Op.RECV_REDUCE_COPY_SEND}


class _Memory:
    """Who wrote and who read each chunk last, by the addresses of one placement."""

    def __init__(self, collective: Collective, in_place: bool):
        self._collective, self._in_place = collective, in_place
        self._writer: dict[tuple, Node] = {}
        self._readers: dict[tuple, list[Node]] = defaultdict(list)
        self._was_read: set[Node] = set()

    def _keys(self, rank: int, location: Location, count: int) -> list[tuple]:
        buffer, first = location
        if self._in_place and buffer != "scratch":
            overlay = self._collective.overlay(rank)
            buffer, first = "shared", first + overlay[buffer == "output"]
        return [(rank, buffer, index) for index in range(first, first + count)]

    def writers(self, rank: int, location: Location, count: int) -> set[Node | None]:
        return {self._writer.get(key) for key in self._keys(rank, location, count)}

    def read(self, node: Node, location: Location) -> None:
        for key in self._keys(node.rank, location, node.count):
            writer = self._writer.get(key)
            if writer is not None and writer is not node:
                node.after.add(writer)
                self._was_read.add(writer)
            self._readers[key].append(node)

    def write(self, node: Node, location: Location) -> None:
        for key in self._keys(node.rank, location, node.count):
            node.after |= {other for other in (self._writer.get(key), *self._readers[key]) if other not in (None, node)}
            self._writer[key] = node
            self._readers[key].clear()

    def needed(self) -> set[Node]:
        """Nodes that wrote something which is read, or is there at the end as a result."""
        needed = set(self._was_read)
        for rank in range(self._collective.num_ranks):
            count = self._collective.output_chunks(rank)
            needed |= {node for node in self.writers(rank, Location("output", 0), count) if node is not None}
        return needed


class Lowering:
    """Makes nodes of operations, added in the program's order. `nodes` is complete once `finish` was called."""

    def __init__(self, collective: Collective, placements: tuple[bool, ...]):
        self.nodes: list[Node] = []
        self._memories = [_Memory(collective, in_place) for in_place in placements]

    def add(self, operation: Operation) -> None:
        src, dst = operation.src.location, operation.dst.location
        local = None if operation.local is None else operation.local.location
        is_remote = operation.src.rank != operation.dst.rank
        sender = self._sender(operation, src) if is_remote else None
        if sender is None:
            op = Op.COPY if local is None else Op.REDUCE
            self._access(self._node(operation.dst.rank, op, src, dst, operation))
            return
        op = Op.RECV if local is None else Op.RECV_REDUCE_COPY
        node = self._node(operation.dst.rank, op, local, dst, operation)
        node.receives, sender.sends = sender, node
        self._access(node)

    def finish(self) -> None:
        """Drops stores that nobody reads, then finds hops and depths."""
        needed = set().union(*(memory.needed() for memory in self._memories))
        turns: dict[tuple[int, int, int], int] = defaultdict(int)
        for node in self.nodes:
            if node.op is Op.RECV_REDUCE_COPY_SEND and node not in needed:
                node.op, node.dst = Op.RECV_REDUCE_SEND, None
            earlier = node.after | ({node.receives} if node.receives else set())
            node.depth = 1 + max((other.depth for other in earlier), default=-1)
            node.hops = max((other.hops + (other is node.receives) for other in earlier), default=0)
            turns[node.rank, node.hops, node.depth] += 1
            node.turn = turns[node.rank, node.hops, node.depth]

    def _sender(self, operation: Operation, src: Location) -> Node:
        """Who sends: the node that has just received exactly this, if there is one, else a new one."""
        rank, count, channel = operation.src.rank, operation.count, operation.channel
        writers = set().union(*(memory.writers(rank, src, count) for memory in self._memories))
        node = writers.pop() if len(writers) == 1 else None
        if node is not None and node.op in _AND_SEND:
            if (node.dst, node.count, node.channel) == (src, count, channel):
                node.op = _AND_SEND[node.op]
                return node
        node = self._node(rank, Op.SEND, src, None, operation)
        self._access(node)
        return node

    def _node(self, rank: int, op: Op, src: Location | None, dst: Location | None, operation: Operation) -> Node:
        node = Node(rank, op, src, dst, operation.count, operation.channel, len(self.nodes))
        self.nodes.append(node)
        return node

    def _access(self, node: Node) -> None:
        for memory in self._memories:
            if node.src is not None:
                memory.read(node, node.src)
            if node.dst is not None:
                if node.op is Op.REDUCE:
                    memory.read(node, node.dst)
                memory.write(node, node.dst)
