"""From a traced program to a plan: order, channels, dependencies.

Steps are ordered by depth, the length of the longest chain of steps before them, so that what can go on at once stands
side by side whatever the order of the program's loops. Channels are then chosen so that what is sent first is received
first.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING

from epcomm.collectives.language.nodes import Lowering, Node
from epcomm.collectives.language.operations import Instances
from epcomm.collectives.plan import Dependency, Plan, Program, Step
from epcomm.collectives.plan.graph import Graph
from epcomm.collectives.plan.verify import execution_order
from epcomm.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from epcomm.collectives.language.trace import Trace

#: (instance's channel, program's channel, number among those that keep messages in order)
_Lane = tuple[int, int, int]


def compile_trace(trace: Trace, channels: int, pieces: int, fifo_depth: int) -> Plan:
    """See `Trace.plan`."""
    for name, value in (("channels", channels), ("pieces", pieces), ("fifo_depth", fifo_depth)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{trace.name}: {name}: wanted an integer >= 1, got {value!r}")
    instances = Instances(trace.collective, trace.scratch_chunks, channels * pieces)
    placements = tuple(way for way, is_meant in ((False, trace.out_of_place), (True, trace.in_place)) if is_meant)
    lowering = Lowering(instances.scaled, placements)
    for instance in range(instances.number):
        for operation in instances.operations(instance, trace.operations):
            lowering.add(operation, instance)
    lowering.finish()
    # All pieces at once go through the FIFOs best, unless they fill them; then as many at once as pass.
    windows = [pieces, *(window for window in _halves(fifo_depth - 1) if window < pieces)]
    for window in windows:
        programs = _programs(lowering.nodes, trace.collective.num_ranks, pieces, window)
        plan = Plan(
            trace.name, instances.scaled, programs, _used_scratch(programs), fifo_depth,
            in_place=trace.in_place, out_of_place=trace.out_of_place,
        )  # fmt: skip
        try:
            execution_order(Graph(plan))
        except PlanError as error:
            if error.kind != "deadlock":
                raise
            problem = str(error)
        else:
            return plan
    raise ConfigError(f"{trace.name}: no order of its steps fits FIFOs of {fifo_depth} messages: {problem}")


def _used_scratch(programs: tuple[tuple[Program, ...], ...]) -> int:
    """Chunks of scratch that are left in use when stores that nobody reads are dropped."""
    steps = (step for of_rank in programs for program in of_rank for step in program.steps)
    uses = ((place, step.count) for step in steps for place in (step.src, step.dst) if place is not None)
    return max((place.offset + count for place, count in uses if place.buffer == "scratch"), default=0)


def _halves(number: int) -> list[int]:
    return [number >> shift for shift in range(number.bit_length())] or [1]


def _programs(nodes: list[Node], num_ranks: int, pieces: int, window: int) -> tuple[tuple[Program, ...], ...]:
    """Each rank's programs, one per channel, with `window` pieces on their way at once."""

    def key(node: Node) -> tuple[int, ...]:
        piece = node.instance % pieces
        return piece // window, node.depth, piece, node.number

    ordered = sorted(nodes, key=key)
    place = {node: at for at, node in enumerate(ordered)}
    lanes = _assign_lanes(ordered, place, pieces)
    channel_of = {lane: channel for channel, lane in enumerate(sorted(set(lanes.values())))}
    steps: list[list[list[Node]]] = [[[] for _ in channel_of] for _ in range(num_ranks)]
    at: dict[Node, Dependency] = {}
    for node in ordered:
        channel = channel_of[lanes[node]]
        at[node] = Dependency(channel, len(steps[node.rank][channel]))
        steps[node.rank][channel].append(node)
    return tuple(
        tuple(Program(channel, _steps(program, channel, at)) for channel, program in enumerate(programs))
        for programs in steps
    )


def _steps(nodes: list[Node], channel: int, at: dict[Node, Dependency]) -> tuple[Step, ...]:
    """A program's steps, each with the dependencies that those before it don't have."""
    steps, waited = [], {channel: len(nodes)}  # program: how many of its steps are known to be complete
    for node in nodes:
        latest: dict[int, int] = {}
        for program, step in (at[other] for other in node.after):
            if step >= waited.get(program, 0):
                latest[program] = max(step, latest.get(program, 0))
        waited |= {program: step + 1 for program, step in latest.items()}
        after = tuple(Dependency(program, step) for program, step in sorted(latest.items()))
        receive_from = None if node.receives is None else node.receives.rank
        send_to = None if node.sends is None else node.sends.rank
        steps.append(Step(node.op, node.src, node.dst, node.count, receive_from, send_to, after))
    return tuple(steps)


def _assign_lanes(ordered: list[Node], place: dict[Node, int], pieces: int) -> dict[Node, _Lane]:
    """A channel for each node. Nodes that pass a message on share one, as do all between whom order is kept.

    `place` numbers the nodes in their order. Two messages from one rank to another can share a channel if the one that
    is sent first is received first.
    """
    lanes: dict[Node, _Lane] = {}
    fifos: dict[tuple, list[tuple[int, int]]] = defaultdict(list)  # (place of send, of receive) of each, ascending
    for node in ordered:
        base = (node.instance // pieces, node.channel)
        if node in lanes:
            continue
        chain = [node]
        while (following := chain[-1].sends) is not None:
            chain.append(following)
        links = [((a.rank, b.rank), (place[a], place[b])) for a, b in zip(chain, chain[1:])]
        for number in itertools.count():
            lane = (*base, number)
            if all(_keeps_order(fifos[ends, lane], message) for ends, message in links):
                break
        for ends, message in links:
            bisect.insort(fifos[ends, lane], message)
        lanes |= dict.fromkeys(chain, lane)
    return lanes


def _keeps_order(messages: list[tuple[int, int]], message: tuple[int, int]) -> bool:
    at = bisect.bisect(messages, message)
    return (at == 0 or messages[at - 1][1] < message[1]) and (at == len(messages) or message[1] < messages[at][1])
