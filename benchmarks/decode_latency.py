"""Standard run: the latency of decode steps. Few tokens, hidden 7168, 64 experts, top-8, latency mode.

`python benchmarks/decode_latency.py [--ranks 2,4 --json FILE --plot FILE]`; from Python: `run_decode_latency(...)`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ep_measurement import Settings
from benchmarks.expert_parallel import EpOptions, run_ep
from benchmarks.reporting import RESULTS, deliver, integers, progress_bar, words
from benchmarks.world import Progress

TOKENS = (1, 8, 32, 128)
HOT_CALLS = 1000


def run_decode_latency(
    ranks: Sequence[int] = (2, 4),
    tokens: Sequence[int] = TOKENS,
    layout: Sequence[str] = ("flat", "padded"),
    budget: float = 3.0,
    on_progress: Progress | None = None,
) -> dict:
    """The document of the run: hot-loop percentiles with `out=`, and ratios to gloo and MPI, interleaved."""
    settings = Settings(budget=budget, hot_calls=HOT_CALLS, phases=False, elsewhere=False)
    options = EpOptions(ranks=ranks, tokens=tokens, hidden=(7168,), layout=layout, mode="latency", settings=settings)
    return run_ep(options, on_progress)


def main(
    ranks: str = typer.Option("2,4", help="world sizes, comma-separated"),
    tokens: str = typer.Option(",".join(map(str, TOKENS)), help="tokens per rank"),
    layout: str = typer.Option("flat,padded", help="layouts of the received rows"),
    budget: float = typer.Option(3.0, help="seconds of interleaved timing per case"),
    json: Path = typer.Option(RESULTS / "decode_latency.json", help="write the document here"),
    plot: Path = typer.Option(RESULTS / "decode_latency.png", help="write a PNG here"),
) -> None:
    """Decode latency beside gloo and MPI."""
    with progress_bar() as on_progress:
        document = run_decode_latency(integers(ranks), integers(tokens), words(layout), budget, on_progress)
    raise typer.Exit(deliver(document, json, plot))


if __name__ == "__main__":
    typer.run(main)
