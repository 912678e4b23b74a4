"""Bench of dispatch and combine: `run_ep(options)`, and the script behind `epcomm bench ep`.

`python benchmarks/expert_parallel.py --ranks 2 --tokens 128,2048 --hidden 7168 --layout flat`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import typer

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.ep_measurement import Settings, measure_cases
from benchmarks.reporting import deliver, integers, progress_bar, words
from benchmarks.workload import Case
from benchmarks.world import Progress, part_of, run_world


@dataclass
class EpOptions:
    """What to measure: the product of the lists, then `more_cases`; see `Settings` for the rest."""

    ranks: Sequence[int] = (2,)
    tokens: Sequence[int] = (128, 2048)
    hidden: Sequence[int] = (7168,)
    experts: int = 64
    topk: int = 8
    layout: Sequence[str] = ("flat",)
    dtype: str = "bfloat16"
    mode: str = "throughput"
    more_cases: Sequence[Case] = ()
    settings: Settings = field(default_factory=Settings)
    without: Sequence[str] = ()  # libraries to leave out: epcomm, gloo, mpi
    deadline: float | None = None  # seconds for the ranks of one world size; None: from the number of cases

    def cases(self) -> list[Case]:
        """All cases, grouped by world size in the order given."""
        product = [
            Case(ranks, tokens, hidden, self.experts, self.topk, layout, self.dtype, self.mode)
            for ranks in self.ranks
            for layout in self.layout
            for hidden in self.hidden
            for tokens in self.tokens
        ]
        return product + list(self.more_cases)


def run_ep(options: EpOptions, on_progress: Progress | None = None) -> dict:
    """Measure every case and return the JSON document (schema: `benchmarks/results.py`).

    Errors and hangs are in the document's `failures`, beside the rows measured before them.
    """
    cases = options.cases()
    document = results.new_document("expert_parallel", asdict(options))
    done = 0
    for ranks in sorted({case.ranks for case in cases}):
        group = [case for case in cases if case.ranks == ranks]
        outcome = run_world(
            measure_cases,
            ranks,
            group,
            options.settings,
            without=options.without,
            deadline=options.deadline or 120 + len(group) * (4 * options.settings.budget + 60),
            on_progress=part_of(on_progress, done, len(cases)),
        )
        results.add_outcome(document, outcome)
        done += len(group)
    results.rate_contestants(document)
    return document


def main(
    ranks: str = typer.Option("2", help="world sizes, comma-separated"),
    tokens: str = typer.Option("128,2048", help="tokens per rank"),
    hidden: str = typer.Option("7168", help="elements per row"),
    experts: int = typer.Option(64, help="number of experts"),
    topk: int = typer.Option(8, help="experts per token"),
    layout: str = typer.Option("flat", help="flat, contiguous, padded"),
    dtype: str = typer.Option("bfloat16", help="bfloat16, float16 or float32"),
    mode: str = typer.Option("throughput", help="throughput or latency"),
    budget: float = typer.Option(6.0, help="seconds of interleaved timing per case"),
    hot_calls: int = typer.Option(0, help="round trips in the hot loop; 0: none"),
    without: str = typer.Option("", help="libraries to leave out: epcomm, gloo, mpi"),
    json: Path = typer.Option(None, help="write the document here"),
    plot: Path = typer.Option(None, help="write a PNG here"),
) -> None:
    """Dispatch and combine beside gloo, MPI and the copy roofline."""
    options = EpOptions(
        ranks=integers(ranks),
        tokens=integers(tokens),
        hidden=integers(hidden),
        experts=experts,
        topk=topk,
        layout=words(layout),
        dtype=dtype,
        mode=mode,
        settings=Settings(budget=budget, hot_calls=hot_calls),
        without=words(without),
    )
    with progress_bar() as on_progress:
        document = run_ep(options, on_progress)
    raise typer.Exit(deliver(document, json, plot))


if __name__ == "__main__":
    typer.run(main)
