"""`epcomm model ep` and `epcomm model allreduce`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from epcomm.errors import ConfigError
from epcomm.model import allreduce, expert_parallel, tables
from epcomm.model.gpus import GPUS, find_gpu
from epcomm.model.routing import Routing

app = typer.Typer(
    help="What the hardware allows: floors from first principles, beside published figures. Measures nothing.",
    no_args_is_help=True,
)
console = Console()
Result = TypeVar("Result")

_GPU = typer.Option(..., help=" | ".join(GPUS))
_JSON = typer.Option(None, "--json", help="write everything that is printed to this file as well")


@app.command("ep")
def ep(
    gpu: str = _GPU,
    ranks: int = typer.Option(8, help="one per GPU; more than an NVLink domain: a multiple of it"),
    tokens: int = typer.Option(4096, help="tokens per rank"),
    hidden: int = typer.Option(7168, help="elements per token"),
    experts: int = typer.Option(256, help="experts in all"),
    topk: int = typer.Option(8, help="experts per token"),
    groups: int = typer.Option(1, help="groups of experts, for a group-limited gate"),
    topk_groups: int = typer.Option(1, help="groups per token"),
    mode: str = typer.Option("throughput", help=" | ".join(expert_parallel.MODES)),
    dtype: str = typer.Option("bfloat16", help=f"of dispatch: {' | '.join(expert_parallel.DTYPES)}"),
    json_file: Path | None = _JSON,
) -> None:
    """The floor of an expert-parallel dispatch and combine: bytes per link, HBM traffic, latencies."""

    def exchange_of_options() -> expert_parallel.Exchange:
        routing = Routing(experts, topk, groups, topk_groups)
        return expert_parallel.Exchange(find_gpu(gpu), ranks, tokens, hidden, routing, mode, dtype)

    exchange = _checked(exchange_of_options)
    predictions = expert_parallel.predict_all(exchange)
    tables.print_expert_parallel(console, exchange, predictions)
    _write(json_file, tables.expert_parallel_document(exchange, predictions))


@app.command("allreduce")
def allreduce_command(
    gpu: str = _GPU,
    ranks: int = typer.Option(8, help="one per GPU, all in one NVLink domain"),
    num_bytes: int = typer.Option(1 << 20, "--bytes", help="bytes per rank"),
    json_file: Path | None = _JSON,
) -> None:
    """The floor of an allreduce by one-shot, two-shot and multimem, and the sizes from which each is best."""
    chosen = _checked(lambda: find_gpu(gpu))
    predictions = _checked(lambda: allreduce.predict_all(chosen, ranks, num_bytes))
    tables.print_allreduce(console, chosen, ranks, predictions)
    _write(json_file, tables.allreduce_document(chosen, ranks, predictions))


def _checked(make: Callable[[], Result]) -> Result:
    """What `make` returns; a bad value becomes typer's error, which says what is allowed."""
    try:
        return make()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def _write(json_file: Path | None, document: dict[str, Any]) -> None:
    if json_file is None:
        return
    try:
        json_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--json: {error}") from None
