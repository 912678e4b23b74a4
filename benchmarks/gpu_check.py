"""Everything that one GPU can say about the CUDA target: checked against its definition, then timed.

    python benchmarks/gpu_check.py [--json FILE]

Needs torch >= 2.11, Triton >= 3.6 and a GPU; takes a few minutes. Ranks are threads of this process that share the GPU:
each has a stream and a share of the multiprocessors, so that all of them are resident and can wait for each other.
Times are of CUDA graphs that hold several steps each. Every part reports "ran" or why not; the exit code is 1 if any
failed. A network that refuses to be used on this machine hasn't failed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Loading a kernel on its first use may wait for those that run, and one of them may wait for the rank that loads.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import torch  # noqa: E402
import typer  # noqa: E402
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epcomm
from benchmarks import gpu_networks, results
from benchmarks.gpu_steps import (
    check_collectives,
    check_expert_parallel,
    check_graph_replays,
    check_quantized,
    copy_bandwidth,
    permutation_us,
    time_steps,
)

_WORLDS = (2, 4, 8)
_STEP_TIMEOUT = 20.0  # seconds that a kernel may wait for its peers
_CASES = (("latency", "padded", 128), ("throughput", "flat", 4096))


def on_gpu_ranks(size: int, ranks: str, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``body(comm, *args)`` on ranks that share GPU 0, each on a stream of its own."""

    def run() -> Any:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        budget = max(1, torch.cuda.get_device_properties(device).multi_processor_count // (2 * size))
        with torch.cuda.stream(torch.cuda.Stream(device)):
            with epcomm.init(device=device, sm_budget=budget, timeout=_STEP_TIMEOUT) as comm:
                return body(comm, *args)

    return epcomm.launch(run, size, ranks=ranks)


class Report:
    """Parts and what became of them."""

    def __init__(self, console: Console):
        self.rows: list[dict[str, Any]] = []
        self._console = console

    def part(self, name: str, run: Callable[[], Any]) -> Any:
        """Runs one part; a failure is reported and the next part goes on."""
        started = time.monotonic()
        try:
            value, outcome, detail = run(), "ran", ""
        except Exception as error:  # whatever it is, it is this part's result
            value, outcome, detail = None, "failed", f"{type(error).__name__}: {error}"
            self._console.print(traceback.format_exc(), highlight=False)
        self._add(name, started, outcome, detail, value)
        return value

    def network(self, name: str, run: Callable[[str], dict[str, Any]] = gpu_networks.outcome_in_process) -> None:
        """Runs one of `gpu_networks.CHECKS`, which may be refused."""
        started = time.monotonic()
        found = run(name)
        self._add(gpu_networks.CHECKS[name], started, found["outcome"], found["detail"], found.get("value"))

    def _add(self, name: str, started: float, outcome: str, detail: str, value: Any) -> None:
        row = {"part": name, "outcome": outcome, "seconds": round(time.monotonic() - started, 2), "detail": detail}
        self.rows.append(row | ({"value": value} if value is not None else {}))
        self._console.print(f"{outcome:7} {name} ({row['seconds']} s) {detail[:200]}", highlight=False)


def measure(report: Report) -> None:
    """All parts, the cheap ones first."""
    for size in _WORLDS:
        report.part(f"collectives, {size} ranks", lambda size=size: on_gpu_ranks(size, "threads", check_collectives)[0])
    for size in _WORLDS:
        for mode, layout, tokens in _CASES:
            name = f"{mode} {layout}, {tokens} tokens x 7168, top-8 of 256, {size} ranks"
            arguments = (mode, layout, tokens)
            report.part(
                f"check of {name}",
                lambda size=size, arguments=arguments: on_gpu_ranks(
                    size, "threads", check_expert_parallel, *arguments
                )[0],
            )
    report.part("float8 dispatch, 2 ranks", lambda: on_gpu_ranks(2, "threads", check_quantized, 512)[0])
    report.part("1000 graph replays, 2 ranks", lambda: on_gpu_ranks(2, "threads", check_graph_replays, 1000)[0])
    bandwidth = report.part("HBM copy bandwidth, GB/s read and written", copy_bandwidth)
    for size in _WORLDS:
        for mode, layout, tokens in _CASES:
            report.part(
                f"time of {mode} {layout}, {tokens} tokens, {size} ranks",
                lambda size=size, mode=mode, layout=layout, tokens=tokens: _slowest(
                    on_gpu_ranks(size, "threads", time_steps, mode, layout, tokens), bandwidth
                ),
            )
    for tokens in (128, 4096):
        report.part(
            f"torch permutation (index_select, index_add), {tokens} tokens",
            lambda tokens=tokens: permutation_us(tokens),
        )
    report.part("2 processes on one GPU", lambda: on_gpu_ranks(2, "processes", check_collectives)[0])
    for name in gpu_networks.CHECKS:
        report.network(name)


def _slowest(ranks: list[dict[str, float]], bandwidth: float | None) -> dict[str, float]:
    """The slowest rank's times, and the HBM floor of what all ranks move."""
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    if bandwidth:
        moved = sum(rank["hbm_bytes"] for rank in ranks)
        slowest["hbm_floor_us"] = round(moved / bandwidth / 1e3, 2)
    return slowest


def main(json: Path = typer.Option(None, help="write the document here")) -> None:
    """Prints a line for each part and a table; writes the JSON document if asked to."""
    console = Console(width=160)
    document = results.new_document("gpu_check", {"worlds": list(_WORLDS), "hidden": 7168, "topk": 8, "experts": 256})
    report = Report(console)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        document["gpu"] = {"name": properties.name, "sms": properties.multi_processor_count, "cuda": torch.version.cuda}
        measure(report)
    else:
        report.part("a CUDA GPU", lambda: epcomm.init(device="cuda"))
    document["rows"] = report.rows
    table = Table("part", "outcome", "seconds", "value", title="GPU check")
    for row in report.rows:
        table.add_row(row["part"], row["outcome"], str(row["seconds"]), str(row.get("value", row["detail"]))[:100])
    console.print(table)
    if json is not None:
        results.save(document, json)
    raise typer.Exit(1 if any(row["outcome"] == "failed" for row in report.rows) else 0)


if __name__ == "__main__":
    typer.run(main)
