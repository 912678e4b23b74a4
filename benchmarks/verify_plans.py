"""How long a plan's proof takes: `python benchmarks/verify_plans.py [--json FILE]`.

Each plan is proven several times in one process, after a small one whose proof loads the compiled passes. *making* is
the compiler's time, once. The document's rows are of phase `verify`; `case` has ranks, channels and steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.timing import quiet_interpreter, statistics
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan.verify import verify

# Algorithm, collective, ranks, channels, pieces. The first has 32 ranks of 10080 steps each; in the second programs
# share chunks, so that races are looked for.
_CASES = (
    ("ring", "allreduce", 32, 8, 20),
    ("hierarchical", "allreduce", 32, 4, 4),
    ("two_level", "alltoall", 32, 8, 8),
    ("ring", "allreduce", 128, 2, 1),
    ("recursive_doubling", "allreduce", 1024, 2, 4),
)


def measure(name: str, kind: str, num_ranks: int, channels: int, pieces: int, rounds: int) -> dict:
    """One row, times in µs; it also has `cpu_us`, the least of this process's time in a proof, and `making_us`."""
    options = {"ranks_per_node": 8} if "ranks_per_node" in ALGORITHMS[name].options else {}
    start = time.perf_counter()
    plan = ALGORITHMS[name].plan(kind, num_ranks, channels=channels, pieces=pieces, **options)
    making = time.perf_counter() - start
    wall, cpu = [], []
    with quiet_interpreter():
        for _ in range(rounds):
            began, used = time.perf_counter_ns(), time.process_time()
            verify(plan)
            wall.append(time.perf_counter_ns() - began)
            cpu.append(time.process_time() - used)
    case = {"collective": kind, "ranks": num_ranks, "channels": plan.num_channels, "steps": plan.num_steps}
    numbers = statistics(np.array(wall)) | {"cpu_us": round(min(cpu) * 1e6), "making_us": round(making * 1e6)}
    return results.row(case, f"{name} {kind}", "epcomm", "epcomm", "verify", "hot", numbers)


def main(
    rounds: int = typer.Option(7, help="proofs of each plan"),
    json: Path | None = typer.Option(None, help="file to write"),
) -> None:
    """Proves large plans and prints how long it took."""
    document = results.new_document("verify_plans", {"rounds": rounds})
    verify(ALGORITHMS["ring"].plan("allreduce", 3, channels=2))
    table = Table("plan", "ranks", "channels", "steps", "proof, s", "its cpu, s", "making, s")
    for case in _CASES:
        row = measure(*case, rounds)
        document["rows"].append(row)
        counts = (str(row["case"][name]) for name in ("ranks", "channels", "steps"))
        seconds = (f"{row[name] / 1e6:.2f}" for name in ("p50_us", "cpu_us", "making_us"))
        table.add_row(row["label"], *counts, *seconds)
    Console().print(table)
    if json is not None:
        results.save(document, json)


if __name__ == "__main__":
    typer.run(main)
