"""Where a decode step's time goes: each call of a 1-token round trip in a world of one, where nobody is waited for.

`python benchmarks/decode_profile.py [--json FILE]`. With no peers, what is left of a call is Python and one row's copy.
*Hot*: in a loop. *Cold*: after 64 MiB of other memory went through the caches, as after another library's call.
"""

from __future__ import annotations

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

CALLS = ("route", "dispatch", "output_buffer", "combine")
_EVICT_BYTES = 64 << 20


def measure(repetitions: int, evict: bool) -> dict[str, float]:
    """Median microseconds of each call, and of all four."""
    samples: dict[str, list[float]] = {name: [] for name in (*CALLS, "round trip")}
    other = torch.zeros(_EVICT_BYTES, dtype=torch.uint8)
    with epcomm.init(num_threads=1) as comm:
        ep = comm.expert_parallel(num_experts=64, topk=8, hidden=7168, max_tokens=8, mode="latency", layout="flat")
        topk_idx = torch.arange(8).view(1, 8)
        x = torch.randn(1, 7168).bfloat16()
        out = torch.empty_like(x)
        for _ in range(repetitions):
            if evict:
                other.add_(1)
            at = [time.perf_counter_ns()]
            routing = ep.route(topk_idx)
            at.append(time.perf_counter_ns())
            received = ep.dispatch(x, routing)
            at.append(time.perf_counter_ns())
            y = received.output_buffer()
            at.append(time.perf_counter_ns())
            ep.combine(y, received, out=out)
            at.append(time.perf_counter_ns())
            for name, begin, end in zip(CALLS, at, at[1:]):
                samples[name].append((end - begin) / 1000)
            samples["round trip"].append((at[-1] - at[0]) / 1000)
            del routing, received, y
    return {name: round(statistics.median(values[repetitions // 10 :]), 2) for name, values in samples.items()}


def main(json: Path = typer.Option(None, help="write the document here")) -> None:
    """Prints the table; writes the JSON document if asked to."""
    document = results.new_document("decode_profile", {"tokens": 1, "hidden": 7168, "topk": 8, "ranks": 1})
    measured = {"hot": measure(5000, evict=False), "cold": measure(300, evict=True)}
    document["rows"] = [{"temperature": name, "median_us": values} for name, values in measured.items()]
    table = Table("", *measured["hot"], title="1-token round trip in a world of one, microseconds")
    for name, values in measured.items():
        table.add_row(name, *(f"{value:.1f}" for value in values.values()))
    Console().print(table)
    if json is not None:
        results.save(document, json)


if __name__ == "__main__":
    typer.run(main)
