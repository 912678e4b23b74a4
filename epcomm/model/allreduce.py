"""The floor of an allreduce in one NVLink domain: one-shot, two-shot, and multimem (reduced and copied by the switch).

    floor = launch + number of signals * signal latency + max(NVLink bytes / peak, HBM bytes / peak)

The formulas are the textbook ones (for two-shot nccl-tests' bus bandwidth factor, 2(n - 1)/n), bytes without the flags
of a protocol such as LL, which doubles them.
"""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.errors import ConfigError
from epcomm.model.gpus import Gpu

# Signals that follow each other.
# one-shot: every rank pushes its input to every peer, who waits for it once.
# two-shot: a rank waits for its slice of all inputs, then for the reduced slices of all peers.
# multimem: inputs are ready everywhere, the switch's answer is back, results are stored everywhere.
SIGNALS = {"one-shot": 1, "two-shot": 2, "multimem": 3}


@dataclass(frozen=True)
class AllreducePrediction:
    """One algorithm; times in µs, bytes per rank (NVLink in one direction, the other carries as much)."""

    algorithm: str
    nvlink_bytes: float
    memory_bytes: float
    launch: float
    signals: float
    nvlink: float
    memory: float
    reachable: float

    @property
    def floor(self) -> float:
        """µs below which the algorithm can't be."""
        return self.launch + self.signals + max(self.nvlink, self.memory)


def nvlink_share(algorithm: str, ranks: int) -> float:
    """Bytes per direction and rank over the bytes of the input.

    one-shot: each of ranks - 1 peers gets all of it. two-shot: ranks - 1 slices out to be reduced, the reduced slice to
    ranks - 1 peers. multimem: the switch fetches all of it once for the ranks that reduce it, and takes the reduced
    slice once for all.
    """
    if ranks == 1:
        return 0.0
    return {"one-shot": ranks - 1.0, "two-shot": 2 * (ranks - 1) / ranks, "multimem": 1 + 1 / ranks}[algorithm]


def _check(gpu: Gpu, ranks: int) -> None:
    if not 1 <= ranks <= gpu.domain:
        raise ConfigError(f"ranks is {ranks}; on {gpu.name} it must be 1 to {gpu.domain}: one NVLink domain")


def predict(gpu: Gpu, ranks: int, num_bytes: int, algorithm: str) -> AllreducePrediction:
    """The floor of an allreduce of `num_bytes` per rank; HBM reads the input and writes the result once."""
    _check(gpu, ranks)
    if num_bytes < 1:
        raise ConfigError(f"bytes is {num_bytes}; it must be at least 1")
    crossing = nvlink_share(algorithm, ranks) * num_bytes
    memory = 2.0 * num_bytes
    signals = SIGNALS[algorithm] * gpu.nvlink_signal.microseconds if ranks > 1 else 0.0
    reached = max(gpu.nvlink.microseconds(crossing, reached=True), gpu.memory.microseconds(memory, reached=True))
    return AllreducePrediction(
        algorithm,
        crossing,
        memory,
        gpu.launch.microseconds,
        signals,
        gpu.nvlink.microseconds(crossing),
        gpu.memory.microseconds(memory),
        gpu.launch.microseconds + signals + reached,
    )


def predict_all(gpu: Gpu, ranks: int, num_bytes: int) -> list[AllreducePrediction]:
    """Every algorithm, the one with the lowest floor first (of equals the one with fewer signals)."""
    return sorted((predict(gpu, ranks, num_bytes, name) for name in SIGNALS), key=lambda each: each.floor)


def crossover(gpu: Gpu, ranks: int, small: str, large: str) -> float | None:
    """The bytes from which the algorithm `large` has the lower floor than `small`; None if there are none.

    Both floors are latency + bytes / bandwidth: the lines meet where the difference of latencies is the difference of
    times per byte.
    """
    _check(gpu, ranks)
    if ranks == 1:
        return None
    latency = (SIGNALS[large] - SIGNALS[small]) * gpu.nvlink_signal.microseconds
    saved = _microseconds_per_byte(gpu, ranks, small) - _microseconds_per_byte(gpu, ranks, large)
    return latency / saved if saved > 0 else None


def _microseconds_per_byte(gpu: Gpu, ranks: int, algorithm: str) -> float:
    return max(gpu.nvlink.microseconds(nvlink_share(algorithm, ranks)), gpu.memory.microseconds(2.0))
