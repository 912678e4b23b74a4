"""Runs a plan in one thread on numpy arrays, in any order that its rules allow: what a proof is checked against.

It shares no code with `verify`. Who goes next is a scheduler's choice, made between any two of a step's halves: a step
starts (and reads its operands) and, later, completes (and writes, sends, and frees the slot it received from).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epcomm.collectives.plan.plan import Location, Plan, Position, Step
from epcomm.errors import ConfigError, PlanError

#: Chooses which of the programs that can go on does, by its place in the list of their next steps' positions.
Scheduler = Callable[[Sequence[Position]], int]


def in_turn(runnable: Sequence[Position]) -> int:
    """The program that has waited longest."""
    return 0


def at_random(seed: int) -> Scheduler:
    """Any, by a generator of this seed."""
    choose = random.Random(seed)
    return lambda runnable: choose.randrange(len(runnable))


def starving(seed: int, *starved: Position) -> Scheduler:
    """Holds back these steps, and with them their programs, while anything else can run; otherwise at random."""
    choose, held = random.Random(seed), set(starved)

    def scheduler(runnable: Sequence[Position]) -> int:
        others = [at for at, position in enumerate(runnable) if position not in held]
        return choose.choice(others) if others else choose.randrange(len(runnable))

    return scheduler


def favouring(seed: int, ranks: Sequence[int]) -> Scheduler:
    """The rank that comes first in `ranks` and can run, so that others fall behind as far as the plan lets them."""
    choose, place = random.Random(seed), {rank: at for at, rank in enumerate(ranks)}

    def scheduler(runnable: Sequence[Position]) -> int:
        return min(range(len(runnable)), key=lambda at: (place[runnable[at].rank], choose.random()))

    return scheduler


@dataclass
class _Worker:
    """One program on its way: its next step, and what that has read if it has started."""

    rank: int
    number: int
    channel: int
    steps: tuple[Step, ...]
    next: int = 0
    started: bool = False
    value: np.ndarray | None = None

    @property
    def step(self) -> Step:
        return self.steps[self.next]

    @property
    def position(self) -> Position:
        return Position(self.rank, self.number, self.next, self.channel)


@dataclass
class _Fifo:
    messages: deque = field(default_factory=deque)
    taken: int = 0  # slots: of messages that are there or on their way


@dataclass(frozen=True)
class Outcome:
    """What memory holds after a run, [chunks, ...] per rank, and all steps in the order in which they were complete."""

    outputs: list[np.ndarray]
    inputs: list[np.ndarray]
    trace: list[Position]


def execute(
    plan: Plan,
    inputs: Sequence[np.ndarray],
    *,
    reduce: Callable[[Any, Any], Any] = np.add,
    in_place: bool = False,
    scheduler: Scheduler = in_turn,
    fifo_depth: int | None = None,
) -> Outcome:
    """Runs a plan on a copy of `inputs`: an array [input_chunks, ...] per rank, all of one dtype.

    `reduce(local operand, other)` is one sum. In place, input and output share memory. `fifo_depth` replaces the
    plan's. PlanError if programs wait for one another ("deadlock"), if a step is out of range ("range"), or if messages
    are left or don't fit ("message").
    """
    if len(inputs) != plan.num_ranks:
        raise ConfigError(f"plan {plan.name}: inputs: wanted {plan.num_ranks} arrays, got {len(inputs)}")
    run = _Run(plan, inputs, reduce, in_place, plan.fifo_depth if fifo_depth is None else fifo_depth)
    run.go(scheduler)
    collective, ranks = plan.collective, range(plan.num_ranks)
    return Outcome(
        [run.chunks(rank, Location("output", 0), collective.output_chunks(rank)) for rank in ranks],
        [run.chunks(rank, Location("input", 0), collective.input_chunks(rank)) for rank in ranks],
        run.trace,
    )


class _Run:
    """Memory, FIFOs and who waits for what."""

    def __init__(
        self, plan: Plan, inputs: Sequence[Any], reduce: Callable[[Any, Any], Any], in_place: bool, fifo_depth: int
    ):
        self._plan, self._reduce, self._in_place, self._depth = plan, reduce, in_place, fifo_depth
        self._memory = [self._memory_of(rank, np.asarray(given)) for rank, given in enumerate(inputs)]
        self._fifos: dict[tuple[int, int, int], _Fifo] = {}
        self._complete = [[0] * len(programs) for programs in plan.programs]
        self._waiting: dict[tuple, list[_Worker]] = {}
        self.trace: list[Position] = []

    def go(self, scheduler: Scheduler) -> None:
        """Runs all programs to their ends."""
        runnable: list[_Worker] = []
        for rank, programs in enumerate(self._plan.programs):
            for number, program in enumerate(programs):
                if program.steps:
                    self._go_on(_Worker(rank, number, program.channel, program.steps), runnable)
        while runnable:
            worker = runnable.pop(scheduler([worker.position for worker in runnable]))
            if not worker.started:
                if self._lacks(worker) is None:
                    self._start(worker)
                # else: another program took what this one could have had
                self._go_on(worker, runnable)
                continue
            for awaited in self._finish(worker):
                for woken in self._waiting.pop(awaited, ()):
                    self._go_on(woken, runnable)
            if worker.next < len(worker.steps):
                self._go_on(worker, runnable)
        blocked = [worker for waiting in self._waiting.values() for worker in waiting]
        if blocked:
            text = "; ".join(f"{worker.position} ({worker.step})" for worker in blocked[:8])
            raise PlanError("deadlock", f"plan {self._plan.name}: these wait forever: {text}", blocked[0].position)
        if any(fifo.messages for fifo in self._fifos.values()):
            raise PlanError("message", f"plan {self._plan.name}: messages are left")

    def _memory_of(self, rank: int, given: np.ndarray) -> np.ndarray:
        first, _, _, size = self._plan.bases(rank, self._in_place)
        wanted = self._plan.collective.input_chunks(rank)
        if len(given) != wanted:
            raise ConfigError(f"plan {self._plan.name}: inputs[{rank}]: wanted {wanted} chunks, got {len(given)}")
        memory = np.full((size, *given.shape[1:]), 99, given.dtype)  # 99: what was never written
        memory[first : first + wanted] = given
        return memory

    def _go_on(self, worker: _Worker, runnable: list[_Worker]) -> None:
        """Makes a worker runnable, or has it wait for the first thing that its next step lacks."""
        awaited = None if worker.started else self._lacks(worker)
        if awaited is None:
            runnable.append(worker)
        else:
            self._waiting.setdefault(awaited, []).append(worker)

    def _lacks(self, worker: _Worker) -> tuple | None:
        step, rank = worker.step, worker.rank
        for dependency in step.after:
            complete = self._complete[rank]
            if not 0 <= dependency.program < len(complete) or complete[dependency.program] <= dependency.step:
                return ("step", rank, *dependency)
        if step.receive_from is not None:
            key = (step.receive_from, rank, worker.channel)
            if not self._fifo(key).messages:
                return ("message", *key)
        if step.send_to is not None:
            key = (rank, step.send_to, worker.channel)
            if self._fifo(key).taken >= self._depth:
                return ("slot", *key)
        return None

    def _start(self, worker: _Worker) -> None:
        """Reads the operands and takes the slot."""
        step, value = worker.step, None
        if step.src is not None:
            operand = self.chunks(worker.rank, step.src, step.count)
            if step.dst is not None and _overlap_in_part(operand, self.chunks(worker.rank, step.dst, step.count)):
                problem = "source and destination overlap: what it does depends on how it is executed"
                raise PlanError("range", f"{worker.position} ({step}): {problem}", worker.position)
            value = operand.copy()
        if step.receive_from is not None:
            message = self._fifo((step.receive_from, worker.rank, worker.channel)).messages.popleft()
            if len(message) != step.count:
                raise PlanError("message", f"{worker.position} ({step}) got {len(message)} chunks", worker.position)
            value = message if value is None else self._reduce(value, message)
        elif step.op.reduces and step.dst is not None:
            value = self._reduce(self.chunks(worker.rank, step.dst, step.count), value)
        if step.send_to is not None:
            self._fifo((worker.rank, step.send_to, worker.channel)).taken += 1
        worker.value, worker.started = value, True

    def _finish(self, worker: _Worker) -> list[tuple]:
        """Writes and sends; returns what others may have waited for."""
        step, rank = worker.step, worker.rank
        news: list[tuple] = [("step", rank, worker.number, worker.next)]
        if step.dst is not None:
            self.chunks(rank, step.dst, step.count)[:] = worker.value
        if step.receive_from is not None:
            key = (step.receive_from, rank, worker.channel)
            self._fifo(key).taken -= 1
            news.append(("slot", *key))
        if step.send_to is not None:
            key = (rank, step.send_to, worker.channel)
            self._fifo(key).messages.append(worker.value)
            news.append(("message", *key))
        self._complete[rank][worker.number] += 1
        self.trace.append(worker.position)
        worker.next, worker.started, worker.value = worker.next + 1, False, None
        return news

    def _fifo(self, key: tuple[int, int, int]) -> _Fifo:
        return self._fifos.setdefault(key, _Fifo())

    def chunks(self, rank: int, location: Location, count: int) -> np.ndarray:
        """A view of a rank's memory; PlanError ("range") if it isn't in the buffer."""
        bases = self._plan.bases(rank, self._in_place)
        if location.offset + count > self._plan.buffer_chunks(location.buffer, rank):
            raise PlanError("range", f"plan {self._plan.name}: rank {rank}: {location} x {count} is out of range")
        first = bases[("input", "output", "scratch").index(location.buffer)] + location.offset
        return self._memory[rank][first : first + count]


def _overlap_in_part(a: np.ndarray, b: np.ndarray) -> bool:
    return np.shares_memory(a, b) and a.ctypes.data != b.ctypes.data
