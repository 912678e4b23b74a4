"""Bench of allreduce: `run_allreduce(options)`, and the script behind `epcomm bench allreduce`.

`python benchmarks/allreduce.py --ranks 2,4 --dtype float32,bfloat16`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.allreduce_measurement import AllreduceCase, AllreduceSettings, measure_allreduce
from benchmarks.reporting import RESULTS, deliver, integers, progress_bar, words
from benchmarks.world import Progress, part_of, run_world

SIZES = (8, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)


@dataclass
class AllreduceOptions:
    """What to measure; `sizes` are bytes of the message."""

    ranks: Sequence[int] = (2, 4, 8)
    sizes: Sequence[int] = SIZES
    dtype: Sequence[str] = ("float32", "bfloat16")
    budget: float = 2.0  # seconds of interleaved timing per case
    hot_calls: int = 1000
    without: Sequence[str] = ()  # libraries to leave out: epcomm, gloo, mpi
    deadline: float | None = None  # seconds for the ranks of one world size; None: from the number of cases


def run_allreduce(options: AllreduceOptions, on_progress: Progress | None = None) -> dict:
    """Measure every size and return the JSON document (schema: `benchmarks/results.py`).

    Errors and hangs are in the document's `failures`, beside the rows measured before them.
    """
    document = results.new_document("allreduce", asdict(options))
    settings = AllreduceSettings(options.budget, options.hot_calls)
    total = len(options.ranks) * len(options.dtype) * len(options.sizes)
    done = 0
    for ranks in options.ranks:
        cases = [AllreduceCase(ranks, size, dtype) for dtype in options.dtype for size in options.sizes]
        outcome = run_world(
            measure_allreduce,
            ranks,
            cases,
            settings,
            without=options.without,
            deadline=options.deadline or 120 + len(cases) * (4 * options.budget + 30),
            on_progress=part_of(on_progress, done, total),
        )
        results.add_outcome(document, outcome)
        done += len(cases)
    results.rate_contestants(document)
    return document


def main(
    ranks: str = typer.Option("2,4,8", help="world sizes, comma-separated"),
    sizes: str = typer.Option(",".join(map(str, SIZES)), help="message sizes in bytes"),
    dtype: str = typer.Option("float32,bfloat16", help="float32, bfloat16, float16"),
    budget: float = typer.Option(2.0, help="seconds of interleaved timing per case"),
    hot_calls: int = typer.Option(1000, help="calls in the hot loop; 0: none"),
    without: str = typer.Option("", help="libraries to leave out: epcomm, gloo, mpi"),
    json: Path = typer.Option(RESULTS / "allreduce.json", help="write the document here"),
    plot: Path = typer.Option(RESULTS / "allreduce.png", help="write a PNG here"),
) -> None:
    """Allreduce beside gloo, MPI and the copy roofline."""
    options = AllreduceOptions(integers(ranks), integers(sizes), words(dtype), budget, hot_calls, words(without))
    with progress_bar() as on_progress:
        document = run_allreduce(options, on_progress)
    raise typer.Exit(deliver(document, json, plot))


if __name__ == "__main__":
    typer.run(main)
