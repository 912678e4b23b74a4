"""A plan whose programs have one peer to send to, one to receive from, and one dependency per step, as MSCCL's have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from epcomm.collectives.plan.plan import Dependency, Op, Plan, Position, Program, Step
from epcomm.errors import ConfigError

_Side = tuple[str, int]  # ("from" or "to", peer)


def split_by_peers(plan: Plan) -> Plan:
    """An equal plan: a program with several peers becomes several, which wait for each other where it changed peers.

    ConfigError naming a step that receives from one peer and sends to another, if one of them is tied to a third.
    """
    return replace(plan, programs=tuple(_split_rank(plan, rank) for rank in range(plan.num_ranks)))


def _split_rank(plan: Plan, rank: int) -> tuple[Program, ...]:
    # For each of the rank's programs: the parts' first number, and which part each step is in.
    parts: list[tuple[int, list[int], int]] = []
    for number, program in enumerate(plan.programs[rank]):
        first = sum(count for _, _, count in parts)
        part_of_step, count = _parts(plan.name, rank, number, program)
        parts.append((first, part_of_step, count))
    # Where each step goes, nops included; then the steps, with dependencies on those places.
    new: list[list[Step]] = [[] for _ in range(sum(count for _, _, count in parts))]
    moved = _moved(plan.programs[rank], parts)
    for number, program in enumerate(plan.programs[rank]):
        first, part_of_step, _ = parts[number]
        for index, step in enumerate(program.steps):
            awaited = [moved[dependency] for dependency in _waits(number, index, step, part_of_step)]
            to = new[first + part_of_step[index]]
            to += [Step(Op.NOP, after=(dependency,)) for dependency in awaited[:-1]]
            to.append(replace(step, after=tuple(awaited[-1:])))
    channels = [
        program.channel for program, (_, _, count) in zip(plan.programs[rank], parts) for _ in range(count)
    ]
    return tuple(Program(channel, tuple(steps)) for channel, steps in zip(channels, new))


def _waits(number: int, index: int, step: Step, part_of_step: list[int]) -> list[Dependency]:
    """What a step has to wait for: its dependencies, and the step before it in its program, if in another part."""
    waits = list(step.after)
    if index > 0 and part_of_step[index - 1] != part_of_step[index]:
        waits.append(Dependency(number, index - 1))
    return waits


def _moved(programs: tuple[Program, ...], parts: list[tuple[int, list[int], int]]) -> dict[Dependency, Dependency]:
    """Where each step of a rank is among the parts."""
    moved = {}
    for number, (program, (first, part_of_step, count)) in enumerate(zip(programs, parts)):
        length = [0] * count
        for index, step in enumerate(program.steps):
            part = part_of_step[index]
            length[part] += max(len(_waits(number, index, step, part_of_step)), 1)
            moved[Dependency(number, index)] = Dependency(first + part, length[part] - 1)
    return moved


def _parts(name: str, rank: int, number: int, program: Program) -> tuple[list[int], int]:
    """The part that each step of a program is in, by its peers, and how many parts there are. A local step stays."""
    group_of: dict[_Side, set[_Side]] = {}  # sides that one step has tied together
    for index, step in enumerate(program.steps):
        tied = set(_sides(step))
        tied = tied.union(*(group_of.get(side, {side}) for side in tied))
        group_of |= dict.fromkeys(tied, tied)
        if len({end for end, _ in tied}) < len(tied):
            at = Position(rank, number, index, program.channel)
            raise ConfigError(f"plan {name}: {at} ({step}): a step before it ties its peers to others")
    ends_of_part: list[set[str]] = [set()]
    part_of_side: dict[_Side, int] = {}
    for side, group in group_of.items():
        if side not in part_of_side:
            ends = {end for end, _ in group}
            part = next((at for at, taken in enumerate(ends_of_part) if not taken & ends), len(ends_of_part))
            if part == len(ends_of_part):
                ends_of_part.append(set())
            ends_of_part[part] |= ends
            part_of_side |= dict.fromkeys(group, part)
    part_of_step, part = [], 0
    for step in program.steps:
        part = next((part_of_side[side] for side in _sides(step)), part)
        part_of_step.append(part)
    return part_of_step, len(ends_of_part)


def _sides(step: Step) -> Iterator[_Side]:
    if step.receive_from is not None:
        yield "from", step.receive_from
    if step.send_to is not None:
        yield "to", step.send_to
