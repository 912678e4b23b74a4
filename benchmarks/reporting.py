"""How a bench shows itself: progress while it runs, then tables, the JSON file and the plot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import results, world
from benchmarks.plots import plot_document
from benchmarks.tables import print_document

RESULTS = world.REPOSITORY / "benchmarks" / "results"


_WIDTH = 118  # columns that the tables need


def integers(text: str) -> list[int]:
    """A comma-separated list of numbers."""
    return [int(part) for part in text.split(",") if part.strip()]


def words(text: str) -> list[str]:
    """A comma-separated list of words."""
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def progress_bar() -> Iterator[world.Progress]:
    """A bar on the terminal; yields the function to call with (done, total, text)."""
    columns = [BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting the ranks", total=None)

        def update(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, description=text)

        yield update


def deliver(document: dict, json: Path | None, plot: Path | None, console: Console | None = None) -> int:
    """Print the tables and write the files; the exit code: 1 if anything failed."""
    console = console or Console()
    console.width = max(console.width, _WIDTH)
    print_document(document, console)
    if json is not None:
        results.save(document, json)
        console.print(f"wrote {json}")
    if plot is not None:
        problem = plot_document(document, plot)
        console.print(f"no plot: {problem}" if problem else f"wrote {plot}")
    return 1 if document["failures"] else 0
