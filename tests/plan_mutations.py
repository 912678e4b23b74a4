"""Plans broken at random: steps dropped, swapped, repeated, redirected, dependencies removed, operations changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.language import Collective, Trace, chunk
from epcomm.collectives.plan import BUFFERS, Dependency, Location, Op, Plan, Program, Step
from epcomm.collectives.plan.msccl import from_msccl, to_msccl

#: A rank's programs as lists, which mutations change.
_Ranks = list[list[tuple[int, list[Step]]]]


@cache
def sources() -> list[Plan]:
    """Small right plans of all kinds, some whose programs wait for one another."""
    made = [
        ("ring", "allreduce", 3, {}), ("ring", "reduce_scatter", 3, {"pieces": 2}), ("ring", "broadcast", 4, {}),
        ("bidirectional_ring", "allgather", 3, {}), ("double_binary_tree", "allreduce", 4, {}),
        ("double_binary_tree", "reduce", 5, {}), ("recursive_doubling", "allreduce", 3, {}),
        ("halving_doubling", "allreduce", 4, {}), ("one_shot", "allreduce", 3, {}), ("two_shot", "broadcast", 3, {}),
        ("hierarchical", "allreduce", 4, {"ranks_per_node": 2}), ("pat", "allgather", 5, {}),
        ("swing", "reduce_scatter", 4, {}), ("bruck", "alltoall", 4, {}),
        ("two_level", "alltoall", 4, {"ranks_per_node": 2}), ("bruck", "allgather", 5, {}),
    ]  # fmt: skip
    plans = [ALGORITHMS[name].plan(collective, size, **options) for name, collective, size, options in made]
    plans += [switching_ring(3), switching_ring(4), switching_ring(3, pieces=2), gathering()]
    # by way of MSCCL: programs of one peer each, several of them on a channel, and nops
    return plans + [from_msccl(to_msccl(plan)) for plan in (ALGORITHMS["two_shot"].plan("allreduce", 3), gathering())]


def switching_ring(num_ranks: int, **arguments: int) -> Plan:
    """A ring that changes channel at each hop, so that its programs, which can't fuse steps, wait for one another."""
    with Trace("switching", Collective("allreduce", num_ranks, num_ranks)) as trace:
        for block in range(num_ranks):
            total = chunk((block + 1) % num_ranks, "input", block)
            for hop in range(2, num_ranks + 1):
                own = chunk((block + hop) % num_ranks, "input", block)
                total = own.reduce(total, "output", channel=hop % 2)
            for hop in range(1, num_ranks):
                total = total.copy((block + hop) % num_ranks, channel=hop % 2)
    return trace.plan(**arguments)


def gathering() -> Plan:
    """An allgather of three ranks by the first one, which waits for two programs at once."""
    with Trace("gathering", Collective("allgather", 3, 1)) as trace:
        chunk(0, "input").copy(0, "output", 0)
        for rank in (1, 2):
            chunk(rank, "input").copy(0, "output", rank, channel=rank)
        for rank in (1, 2):
            chunk(0, "output", 0, 3).copy(rank)
    return trace.plan()


def mutated(plan: Plan, mutation: str, generator: np.random.Generator) -> Plan | None:
    """The plan with one mutation at a random place; None if no place has what it changes."""
    ranks: _Ranks = [[(program.channel, list(program.steps)) for program in programs] for programs in plan.programs]
    places = [position[:3] for position, _ in plan.steps()]
    for at in generator.permutation(len(places)):
        if MUTATIONS[mutation](plan, ranks, places[at], generator):
            programs = tuple(
                tuple(Program(channel, tuple(steps)) for channel, steps in programs) for programs in ranks
            )
            return replace(plan, programs=programs)
    return None


def _shift_dependencies(ranks: _Ranks, rank: int, program: int, index: int, by: int) -> None:
    """After a step was put in (by=1) or taken out (by=-1) at an index: dependencies follow the steps they name."""
    def moved(dependency: Dependency) -> Dependency:
        if dependency.program != program or dependency.step < index:
            return dependency
        return dependency._replace(step=dependency.step + by)

    for channel_and_steps in ranks[rank]:
        steps = channel_and_steps[1]
        steps[:] = [
            replace(step, after=tuple(after for after in map(moved, step.after) if after.step >= 0)) for step in steps
        ]


