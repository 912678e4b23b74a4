"""What plans are checked against: collectives by their definition, on runs in many orders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from epcomm.collectives.plan import Collective, Plan, Position
from epcomm.collectives.plan.reference import Scheduler, at_random, execute, favouring, in_turn, starving


def inputs_of(collective: Collective, seed: int = 0) -> list[np.ndarray]:
    """A random int64 [input_chunks, 2] per rank, so large that no other sum is the same."""
    generator = np.random.default_rng(seed)
    sizes = [collective.input_chunks(rank) for rank in range(collective.num_ranks)]
    return [generator.integers(-(2**55), 2**55, (size, 2)) for size in sizes]


def wanted_outputs(collective: Collective, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What each rank must end with, from the definition of the collective."""
    ranks, unit, root = range(collective.num_ranks), collective.num_chunks, collective.root
    blocks = [slice(rank * unit, (rank + 1) * unit) for rank in ranks]
    if collective.kind == "broadcast":
        return [inputs[root] for _ in ranks]
    if collective.kind == "allgather":
        return [np.concatenate(inputs) for _ in ranks]
    if collective.kind == "alltoall":
        return [np.concatenate([inputs[source][blocks[rank]] for source in ranks]) for rank in ranks]
    total = sum(inputs)
    if collective.kind == "reduce":
        return [total if rank == root else total[:0] for rank in ranks]
    return [total[blocks[rank]] if collective.kind == "reduce_scatter" else total for rank in ranks]


def wrong_ranks(plan: Plan, in_place: bool, scheduler: Scheduler = in_turn, seed: int = 0) -> list[int]:
    """The ranks that end with a wrong output, or with an input that changed though it is no output."""
    inputs = inputs_of(plan.collective, seed)
    wanted = wanted_outputs(plan.collective, inputs)
    run = execute(plan, inputs, in_place=in_place, scheduler=scheduler)
    wrong = []
    for rank, (before, after) in enumerate(zip(inputs, run.inputs)):
        is_result = np.zeros(len(before), bool)
        if in_place:
            input_at, output_at = plan.collective.overlay(rank)
            first = output_at - input_at
            is_result[max(first, 0) : max(first + len(wanted[rank]), 0)] = True
        if not np.array_equal(run.outputs[rank], wanted[rank]) or (before != after)[~is_result].any():
            wrong.append(rank)
    return wrong


def adversaries(plan: Plan, seed: int = 0) -> list[Scheduler]:
    """Schedulers that differ: in turn, at random, some ranks far ahead of others, single steps late."""
    ranks = range(plan.num_ranks)
    positions = [position for position, _ in plan.steps()]
    late = [positions[at] for at in np.random.default_rng(seed).integers(0, len(positions), 2)] if positions else []
    return [
        in_turn,
        at_random(seed),
        favouring(seed, ranks),
        favouring(seed, ranks[::-1]),
        *(starving(seed, position) for position in late),
    ]


def assert_runs_right(plan: Plan, schedulers: Iterable[Scheduler] | None = None) -> None:
    """Runs the plan in every placement that it is meant for, under every scheduler."""
    for in_place in plan.placements:
        for number, scheduler in enumerate(adversaries(plan) if schedulers is None else schedulers):
            wrong = wrong_ranks(plan, in_place, scheduler, number)
            assert not wrong, f"{plan.name}, in_place={in_place}, scheduler {number}: wrong on ranks {wrong}"


def completed_first(plan: Plan, late: Position, other: Position) -> bool:
    """Holding `late` back as long as anything else can go on, is `other` complete before it? FIFOs are deep."""
    inputs = inputs_of(plan.collective)
    trace = execute(plan, inputs, in_place=plan.in_place, scheduler=starving(0, late), fifo_depth=10**9).trace
    return trace.index(other) < trace.index(late)
