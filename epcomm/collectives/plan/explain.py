"""Why a plan is wrong, in words: the cycle of a deadlock, the two steps of a race."""

from __future__ import annotations

import numpy as np

from epcomm.collectives.plan.graph import Graph
from epcomm.errors import PlanError

_MAX_STEPS = 12  # of a cycle, in a message


def placed(in_place: bool) -> str:
    return "in place" if in_place else "out of place"


def explain_deadlock(graph: Graph, is_stuck: np.ndarray) -> PlanError:
    """The error for steps that can't run: a cycle of steps of which each waits for the next."""
    reasons = (  # of the kinds of edges, in their order
        "comes after {} in its program",
        "waits for {}",
        "waits for a message from {}",
        f"waits for a free slot of {graph.plan.fifo_depth}, until {{}}",
    )
    waits: dict[int, tuple[int, str]] = {}
    for (earlier, later), reason in zip(graph.edges(), reasons):
        is_waiting = is_stuck[earlier] & is_stuck[later]
        for first, then in zip(earlier[is_waiting].tolist(), later[is_waiting].tolist()):
            waits[then] = (first, reason)
    number = int(np.flatnonzero(is_stuck)[0])
    path: dict[int, None] = {}
    while number not in path:  # each stuck step waits for a stuck one
        path[number] = None
        number = waits[number][0]
    steps = list(path)
    cycle = steps[steps.index(number) :]
    parts = [f"{graph.describe(i)} {waits[i][1].format(graph.describe(waits[i][0]))}" for i in cycle[:_MAX_STEPS]]
    parts += [f"and so on, {len(cycle)} steps"] if len(cycle) > _MAX_STEPS else []
    other = graph.position(waits[number][0])
    message = f"plan {graph.plan.name}: deadlock: {'; '.join(parts)}"
    return PlanError("deadlock", message, graph.position(number), other)


def explain_race(graph: Graph, first: int, second: int, in_place: bool) -> PlanError:
    """The error for two steps that access the same chunk in no order."""
    problem = f"nothing orders it and {graph.describe(first)}, which accesses the same chunk ({placed(in_place)})"
    return graph.error("race", problem, second, first)