def _drop(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    rank, program, index = at
    del ranks[rank][program][1][index]
    _shift_dependencies(ranks, rank, program, index, -1)
    return True


def _unsend(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    """A message, at both of its ends."""
    rank, program, index = at
    channel, steps = ranks[rank][program]
    if steps[index].op is not Op.SEND:
        return False
    peer = steps[index].send_to
    number = sum(step.send_to == peer for step in steps[:index])
    for other, (other_channel, receiving) in enumerate(ranks[peer]):
        received = [i for i, step in enumerate(receiving) if step.receive_from == rank and other_channel == channel]
        if len(received) > number and receiving[received[number]].op in (Op.RECV, Op.RECV_REDUCE_COPY):
            return _drop(plan, ranks, (peer, other, received[number]), generator) and _drop(plan, ranks, at, generator)
    return False


def _repeat(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    rank, program, index = at
    steps = ranks[rank][program][1]
    repeated = steps[index]
    _shift_dependencies(ranks, rank, program, index + 1, 1)
    steps.insert(index + 1, repeated)
    return True


def _swap(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    rank, program, index = at
    steps = ranks[rank][program][1]
    if index + 1 == len(steps):
        return False
    steps[index], steps[index + 1] = steps[index + 1], steps[index]
    return True


def _undepend(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    rank, program, index = at
    steps = ranks[rank][program][1]
    after = list(steps[index].after)
    if not after:
        return False
    del after[int(generator.integers(len(after)))]
    steps[index] = replace(steps[index], after=tuple(after))
    return True


def _redirect(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    """Another peer."""
    rank, program, index = at
    steps = ranks[rank][program][1]
    sides = [side for side in ("receive_from", "send_to") if getattr(steps[index], side) is not None]
    if not sides:
        return False
    side = sides[int(generator.integers(len(sides)))]
    others = [peer for peer in range(plan.num_ranks) if peer not in (rank, getattr(steps[index], side))]
    steps[index] = replace(steps[index], **{side: others[int(generator.integers(len(others)))]})
    return True


def _move(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    """Another chunk or buffer."""
    rank, program, index = at
    steps = ranks[rank][program][1]
    ends = [end for end in ("src", "dst") if getattr(steps[index], end) is not None]
    if not ends:
        return False
    end = ends[int(generator.integers(len(ends)))]
    old = getattr(steps[index], end)
    buffer = BUFFERS[int(generator.integers(3))]
    new = Location(buffer, max(0, old.offset + int(generator.integers(-1, 2))))
    if new == old:
        return False
    steps[index] = replace(steps[index], **{end: new})
    return True


def _rechannel(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    """Another channel for a program."""
    rank, program, _ = at
    channel, steps = ranks[rank][program]
    ranks[rank][program] = ((channel + 1) % max(plan.num_channels, 2), steps)
    return True


def _change(plan: Plan, ranks: _Ranks, at: tuple[int, int, int], generator: np.random.Generator) -> bool:
    """Another operation that uses the same fields or fewer, or another count."""
    rank, program, index = at
    steps = ranks[rank][program][1]
    step = steps[index]
    fitting = [
        op for op in Op
        if op not in (step.op, Op.NOP)
        and (not op.receives or step.receive_from is not None) and (not op.sends or step.send_to is not None)
        and (not op.reads or step.src is not None) and (not op.writes or step.dst is not None)
    ]  # fmt: skip
    if not fitting:
        steps[index] = replace(step, count=step.count + 1)
        return True
    op = fitting[int(generator.integers(len(fitting)))]
    steps[index] = replace(
        step, op=op, src=step.src if op.reads else None, dst=step.dst if op.writes else None,
        receive_from=step.receive_from if op.receives else None, send_to=step.send_to if op.sends else None,
    )  # fmt: skip
    return True


MUTATIONS: dict[str, Callable[[Plan, _Ranks, tuple[int, int, int], np.random.Generator], bool]] = {
    "drop": _drop, "unsend": _unsend, "repeat": _repeat, "swap": _swap, "undepend": _undepend,
    "redirect": _redirect, "move": _move, "rechannel": _rechannel, "change": _change,
}  # fmt: skip
