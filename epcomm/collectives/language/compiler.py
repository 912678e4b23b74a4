"""From a traced program to a plan: channels, order, dependencies.

Steps go by the number of messages that they wait for one after the other: so what can go on at once stands side by side
whatever the order of the program's loops, and no rank waits for a later message while it has something to send. Of
those the first piece's come first, so that it goes on while the next ones come in, even where it sums several messages;
then by depth, the length of the longest chain of steps before them. Channels are chosen so that what is sent first is
received first. The order is then that of a run with FIFOs of the given depth, so it can't deadlock at that depth.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import defaultdict, deque
from typing import TYPE_CHECKING

from epcomm.collectives.language.nodes import Lowering, Node, copies
from epcomm.collectives.language.operations import Instances
from epcomm.collectives.plan import Dependency, Plan, Program, Step
from epcomm.errors import ConfigError

if TYPE_CHECKING:
    from epcomm.collectives.language.trace import Trace

#: (channel as the program says, number among those that keep messages in order): becomes a channel per instance
_Lane = tuple[int, int]
#: (from, to, lane)
_Fifo = tuple[int, int, _Lane]


def compile_trace(trace: Trace, channels: int, pieces: int, fifo_depth: int, protocol: str) -> Plan:
    """See `Trace.plan`."""
    for name, value in (("channels", channels), ("pieces", pieces), ("fifo_depth", fifo_depth)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{trace.name}: {name}: wanted an integer >= 1, got {value!r}")
    instances = Instances(trace.collective, trace.scratch_chunks, channels * pieces)
    placements = tuple(way for way, is_meant in ((False, trace.out_of_place), (True, trace.in_place)) if is_meant)
    lowering = Lowering(trace.collective, placements)
    for operation in trace.operations:
        for part in instances.cut(operation):
            lowering.add(part)
    lowering.finish()
    # Channels have nothing to do with each other: one is ordered, and the others are like it.
    nodes = [node for piece in range(pieces) for node in copies(lowering.nodes, piece)]
    nodes.sort(key=lambda node: (node.hops, node.piece, node.depth, node.turn, node.number))
    for window in (pieces >> shift for shift in range(pieces.bit_length())):
        windows = _windows(nodes, pieces, window)
        lanes = _assign_lanes([node for part in windows for node in part])
        run = [node for part in windows for node in _run(part, lanes, fifo_depth)]
        if len(run) == len(nodes):
            break
    else:
        raise ConfigError(f"{trace.name}: no order of its steps was found for FIFOs of {fifo_depth} messages")
    programs = _programs(run, lanes, instances, pieces)
    return Plan(
        trace.name, instances.scaled, programs, _used_scratch(programs), fifo_depth,
        in_place=trace.in_place, out_of_place=trace.out_of_place, protocol=protocol,
    )  # fmt: skip


def _windows(ordered: list[Node], pieces: int, window: int) -> list[list[Node]]:
    """The nodes of `window` pieces at a time, in order: each window's run before the next one's.

    One window of all pieces is best; where messages of many pieces block each other, fewer at a time may not.
    """
    windows: list[list[Node]] = [[] for _ in range(0, pieces, window)]
    for node in ordered:
        windows[node.piece // window].append(node)
    return windows


def _assign_lanes(ordered: list[Node]) -> dict[Node, _Lane]:
    """A lane for each node; nodes that pass a message on share one.

    Two messages from one rank to another can share a lane if the one that is sent first is received first.
    """
    place = {node: at for at, node in enumerate(ordered)}
    lanes: dict[Node, _Lane] = {}
    messages: dict[_Fifo, list[tuple[int, int]]] = defaultdict(list)  # (place of send, of receive) of each, ascending
    for node in ordered:
        if node in lanes:
            continue
        chain = [node]
        while (following := chain[-1].sends) is not None:
            chain.append(following)
        links = [(a.rank, b.rank, (place[a], place[b])) for a, b in zip(chain, chain[1:])]
        for number in itertools.count():
            lane = (node.channel, number)
            if all(_keeps_order(messages[src, dst, lane], message) for src, dst, message in links):
                break
        for src, dst, message in links:
            bisect.insort(messages[src, dst, lane], message)
        lanes |= dict.fromkeys(chain, lane)
    return lanes


def _keeps_order(messages: list[tuple[int, int]], message: tuple[int, int]) -> bool:
    at = bisect.bisect(messages, message)
    return (at == 0 or messages[at - 1][1] < message[1]) and (at == len(messages) or message[1] < messages[at][1])


def _run(ordered: list[Node], lanes: dict[Node, _Lane], fifo_depth: int) -> list[Node]:
    """The nodes as they run, one at a time, the first that can go on; less than all if none can.

    A new message leaves one slot of its FIFO free, which those that are passed on may fill: else a ring of full FIFOs,
    each waiting for the next, could come about (known from networks as bubble flow control).
    """
    place = {node: at for at, node in enumerate(ordered)}
    num_awaited = [len(node.after) + (node.receives is not None) for node in ordered]
    later: dict[Node, list[int]] = defaultdict(list)
    for at, node in enumerate(ordered):
        for other in node.after:
            later[other].append(at)
    ready = [at for at, number in enumerate(num_awaited) if number == 0]
    messages: dict[_Fifo, deque[Node]] = defaultdict(deque)  # by their receivers
    num_taken: dict[_Fifo, int] = defaultdict(int)
    blocked: dict[_Fifo, list[int]] = defaultdict(list)  # senders

    def awaited_less(at: int) -> None:
        num_awaited[at] -= 1
        if num_awaited[at] == 0:
            heapq.heappush(ready, at)

    run = []
    while ready:
        node = ordered[heapq.heappop(ready)]
        if node.sends is not None:
            fifo = (node.rank, node.sends.rank, lanes[node])
            room = 1 if node.receives is not None or fifo_depth == 1 else 2
            if fifo_depth - num_taken[fifo] < room:
                blocked[fifo].append(place[node])
                continue
            num_taken[fifo] += 1
            messages[fifo].append(node.sends)
            if messages[fifo][0] is node.sends:
                awaited_less(place[node.sends])
        run.append(node)
        if node.receives is not None:
            fifo = (node.receives.rank, node.rank, lanes[node])
            num_taken[fifo] -= 1
            for at in blocked.pop(fifo, ()):
                heapq.heappush(ready, at)
            messages[fifo].popleft()
            if messages[fifo]:  # the next one can be received now
                awaited_less(place[messages[fifo][0]])
        for at in later[node]:
            awaited_less(at)
    return run


def _programs(
    run: list[Node], lanes: dict[Node, _Lane], instances: Instances, pieces: int
) -> tuple[tuple[Program, ...], ...]:
    """Each rank's programs, one per channel, in the order of a run: for each instance of channels one per lane."""
    number_of = {lane: number for number, lane in enumerate(sorted(set(lanes.values())))}
    programs: list[list[list[Node]]] = [[[] for _ in number_of] for _ in range(instances.collective.num_ranks)]
    at: dict[Node, Dependency] = {}
    for node in run:
        lane = number_of[lanes[node]]
        at[node] = Dependency(lane, len(programs[node.rank][lane]))
        programs[node.rank][lane].append(node)
    awaited = {
        (rank, lane): _awaited(program, lane, at)
        for rank, of_rank in enumerate(programs) for lane, program in enumerate(of_rank)
    }  # fmt: skip

    def program(rank: int, channel: int) -> Program:
        instance, lane = divmod(channel, len(number_of))
        steps = (
            _step(node, after, channel - lane, instances, instance * pieces + node.piece)
            for node, after in zip(programs[rank][lane], awaited[rank, lane])
        )
        return Program(channel, tuple(steps))

    channels = range(instances.number // pieces * len(number_of))
    return tuple(tuple(program(rank, channel) for channel in channels) for rank in range(len(programs)))


def _awaited(program: list[Node], lane: int, at: dict[Node, Dependency]) -> list[list[Dependency]]:
    """For each step of a program the dependencies that those before it don't have."""
    found, waited = [], {lane: len(program)}  # lane: how many of its steps are known to be complete
    for node in program:
        latest: dict[int, int] = {}
        for other, step in (at[earlier] for earlier in node.after):
            if step >= waited.get(other, 0):
                latest[other] = max(step, latest.get(other, 0))
        waited |= {other: step + 1 for other, step in latest.items()}
        found.append([Dependency(other, step) for other, step in sorted(latest.items())])
    return found


def _step(node: Node, awaited: list[Dependency], first_program: int, instances: Instances, instance: int) -> Step:
    """An instance's step, whose lanes are programs from `first_program` on."""
    src, dst = (None if end is None else instances.placed(end, instance) for end in (node.src, node.dst))
    receive_from = None if node.receives is None else node.receives.rank
    send_to = None if node.sends is None else node.sends.rank
    after = tuple(Dependency(first_program + lane, step) for lane, step in awaited)
    return Step(node.op, src, dst, node.count, receive_from, send_to, after)


def _used_scratch(programs: tuple[tuple[Program, ...], ...]) -> int:
    """Chunks of scratch that are in use once stores that nobody reads are dropped."""
    steps = (step for of_rank in programs for program in of_rank for step in program.steps)
    uses = ((place, step.count) for step in steps for place in (step.src, step.dst) if place is not None)
    return max((place.offset + count for place, count in uses if place.buffer == "scratch"), default=0)
