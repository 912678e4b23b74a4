"""Any plan on any network, event by event.

A step starts when the step before it in its program is complete, its dependencies are, its message has arrived and its
FIFO has a free slot; it is complete when its program has moved its bytes. Where threads have several programs, the step
before it is one of its thread's. A message cuts through the links of its way: it asks for each as soon as its first
byte is there, each link serves messages in the order in which they ask and is taken for bytes / bandwidth, and the
message has arrived when its last byte has left the slowest link and the latency has passed. Buffers in between are
unlimited; a slot that a receiver freed is known to its sender at once.
"""

from __future__ import annotations

import heapq

import numpy as np

from epcomm.collectives.plan import Plan
from epcomm.collectives.plan.graph import Graph
from epcomm.collectives.plan.partial_sums import NARROW, partial_sums
from epcomm.collectives.plan.passes import RECEIVES, SENDS
from epcomm.collectives.plan.verify import execution_order
from epcomm.errors import ConfigError
from epcomm.simulation.costs import BYTES_PER_MICROSECOND, Costs
from epcomm.simulation.network import NO_LINK, Network
from epcomm.simulation.timeline import BEGINNING, Cause, Timeline

_COMPLETE, _HOP, _ARRIVED = range(3)


def simulate(
    plan: Plan, num_bytes: float, network: Network, costs: Costs | None = None, *, wide_sums: bool = False,
    num_workers: int | None = None,
) -> Timeline:  # fmt: skip
    """When each step of the plan starts and is complete, with `num_bytes` in a unit of its collective (see
    `Collective`: the whole tensor of an allreduce, a rank's block of an allgather).

    `wide_sums`: partial sums travel in twice the bytes (16-bit inputs, float32 sums). `num_workers`: a rank's programs
    are shared out among so many threads, as `lower` does; by default each has one. ConfigError if the network has too
    few ranks or, of wide sums, partial ones differ in place; PlanError if the plan is out of range or deadlocks.
    """
    if not num_bytes >= 0:
        raise ConfigError(f"simulate: num_bytes: wanted a number >= 0, got {num_bytes!r}")
    if network.num_ranks < plan.num_ranks:
        raise ConfigError(f"simulate: network: wanted {plan.num_ranks} ranks, got {network.num_ranks}")
    if num_workers is not None and num_workers < 1:
        raise ConfigError(f"simulate: num_workers: wanted at least 1, got {num_workers}")
    graph = Graph(plan)
    order = execution_order(graph)
    turns = in_turn(graph, order, num_workers)
    chunk_bytes = num_bytes / plan.collective.num_chunks
    num_chunks = np.where(graph.flags > 0, graph.count, 0) + (_partial_sums_sent(graph, order) if wide_sums else 0)
    run = _Run(graph, num_chunks * chunk_bytes, network, costs or Costs(), turns)
    run.go()
    return run.timeline()


def in_turn(graph: Graph, order: np.ndarray, num_workers: int | None) -> tuple[np.ndarray, np.ndarray]:
    """(earlier, later) steps that follow each other in a program, or with workers in one of those, as in `order`."""
    if num_workers is None:
        later = np.flatnonzero(graph.index > 0)
        return later - 1, later
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    worker = graph.program % num_workers
    by_worker = np.lexsort([place, worker, graph.rank])
    follows = (np.diff(graph.rank[by_worker]) == 0) & (np.diff(worker[by_worker]) == 0)
    return by_worker[:-1][follows], by_worker[1:][follows]


def _partial_sums_sent(graph: Graph, order: np.ndarray) -> np.ndarray:
    """How many of the chunks that a step sends are sums of some ranks', int64 [num_steps]."""
    positions = [graph.position(number) for number in order.tolist()]
    widths, found = partial_sums(graph.plan, positions).widths, np.zeros(graph.num_steps, np.int64)
    for number, position in zip(order.tolist(), positions, strict=True):
        if graph.flags[number] & SENDS:
            found[number] = sum(chunk.result != NARROW for chunk in widths[position])
    return found


