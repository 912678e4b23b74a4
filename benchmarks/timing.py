"""Timing between ranks: contestants interleaved, the slowest rank counts, results checked before and after.

In every round the contestants run in a new random order that all ranks share. Each is timed at its first call after
one of another family (cold: what that moved has displaced its data from the caches) and at a second call right after
(warm). `hot_loop` times calls back to back, without a barrier between them.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

clock = time.perf_counter_ns

WHOLE = "round_trip"
_CALIBRATION_ROUNDS = 3
_HOPELESS = 1.5  # a variant this much slower than the best of its library is not measured further


@dataclass(frozen=True)
class Step:
    """One part of an iteration. Parts that are not timed are followed by a barrier."""

    label: str
    call: Callable[[], Any]
    timed: bool = True


@dataclass
class Contestant:
    """Something to time. Contestants of one `library` are variants of which the best counts.

    `poison` spoils the outputs, `check` raises unless the outputs of the iteration since are right.
    """

    name: str
    library: str
    steps: Sequence[Step]
    poison: Callable[[], Any]
    check: Callable[[], None]

    @property
    def family(self) -> str:
        """The library's first word: contestants of one family share data or state, and would warm it for each other."""
        return self.library.split()[0]

    @property
    def labels(self) -> list[str]:
        """Labels of the timed steps."""
        return [step.label for step in self.steps if step.timed]


@dataclass
class Timings:
    """Nanoseconds by step label: one sample per iteration, each the maximum over ranks.

    `WHOLE` is the sum of an iteration's steps.
    """

    cold: dict[str, np.ndarray] = field(default_factory=dict)
    warm: dict[str, np.ndarray] = field(default_factory=dict)
    dropped: bool = False  # a slower variant: only the calibration was measured


@contextmanager
def quiet_interpreter() -> Iterator[None]:
    """No garbage collection inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def iterate(world: Any, contestant: Contestant) -> list[int]:
    """One iteration from a barrier on; this rank's nanoseconds per timed step."""
    elapsed = []
    world.gate.wait()
    for step in contestant.steps:
        if step.timed:
            start = clock()
            step.call()
            elapsed.append(clock() - start)
        else:
            step.call()
            world.gate.wait()
    return elapsed


def verify(world: Any, contestant: Contestant) -> None:
    """Run one iteration on spoiled outputs and check them; raises on every rank if any rank's output is wrong."""
    world.gate.wait()
    contestant.poison()
    iterate(world, contestant)
    problem = None
    try:
        contestant.check()
    except AssertionError as error:
        problem = f"{contestant.name}, rank {world.rank}: {error}"
    problems = [text for text in world.gather(problem) if text]
    if problems:
        raise AssertionError("; ".join(problems))


def interleave(
    world: Any,
    contestants: Sequence[Contestant],
    *,
    budget: float,
    min_rounds: int = 5,
    max_rounds: int = 60,
    warm: bool = True,
    seed: int = 0,
) -> dict[str, Timings]:
    """Time all contestants for about `budget` seconds, checking each before and after."""
    for contestant in contestants:
        verify(world, contestant)
    order = random.Random(seed)
    result: dict[str, Timings] = {}
    with quiet_interpreter():
        begin = clock()
        calibration = _rounds(world, contestants, 1, order, warm=False)
        calibration_rounds = 1
        if world.gather(clock() - begin)[0] < budget * 1e9 / 4:
            begin = clock()
            calibration = _rounds(world, contestants, _CALIBRATION_ROUNDS, order, warm=False)
            calibration_rounds = _CALIBRATION_ROUNDS
        active = _worth_measuring(contestants, calibration)
        share = sum(calibration[item.name].cold[WHOLE].sum() for item in active) / sum(
            timing.cold[WHOLE].sum() for timing in calibration.values()
        )
        per_round = (clock() - begin) / 1e9 / calibration_rounds * share * (2 if warm else 1)
        rounds = int(min(max_rounds, max(min_rounds, budget / per_round)))
        rounds = world.gather(rounds)[0]
        for contestant in contestants:
            if contestant not in active:
                result[contestant.name] = Timings(calibration[contestant.name].cold, {}, dropped=True)
        result |= _rounds(world, active, rounds, order, warm=warm)
    for contestant in active:
        verify(world, contestant)
    return result


