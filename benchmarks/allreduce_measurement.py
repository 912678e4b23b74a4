"""What each rank does to measure allreduce: contestants, timing, rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import results
from benchmarks.competitors.allreduce import gloo_allreduce, mpi_allreduce
from benchmarks.roofline import Rooflines
from benchmarks.tables import size_text
from benchmarks.timing import WHOLE, Contestant, Step, hot_loop, interleave, statistics
from benchmarks.workload import DTYPES

_LABEL = "allreduce"
_WARM_LIMIT_BYTES = 16 << 20
_HOT_LIMIT_BYTES = 64 << 10
_HOT_LIMIT_SECONDS = 0.5
_MAX_ROUNDS = 400


@dataclass(frozen=True)
class AllreduceCase:
    """One message size."""

    ranks: int
    bytes: int
    dtype: str

    def label(self) -> str:
        """A short name for progress, tables and plots."""
        return f"{self.ranks} ranks, {size_text(self.bytes)}, {self.dtype}"


@dataclass(frozen=True)
class AllreduceSettings:
    """How long to measure each case; `hot_calls` 0 leaves the hot loops out."""

    budget: float
    hot_calls: int


class Message:
    """A rank's input, an output per contestant, and the float64 oracle for them."""

    def __init__(self, case: AllreduceCase, rank: int):
        self.dtype = DTYPES[case.dtype]
        self.inputs = [self._input(case, peer) for peer in range(case.ranks)] if case.bytes <= 1 << 20 else None
        self.case, self.rank = case, rank
        self.x = self._input(case, rank)

    def _input(self, case: AllreduceCase, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + rank)
        return torch.randn(max(1, case.bytes // self.dtype.itemsize), generator=generator).to(self.dtype)

    def check(self, out: torch.Tensor) -> None:
        """Compare with the definition; the bound allows one rounding of the output type per addition."""
        inputs = self.inputs or [self._input(self.case, peer) for peer in range(self.case.ranks)]
        want = torch.zeros(out.shape, dtype=torch.float64)
        magnitude = torch.zeros_like(want)
        for values in inputs:
            want += values
            magnitude += values.abs()
        excess = (out.double() - want).abs() - self.case.ranks * torch.finfo(self.dtype).eps * magnitude
        bad = ~(excess <= 1e-30)
        if bad.any():
            index = int(bad.nonzero()[0])
            raise AssertionError(f"element {index}: got {float(out[index])}, wanted {float(want[index])}")


def _contestant(name: str, library: str, message: Message, call: Callable[[], Any], out: torch.Tensor) -> Contestant:
    """Reads `message.x` and writes `out`."""
    return Contestant(
        name, library, [Step(_LABEL, call)], poison=lambda: out.fill_(float("nan")), check=lambda: message.check(out)
    )


def _in_place(name: str, message: Message, call: Callable[[], Any], tensor: torch.Tensor) -> Contestant:
    """Reads and writes `tensor`. While it is timed the values grow, which costs nothing."""
    return Contestant(
        name, name, [Step(_LABEL, call)], poison=lambda: tensor.copy_(message.x), check=lambda: message.check(tensor)
    )


def _contestants(world: Any, message: Message) -> list[Contestant]:
    contestants = []
    if world.epcomm is not None:
        plain, bound_out = torch.empty_like(message.x), torch.empty_like(message.x)
        communicator, x = world.epcomm, message.x
        bound = communicator.bind_allreduce(x, out=bound_out)
        contestants.append(
            _contestant("epcomm", "epcomm", message, lambda: communicator.allreduce(x, out=plain), plain)
        )
        contestants.append(_contestant("epcomm, bound", "epcomm bound", message, bound, bound_out))
    if "gloo" not in world.absent:
        tensor = message.x.clone()
        contestants.append(_in_place("gloo", message, gloo_allreduce(tensor), tensor))
    if world.mpi is not None and message.dtype == torch.float32:
        out = torch.empty_like(message.x)
        contestants.append(_contestant("mpi", "mpi", message, mpi_allreduce(world.mpi, message.x, out), out))
    return contestants


def measure_allreduce(world: Any, cases: list[AllreduceCase], settings: AllreduceSettings) -> None:
    """The bench function that every rank runs; rank 0 emits rows as they come."""
    rooflines = Rooflines(world)
    if any(case.dtype != "float32" for case in cases):
        world.emit("skipped", {"case": "mpi, 16-bit floats", "reason": "MPI has no reduction for them"})
    for index, case in enumerate(cases):
        world.progress(index, len(cases), case.label())
        message = Message(case, world.rank)
        roofline = rooflines.at(min(case.bytes, 64 << 10), case.bytes) if case.bytes >= 64 << 10 else None
        contestants = _contestants(world, message)
        warm = case.bytes <= _WARM_LIMIT_BYTES
        timings = interleave(world, contestants, budget=settings.budget, max_rounds=_MAX_ROUNDS, warm=warm)
        for contestant in contestants:
            timing = timings[contestant.name]
            for temperature, samples in (("cold", timing.cold), ("warm", timing.warm)):
                if samples:
                    _emit(world, case, contestant, temperature, statistics(samples[WHOLE]), roofline)
        if settings.hot_calls and case.bytes <= _HOT_LIMIT_BYTES:
            for contestant in contestants:
                _emit(world, case, contestant, "hot", _hot_numbers(world, contestant, settings.hot_calls), roofline)
    world.progress(len(cases), len(cases), "done")


def _hot_numbers(world: Any, contestant: Contestant, calls: int) -> dict[str, float]:
    """Percentiles and mean of back-to-back calls, fewer where they are long."""
    call = contestant.steps[0].call
    estimate = hot_loop(world, call, iterations=10, warmup=10, repeats=1).mean / 1e9
    calls = world.gather(int(max(20, min(calls, _HOT_LIMIT_SECONDS / estimate))))[0]
    loop = hot_loop(world, call, iterations=calls)
    return statistics(loop.samples) | {"mean_us": round(loop.mean / 1e3, 3)}


def _emit(
    world: Any,
    case: AllreduceCase,
    contestant: Contestant,
    temperature: str,
    numbers: dict[str, float],
    roofline: dict | None,
) -> None:
    world.emit(
        "row",
        results.row(
            asdict(case),
            case.label(),
            contestant.name,
            contestant.library,
            _LABEL,
            temperature,
            numbers,
            payload_bytes=case.bytes,
            roofline=roofline,
        ),
    )
