"""The proof that a plan does its collective, on every run: whatever the ranks' speeds, at the declared FIFO depth.

In this order, each only for plans that passed the ones before:

* range: steps name ranks, chunks and steps that exist; a step's source and destination are the same chunks or none;
* message: each FIFO has as many sends as receives, pairwise of one count, and one program on each side;
* deadlock: program order, dependencies, messages and free slots put all steps in an order. Who waits for what depends
  on the plan alone, so an order that exists is one that every run can follow;
* race: two accesses to a chunk, one of them a write, are ordered by program order, dependencies and messages. Slots
  don't count: a deeper FIFO may not break a plan;
* result: run on symbols, each rank's output holds what the collective wants, every contribution exactly once, and what
  is input but not output holds what it held before.

In place, input and output are the same memory in the last two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epcomm.collectives.plan import passes
from epcomm.collectives.plan.explain import explain_deadlock, explain_race
from epcomm.collectives.plan.graph import Graph
from epcomm.collectives.plan.plan import Plan
from epcomm.collectives.plan.symbols import Symbols


@dataclass(frozen=True)
class Proof:
    """What holds for a plan besides that it is right.

    `roundings`: how often a result of 16-bit sums is rounded. That is the largest number of sums that an input goes
    through on its way to an output; once, if there are any, with `Plan.wide_sums`. `same_bits`: all ranks' results are
    the same sums in the same order, up to the order of a sum's two operands. `num_messages` and `num_chunks_sent` are
    of all ranks together.
    """

    roundings: int
    same_bits: bool
    num_messages: int
    num_chunks_sent: int


def verify(plan: Plan) -> Proof:
    """Proves that the plan is right for every placement it is meant for; PlanError naming steps if it isn't."""
    graph = Graph(plan)
    order = execution_order(graph)
    for in_place in plan.placements:
        steps = graph.addressed(in_place)
        _check_races(graph, steps, order, in_place)
        symbols = Symbols(graph, steps, order, in_place)
        symbols.check()
    is_sent = (graph.flags & passes.SENDS) > 0
    roundings = min(symbols.roundings, 1) if plan.wide_sums else symbols.roundings
    return Proof(roundings, symbols.same_bits, int(is_sent.sum()), int(graph.count[is_sent].sum()))


def execution_order(graph: Graph) -> np.ndarray:
    """All steps in an order in which they can run, int64 [num_steps]; PlanError if there is none."""
    earlier, later = (np.concatenate(ends).astype(np.int64) for ends in zip(*graph.edges()))
    later = later[np.argsort(earlier, kind="stable")]
    first_later = np.zeros(graph.num_steps + 1, np.int64)
    first_later[1:] = np.cumsum(np.bincount(earlier, minlength=graph.num_steps))
    num_earlier = np.bincount(later, minlength=graph.num_steps).astype(np.int64)
    order = np.empty(graph.num_steps, np.int64)
    num_placed = passes.order_of()(first_later, later, num_earlier, order)
    if num_placed < graph.num_steps:
        raise explain_deadlock(graph, num_earlier > 0)
    return order


def _check_races(graph: Graph, steps: np.ndarray, order: np.ndarray, in_place: bool) -> None:
    find_race = passes.race_of()
    for rank in _ranks_that_share(graph, steps, in_place):
        num_programs, size = len(graph.plan.programs[rank]), graph.plan.bases(rank, in_place)[-1]
        clocks = np.zeros((graph.num_steps, num_programs), np.int32)
        last_write, last_read = np.full(size, -1), np.full((size, num_programs), -1)
        pair = np.empty(2, np.int64)
        if find_race(steps, graph.dependencies, order, rank, clocks, last_write, last_read, pair):
            raise explain_race(graph, int(pair[0]), int(pair[1]), in_place)


def _ranks_that_share(graph: Graph, steps: np.ndarray, in_place: bool) -> list[int]:
    """The ranks that have a chunk which several programs use and one of them writes: on others nothing can race."""
    memory_of_rank = graph.memory_of_rank(in_place)
    users = np.full(memory_of_rank[-1], passes.NOBODY, np.int64)
    is_written = np.zeros(memory_of_rank[-1], np.bool_)
    passes.users_of()(steps, memory_of_rank, users, is_written)
    chunks = np.flatnonzero((users == passes.SEVERAL) & is_written)
    return np.unique(np.searchsorted(memory_of_rank, chunks, side="right") - 1).tolist()
