"""`epcomm plan make` and `epcomm plan show`: plans of collectives, made, converted and proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import COLLECTIVES, FIFO_DEPTH, Plan
from epcomm.collectives.plan.json_format import from_json, to_json
from epcomm.collectives.plan.msccl import from_msccl, to_msccl
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.lines import PROTOCOLS, SIMPLE

app = typer.Typer(help="Collectives as plans: steps by rank, with a proof that they are right.", no_args_is_help=True)
console = Console()

_OUT = typer.Option(None, "--out", help="write it to this file, as MSCCL's XML if that ends in .xml, else as JSON")


@app.command()
def make(
    algorithm: str = typer.Argument(help=" | ".join(ALGORITHMS)),
    collective: str = typer.Argument(help=" | ".join(COLLECTIVES)),
    ranks: int = typer.Option(..., help="how many"),
    root: int = typer.Option(0, help="of broadcast and reduce"),
    channels: int = typer.Option(1, help="instances side by side"),
    pieces: int = typer.Option(1, help="parts that follow one another"),
    ranks_per_node: int | None = typer.Option(None, help="for hierarchical and two_level"),
    fifo_depth: int = typer.Option(FIFO_DEPTH, help="messages between two ranks on a channel"),
    protocol: str = typer.Option(SIMPLE, help=" | ".join(PROTOCOLS)),
    wide_sums: bool = typer.Option(False, "--wide-sums", help="partial sums of 16-bit floats are float32"),
    out: Path | None = _OUT,
) -> None:
    """Makes a plan by an algorithm."""
    try:
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm: wanted one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
        options: dict[str, Any] = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
        plan = ALGORITHMS[algorithm].plan(
            collective, ranks, root=root, channels=channels, pieces=pieces, fifo_depth=fifo_depth, protocol=protocol,
            wide_sums=wide_sums, **options,
        )  # fmt: skip
        _deliver(plan, out)
    except (OSError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None


@app.command()
def show(
    file: Path = typer.Argument(help="a plan, JSON or MSCCL's XML"),
    root: int = typer.Option(0, help="of broadcast and reduce, which XML doesn't say"),
    out: Path | None = _OUT,
) -> None:
    """Prints a plan and what is proven about it, or writes it to a file. Exit code 1 if it is wrong."""
    try:
        text = file.read_text(encoding="utf-8")
        plan = from_msccl(text, file.name, root=root) if file.suffix == ".xml" else from_json(text, file.name)
        _deliver(plan, out)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise typer.BadParameter(str(error)) from None


def _deliver(plan: Plan, out: Path | None) -> None:
    """Prints or writes the plan, with its verdict."""
    from epcomm.collectives.plan.table import print_plan, print_verdict  # loads Numba, which other commands don't need

    is_right = print_plan(plan, console) if out is None else print_verdict(plan, console)
    if not is_right:
        raise typer.Exit(1)
    if out is not None:
        out.write_text(to_msccl(plan) if out.suffix == ".xml" else to_json(plan), encoding="utf-8")
