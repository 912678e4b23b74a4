"""Where the time of a dispatch goes when ranks share cores: each part, with the ranks bound evenly to cores and free.

`python benchmarks/shared_core_profile.py [--ranks 4] [--json FILE]`. *exchange* is a dispatch of rows too short to
matter: grants and signals are what is left. *system* is what the slowest rank spent in the kernel during a dispatch: a
rank that waits yields its core, and yields in vain if it is alone there while the others queue on another core.
"""

from __future__ import annotations

import os
import resource
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

PARTS = ("route", "exchange", "dispatch", "combine", "system")
_CASES = ((1, 7168), (128, 2048), (512, 2048), (128, 7168), (512, 7168), (2048, 7168))
_WARMUP, _ITERATIONS = 10, 40
_TINY_HIDDEN = 8


def _system_us() -> float:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_stime * 1e6


def measure(tokens: int, hidden: int, bind: bool) -> list[list[float]]:
    """Microseconds of this rank, by part and iteration."""
    torch.set_num_threads(1)
    samples: list[list[float]] = [[] for _ in PARTS]
    with epcomm.init(num_threads=1) as comm:
        if bind:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
        ep = comm.expert_parallel(num_experts=64, topk=8, hidden=hidden, max_tokens=tokens, layout="flat")
        generator = torch.Generator().manual_seed(comm.rank)
        topk_idx = torch.stack([torch.randperm(64, generator=generator)[:8] for _ in range(tokens)])
        x = torch.randn(tokens, hidden).bfloat16()
        tiny, out = x[:, :_TINY_HIDDEN].contiguous(), torch.empty_like(x)
        for _ in range(_WARMUP + _ITERATIONS):
            comm.barrier()
            at = [time.perf_counter_ns()]
            routing = ep.route(topk_idx)
            at.append(time.perf_counter_ns())
            ep.dispatch(tiny, routing)
            at.append(time.perf_counter_ns())
            system = _system_us()
            received = ep.dispatch(x, routing)
            at.append(time.perf_counter_ns())
            system = _system_us() - system
            y = received.output_buffer()
            y.copy_(received.x)
            comm.barrier()
            begin = time.perf_counter_ns()
            ep.combine(y, received, out=out)
            parts = [(end - start) / 1e3 for start, end in zip(at, at[1:])]
            parts += [(time.perf_counter_ns() - begin) / 1e3, system]
            del received, y
            for values, value in zip(samples, parts):
                values.append(value)
    return [values[_WARMUP:] for values in samples]


def main(
    ranks: int = typer.Option(4, help="number of ranks"),
    json: Path = typer.Option(None, help="write the document here"),
) -> None:
    """Prints the table, medians of the slowest rank; writes the JSON document if asked to."""
    document = results.new_document("shared_core_profile", {"ranks": ranks, "experts": 64, "topk": 8, "layout": "flat"})
    table = Table("tokens x hidden", "ranks are", *PARTS, title=f"{ranks} ranks, microseconds")
    rows = []
    for tokens, hidden in _CASES:
        for bind in (False, True):
            everyone = epcomm.launch(measure, ranks, tokens, hidden, bind)
            medians = [
                round(statistics.median(max(turn) for turn in zip(*(rank[part] for rank in everyone))), 1)
                for part in range(len(PARTS))
            ]
            placement = "bound evenly" if bind else "free"
            rows.append(
                {"tokens": tokens, "hidden": hidden, "placement": placement, "median_us": dict(zip(PARTS, medians))}
            )
            table.add_row(f"{tokens} x {hidden}", placement, *(f"{value:,.0f}" for value in medians))
    document["rows"] = rows
    Console().print(table)
    if json is not None:
        results.save(document, json)


if __name__ == "__main__":
    typer.run(main)
