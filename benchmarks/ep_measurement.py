"""What each rank does to measure expert-parallel cases: contestants, timing, rows."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from benchmarks.competitors.gloo_ep import gloo_contestants
from benchmarks.competitors.mpi_ep import mpi_contestants
from benchmarks.competitors.row_buffers import RowBuffers
from benchmarks.epcomm_ep import LIBRARY, EpcommEp
from benchmarks.roofline import IN_CACHE_BYTES, OUT_OF_CACHE_BYTES, Rooflines
from benchmarks.timing import WHOLE, Contestant, Timings, hot_loop, interleave, statistics
from benchmarks.workload import Case, Workload

_WARM_LIMIT_BYTES = 64 << 20  # a payload that no cache holds is as cold the second time
_PHASE_ITERATIONS = 15
_HOT_LIMIT_SECONDS = 3.0


@dataclass(frozen=True)
class Settings:
    """How long and what to measure in each case; `hot_calls` 0 leaves the hot loops out."""

    budget: float = 6.0
    hot_calls: int = 0
    phases: bool = True
    elsewhere: bool = True


def measure_cases(world: Any, cases: list[Case], settings: Settings) -> None:
    """The bench function that every rank runs; rank 0 emits rows as they come."""
    rooflines = Rooflines(world)
    row_sizes = sorted({case.row_bytes for case in cases})
    for row_bytes in row_sizes:
        rooflines.at(row_bytes, IN_CACHE_BYTES)
        rooflines.at(row_bytes, OUT_OF_CACHE_BYTES)
    for index, case in enumerate(cases):
        world.progress(index, len(cases), case.label())
        reason = world.gather(_too_large(case))[0]
        if reason:
            world.emit("skipped", {"case": case.as_dict(), "reason": reason})
            continue
        _measure(world, case, settings, rooflines)
    world.progress(len(cases), len(cases), "done")


def _measure(world: Any, case: Case, settings: Settings, rooflines: Rooflines) -> None:
    workload = Workload(case, world.rank)
    payload = workload.payload_rows() * case.row_bytes
    roofline = rooflines.at(case.row_bytes, int(payload))
    with ExitStack() as stack:
        contestants: list[Contestant] = []
        subject: EpcommEp | None = None
        if world.epcomm is not None:
            handle = world.epcomm.expert_parallel(
                num_experts=case.experts,
                topk=case.topk,
                hidden=case.hidden,
                max_tokens=case.tokens,
                dtype=workload.dtype,
                mode=case.mode,
                layout=case.layout,
                **_memory_options(case),
            )
            stack.callback(handle.close)
            subject, elsewhere = EpcommEp(handle, workload), EpcommEp(handle, workload, elsewhere=True)
            for item in (subject, elsewhere):
                stack.callback(item.release)
            contestants.append(subject.contestant())
            if settings.elsewhere:
                contestants.append(elsewhere.contestant())
        contestants += _competitors(world, workload)
        if contestants:
            timings = interleave(world, contestants, budget=settings.budget, warm=payload <= _WARM_LIMIT_BYTES)
            for contestant in contestants:
                _emit_timings(world, case, contestant, timings[contestant.name], payload, roofline)
        if subject is not None and settings.hot_calls:
            _emit_hot_loop(world, case, subject, settings.hot_calls, payload)
        if subject is not None and settings.phases:
            _emit_phases(world, case, subject)


def _competitors(world: Any, workload: Workload) -> list[Contestant]:
    """Those that are there, on shared buffers."""
    case = workload.case
    sums = max(case.tokens, workload.max_rank_rows)
    buffers = RowBuffers(workload.max_expert_rows, sums, case.hidden, workload.dtype)
    contestants: list[Contestant] = []
    if "gloo" not in world.absent:
        contestants += gloo_contestants(workload, buffers)
    if world.mpi is not None:
        contestants += mpi_contestants(world.mpi, workload, buffers)
    return contestants


def _emit_timings(
    world: Any, case: Case, contestant: Contestant, timings: Timings, payload: float, roofline: dict
) -> None:
    """Rows of one contestant: every phase, cold and warm. Dispatch writes the payload once, combine reads it once."""
    for temperature, samples in (("cold", timings.cold), ("warm", timings.warm)):
        for phase, nanoseconds in samples.items():
            world.emit(
                "row",
                results.row(
                    case.as_dict(),
                    case.label(),
                    contestant.name,
                    contestant.library,
                    phase,
                    temperature,
                    statistics(nanoseconds),
                    payload_bytes=payload * (2 if phase == WHOLE else 1),
                    roofline=roofline,
                    dropped=timings.dropped,
                ),
            )


def _emit_hot_loop(world: Any, case: Case, subject: EpcommEp, calls: int, payload: float) -> None:
    """Back-to-back round trips, fewer where they are long."""
    estimate = hot_loop(world, subject.round_trip, iterations=10, warmup=10, repeats=1).mean / 1e9
    calls = int(max(20, min(calls, _HOT_LIMIT_SECONDS / estimate)))
    loop = hot_loop(world, subject.round_trip, iterations=world.gather(calls)[0])
    numbers = statistics(loop.samples) | {"mean_us": round(loop.mean / 1e3, 3)}
    world.emit(
        "row",
        results.row(case.as_dict(), case.label(), LIBRARY, LIBRARY, WHOLE, "hot", numbers, payload_bytes=2 * payload),
    )


def _emit_phases(world: Any, case: Case, subject: EpcommEp) -> None:
    """Route, exchange and rows, warm."""
    subject.phases(world, 2)
    mine = subject.phases(world, _PHASE_ITERATIONS)
    for phase, nanoseconds in mine.items():
        slowest = np.max(np.stack(world.gather(np.asarray(nanoseconds))), axis=0)
        world.emit(
            "row",
            results.row(case.as_dict(), case.label(), LIBRARY, LIBRARY, phase, "warm", statistics(slowest)),
        )


def _receive_bytes(case: Case) -> float:
    """Bytes of a rank's received rows under uniform routing."""
    if case.layout == "padded":
        return case.experts * case.tokens * case.row_bytes
    rows = case.tokens * (min(case.ranks, case.topk) if case.layout == "flat" else case.topk)
    return rows * case.row_bytes


def _needed_bytes(case: Case, blocks: int) -> float:
    """Estimated memory of all ranks: epcomm's blocks and the competitors' buffers, inputs and sums."""
    competitors = (3 * case.topk + 4 + 2 * min(case.ranks, case.topk)) * case.tokens * case.row_bytes
    return case.ranks * (competitors + 2 * blocks * _receive_bytes(case))


def _available_bytes() -> int:
    """Memory that can be had without swapping, page cache included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _memory_options(case: Case) -> dict:
    """The default number of blocks, or fewer where memory would not hold them. A function of the case alone."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"blocks": 2} if _needed_bytes(case, 3) > 0.6 * total else {}


def _too_large(case: Case) -> str | None:
    blocks = _memory_options(case).get("blocks", 3)
    needed, available = _needed_bytes(case, blocks), _available_bytes()
    if needed > 0.85 * available:
        return f"needs about {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free"
    return None