class _Run:
    """The events to come, and what has happened."""

    def __init__(
        self, graph: Graph, num_bytes: np.ndarray, network: Network, costs: Costs,
        turns: tuple[np.ndarray, np.ndarray],
    ):  # fmt: skip
        self.graph, self.network, self.costs = graph, network, costs
        self.moving = [costs.moving(each) for each in num_bytes.tolist()]
        self.step_cost = np.where(graph.flags > 0, costs.step, 0.0).tolist()
        self.sends = ((graph.flags & SENDS) > 0).tolist()
        self._route(num_bytes)
        self._link(turns)
        size = graph.num_steps
        self.start, self.complete = [0.0] * size, [0.0] * size
        self.cause: list[tuple[Cause, int]] = [BEGINNING] * size
        self.queued, self.queued_first, self.arrival = [0.0] * size, [0.0] * size, [0.0] * size
        self.free = [0.0] * len(network.bandwidth)
        self.busy = [0.0] * len(network.bandwidth)
        self.events: list[tuple[float, int, int, int, int, float]] = []
        self.num_events = 0

    def _route(self, num_bytes: np.ndarray) -> None:
        """For each step that sends: its links, how long it takes each, its latency."""
        graph, network = self.graph, self.network
        senders = np.flatnonzero(graph.flags & SENDS)
        src, dst = graph.rank[senders], graph.send_to[senders]
        routes = network.routes(src, dst)
        self.latency = np.zeros(graph.num_steps)
        self.latency[senders] = routes.latencies(self.costs)
        self.hops: list[list[tuple[int, float]]] = [[] for _ in range(graph.num_steps)]
        rates = (network.bandwidth * BYTES_PER_MICROSECOND * self.costs.efficiency).tolist()
        for sender, path, size in zip(senders.tolist(), routes.paths.tolist(), num_bytes[senders].tolist()):
            self.hops[sender] = [(link, size / rates[link]) for link in path if link != NO_LINK]

    def _link(self, turns: tuple[np.ndarray, np.ndarray]) -> None:
        """For each step, who waits for it to be complete, and who for its message."""
        graph = self.graph
        _, *others = graph.edges()  # turns take the place of programs
        self.num_awaited = np.zeros(graph.num_steps, np.int64)
        self.later: list[list[tuple[int, Cause]]] = [[] for _ in range(graph.num_steps)]
        self.receiver = np.full(graph.num_steps, -1)
        for (earlier, later), cause in zip([turns, *others], (Cause.PROGRAM, Cause.AFTER, Cause.MESSAGE, Cause.SLOT)):
            np.add.at(self.num_awaited, later, 1)
            if cause is Cause.MESSAGE:
                self.receiver[earlier] = later
                continue
            for first, then in zip(earlier.tolist(), later.tolist()):
                self.later[first].append((then, cause))

    def go(self) -> None:
        self.awaited = self.num_awaited.tolist()
        receiver = self.receiver.tolist()
        for number in np.flatnonzero(self.num_awaited == 0).tolist():
            self._start(number, self.costs.launch)
        while self.events:
            now, _, what, number, hop, left = heapq.heappop(self.events)
            if what == _HOP:
                self._take_link(number, hop, now, left)
            elif what == _ARRIVED:
                self.arrival[number] = now
                self._satisfied(receiver[number], (Cause.MESSAGE, number), now)
            else:
                self.complete[number] = now
                for then, cause in self.later[number]:
                    self._satisfied(then, (cause, number), now)

    def _push(self, when: float, what: int, number: int, hop: int = 0, left: float = 0.0) -> None:
        self.num_events += 1  # of events at one time, the first made is the first to happen
        heapq.heappush(self.events, (when, self.num_events, what, number, hop, left))

    def _satisfied(self, number: int, cause: tuple[Cause, int], now: float) -> None:
        self.awaited[number] -= 1
        if self.awaited[number] == 0:
            self.cause[number] = cause
            self._start(number, now)

    def _start(self, number: int, now: float) -> None:
        self.start[number] = now
        ready = now + self.step_cost[number]
        if self.sends[number]:
            self._push(ready, _HOP, number)
        else:
            self._push(ready + self.moving[number], _COMPLETE, number)

    def _take_link(self, number: int, hop: int, now: float, left: float) -> None:
        """The message's first byte is at a link; its last byte left the link before at `left`."""
        link, taken = self.hops[number][hop]
        begin = max(now, self.free[link])
        self.free[link] = begin + taken
        self.busy[link] += taken
        self.queued[number] += begin - now
        end = max(begin + taken, left)
        if hop == 0:
            end = max(end, begin + self.moving[number])
            self.queued_first[number] = begin - now
            self._push(end, _COMPLETE, number)
        if hop + 1 < len(self.hops[number]):
            self._push(begin, _HOP, number, hop + 1, end)
        else:
            self._push(end + float(self.latency[number]), _ARRIVED, number)

    def timeline(self) -> Timeline:
        arrays = (self.start, self.complete, self.queued, self.queued_first, self.arrival, self.busy)
        start, complete, queued, queued_first, arrival, busy = (np.array(each) for each in arrays)
        receives = (self.graph.flags & RECEIVES) > 0
        assert (start[receives] >= arrival[self.graph.match[receives]]).all()
        return Timeline(
            self.graph, self.network, self.costs, start, complete, tuple(self.cause), arrival, queued, queued_first,
            self.latency, np.array(self.step_cost), busy,
        )  # fmt: skip
