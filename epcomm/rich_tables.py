"""Tables and numbers as the command line prints them."""

from __future__ import annotations

from collections.abc import Container

from rich import box
from rich.table import Table


def aligned_table(title: str, *columns: str, text: Container[str]) -> Table:
    """A table whose columns of `text` are on the left and those of numbers on the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in text else "right")
    return table


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that is no larger."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes:.0f} B"
