"""Standard run: the throughput of prefill and training steps, and the shapes of real models.

`python benchmarks/prefill_throughput.py [--ranks 2,4 --json FILE --plot FILE]`, or `run_prefill_throughput(...)`.
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
from benchmarks.models import MODELS
from benchmarks.reporting import RESULTS, deliver, integers, progress_bar, words
from benchmarks.workload import Case
from benchmarks.world import Progress

TOKENS = (128, 512, 2048, 4096)
HIDDEN = (7168, 2048)
MODEL_TOKENS = 1024


def model_cases(ranks: Sequence[int], names: Sequence[str], tokens: int = MODEL_TOKENS) -> list[Case]:
    """Flat-layout cases of published models."""
    cases = []
    for size in ranks:
        for name in names:
            shape = MODELS[name]
            cases.append(Case(size, tokens, shape.hidden, shape.experts, shape.topk, model=name))
    return cases


def run_prefill_throughput(
    ranks: Sequence[int] = (2, 4),
    tokens: Sequence[int] = TOKENS,
    hidden: Sequence[int] = HIDDEN,
    layout: Sequence[str] = ("flat", "contiguous"),
    models: Sequence[str] = tuple(MODELS),
    budget: float = 6.0,
    on_progress: Progress | None = None,
) -> dict:
    """The document of the run: bandwidth, fraction of the roofline and ratios to gloo and MPI, interleaved."""
    options = EpOptions(
        ranks=ranks,
        tokens=tokens,
        hidden=hidden,
        layout=layout,
        more_cases=model_cases(ranks, models),
        settings=Settings(budget=budget),
    )
    return run_ep(options, on_progress)


def main(
    ranks: str = typer.Option("2,4", help="world sizes, comma-separated"),
    tokens: str = typer.Option(",".join(map(str, TOKENS)), help="tokens per rank"),
    hidden: str = typer.Option(",".join(map(str, HIDDEN)), help="elements per row"),
    layout: str = typer.Option("flat,contiguous", help="layouts of the received rows"),
    models: str = typer.Option(",".join(MODELS), help="model shapes to add; empty for none"),
    budget: float = typer.Option(6.0, help="seconds of interleaved timing per case"),
    json: Path = typer.Option(RESULTS / "prefill_throughput.json", help="write the document here"),
    plot: Path = typer.Option(RESULTS / "prefill_throughput.png", help="write a PNG here"),
) -> None:
    """Prefill throughput beside gloo, MPI and the copy roofline."""
    with progress_bar() as on_progress:
        document = run_prefill_throughput(
            integers(ranks), integers(tokens), integers(hidden), words(layout), words(models), budget, on_progress
        )
    raise typer.Exit(deliver(document, json, plot))


if __name__ == "__main__":
    typer.run(main)
