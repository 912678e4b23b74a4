"""What a small allreduce costs by number of ranks: where they share cores, a call waits for all to run in turn.

`python benchmarks/allreduce_profile.py [--json FILE]`. Bound calls of 8 bytes, microseconds of the slowest rank: the
mean in a loop, the median right after a barrier. With more ranks than cores, ranks that are bound evenly to cores are
told apart from free ones.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epcomm
from benchmarks import results

_REPETITIONS = 200


def measure(bind: bool) -> tuple[float, list[float]]:
    """(mean in a loop, calls after a barrier), microseconds of this rank."""
    torch.set_num_threads(1)
    with epcomm.init(num_threads=1) as comm:
        if bind:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
        call = comm.bind_allreduce(torch.ones(2))
        for _ in range(_REPETITIONS):
            call()
        begin = time.perf_counter_ns()
        for _ in range(5 * _REPETITIONS):
            call()
        looped = (time.perf_counter_ns() - begin) / 5e3 / _REPETITIONS
        samples = []
        for _ in range(_REPETITIONS):
            comm.barrier()
            begin = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - begin) / 1e3)
        return looped, samples


def _slowest(ranks: list[list[float]]) -> float:
    return round(statistics.median(max(turn) for turn in zip(*ranks)), 1)


def main(json: Path = typer.Option(None, help="write the document here")) -> None:
    """Prints the table; writes the JSON document if asked to."""
    document = results.new_document("allreduce_profile", {"bytes": 8, "dtype": "float32"})
    table = Table("ranks", "placement", "in a loop", "after a barrier", title="8-byte allreduce, microseconds")
    document["rows"] = []
    for ranks, bind in ((1, False), (2, False), (4, False), (4, True), (8, False), (8, True)):
        everyone = epcomm.launch(measure, ranks, bind)
        row = {
            "ranks": ranks,
            "placement": "bound evenly" if bind else "free",
            "loop_us": round(max(rank[0] for rank in everyone), 2),
            "after_barrier_us": _slowest([rank[1] for rank in everyone]),
        }
        document["rows"].append(row)
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if json is not None:
        results.save(document, json)


if __name__ == "__main__":
    typer.run(main)