def _rounds(
    world: Any, contestants: Sequence[Contestant], rounds: int, order: random.Random, warm: bool
) -> dict[str, Timings]:
    cold: dict[str, list[list[int]]] = {item.name: [] for item in contestants}
    again: dict[str, list[list[int]]] = {item.name: [] for item in contestants}
    previous = ""
    for _ in range(rounds):
        for contestant in order.sample(list(contestants), len(contestants)):
            strangers = [item for item in contestants if item.family != contestant.family]
            if contestant.family == previous and strangers:
                iterate(world, order.choice(strangers))
            previous = contestant.family
            cold[contestant.name].append(iterate(world, contestant))
            if warm:
                again[contestant.name].append(iterate(world, contestant))
    result = {}
    for contestant in contestants:
        labels = contestant.labels
        result[contestant.name] = Timings(
            _slowest_rank(world, labels, cold[contestant.name]),
            _slowest_rank(world, labels, again[contestant.name]) if warm else {},
        )
    return result


def _slowest_rank(world: Any, labels: list[str], samples: list[list[int]]) -> dict[str, np.ndarray]:
    """Per label the maximum over ranks in each iteration; the whole is summed on each rank first."""
    mine = np.asarray(samples, dtype=np.int64)
    mine = np.concatenate([mine, mine.sum(axis=1, keepdims=True)], axis=1)
    slowest = np.max(np.stack(world.gather(mine)), axis=0)
    return dict(zip([*labels, WHOLE], slowest.T, strict=True))


def _worth_measuring(contestants: Sequence[Contestant], calibration: dict[str, Timings]) -> list[Contestant]:
    """All contestants but variants that are clearly slower than the best of their library."""
    best: dict[str, float] = {}
    for contestant in contestants:
        fastest = float(calibration[contestant.name].cold[WHOLE].min())
        best[contestant.library] = min(fastest, best.get(contestant.library, fastest))
    return [item for item in contestants if calibration[item.name].cold[WHOLE].min() <= _HOPELESS * best[item.library]]


@dataclass
class HotLoop:
    """Back-to-back calls: nanoseconds per call with the clock read around every call, and the mean without."""

    samples: np.ndarray
    mean: float


def hot_loop(
    world: Any, call: Callable[[], Any], iterations: int = 1000, warmup: int = 50, repeats: int = 3
) -> HotLoop:
    """Call `call` in a tight loop on all ranks.

    Samples and mean are the maximum over ranks; the mean is the median of the repeats.
    """
    warmup = min(warmup, iterations)
    for _ in range(warmup):
        call()
    with quiet_interpreter():
        means = []
        for _ in range(repeats):
            world.gate.wait()
            start = clock()
            for _ in range(iterations):
                call()
            means.append((clock() - start) / iterations)
        marks = np.empty(iterations + 1, dtype=np.int64)
        world.gate.wait()
        marks[0] = clock()
        for index in range(1, iterations + 1):
            call()
            marks[index] = clock()
    elapsed = np.max(np.stack(world.gather(np.diff(marks))), axis=0)
    slowest = np.max(np.stack(world.gather(np.asarray(means))), axis=0)
    return HotLoop(elapsed, float(np.median(slowest)))


def statistics(nanoseconds: np.ndarray) -> dict[str, float]:
    """Microsecond percentiles of the samples."""
    p50, p95, p99 = np.percentile(nanoseconds, [50, 95, 99]) / 1e3
    return {
        "p50_us": round(float(p50), 3),
        "p95_us": round(float(p95), 3),
        "p99_us": round(float(p99), 3),
        "min_us": round(float(nanoseconds.min()) / 1e3, 3),
        "samples": len(nanoseconds),
    }
