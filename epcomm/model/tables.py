"""Predictions and published figures as rich tables and as one JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from epcomm.model import allreduce, comparison
from epcomm.model.allreduce import AllreducePrediction
from epcomm.model.expert_parallel import Exchange, Prediction
from epcomm.model.gpus import Gpu
from epcomm.model.published import AllreduceFigure, ExpertParallelFigure
from epcomm.rich_tables import aligned_table, counted, size_text

DISCLAIMER = (
    "floor: data sheets and formulas, nothing measured; all streams overlap, all ranks start at once. "
    "reachable: the same at rates that kernels have sustained, with rows staged in HBM."
)
KERNEL_ONLY = "* the kernel alone was timed: compared with the floor without the launch."
COUNTED = "A published GB/s counts rows that stay on the own rank or node; µs are computed from it with the same count."
_RIVALS = (("one-shot", "two-shot"), ("two-shot", "multimem"))
_HEADINGS = {"nvlink": "NVLink", "nic": "NIC", "memory": "HBM"}
_SHORT = {"float8": "fp8", "bfloat16": "bf16"}
_TEXT_COLUMNS = {"system", "GPU", "operation", "row per", "algorithm", "bound by"}


def print_expert_parallel(console: Console, exchange: Exchange, predictions: list[Prediction]) -> None:
    """Bytes, times and the figures of others, for `epcomm model ep`."""
    gpu, routing = exchange.gpu, exchange.routing
    groups = f" in {routing.topk_groups} of {routing.groups} groups" if routing.groups > 1 else ""
    console.print(
        f"[bold]{gpu.name}[/]: {exchange.ranks} ranks in {counted(exchange.nodes, 'NVLink domain')}, "
        f"{exchange.tokens} tokens each, hidden {exchange.hidden}, {routing.experts} experts, "
        f"top-{routing.topk}{groups}; {exchange.mode} mode, dispatch in {exchange.dtype}, combine in bfloat16"
    )
    streams = ("nvlink", "nic", "memory") if exchange.nodes > 1 else ("nvlink", "memory")
    headings = [_HEADINGS[stream] for stream in streams]
    volumes = _table("MB per rank", "operation", "row per", "rows/token", *headings, "HBM staging")
    times = _table("µs", "operation", "row per", "launch", "signals", *headings, "floor", "reachable", "bound by")
    for each in predictions:
        volumes.add_row(
            each.operation,
            each.wire,
            f"{exchange.rows_per_token(each.wire):.2f}",
            *(f"{getattr(each.traffic, stream) / 1e6:.2f}" for stream in (*streams, "staging")),
        )
        times.add_row(
            each.operation,
            each.wire,
            *(f"{getattr(each, term):.1f}" for term in ("launch", "signals", *streams)),
            f"[bold]{each.floor():.1f}[/]",
            f"{each.reachable:.1f}",
            _HEADINGS[each.bandwidth_bound],
        )
    console.print(volumes, times)
    console.print(f"{DISCLAIMER} The copies of {gpu.sms_for_nvlink()} of {gpu.num_sms} SMs fill NVLink.\n")
    _print_expert_parallel_figures(console, comparison.expert_parallel_figures(exchange.mode, exchange.ranks))


def print_allreduce(console: Console, gpu: Gpu, ranks: int, predictions: list[AllreducePrediction]) -> None:
    """Times, crossovers and the figures of others, for `epcomm model allreduce`; predictions of one size."""
    num_bytes = int(predictions[0].memory_bytes / 2)
    console.print(f"[bold]{gpu.name}[/]: allreduce of {size_text(num_bytes)} on each of {ranks} ranks, best first")
    table = _table("µs", "algorithm", "NVLink MB", "launch", "signals", "NVLink", "HBM", "floor", "reachable")
    for each in predictions:
        table.add_row(
            each.algorithm,
            f"{each.nvlink_bytes / 1e6:.3f}",
            *(f"{value:.2f}" for value in (each.launch, each.signals, each.nvlink, each.memory)),
            f"[bold]{each.floor:.2f}[/]",
            f"{each.reachable:.2f}",
        )
    console.print(table)
    for small, large in _RIVALS:
        start = allreduce.crossover(gpu, ranks, small, large)
        console.print(f"{large} beats {small}: {'never' if start is None else f'from {size_text(start)} on'}")
    console.print(f"{DISCLAIMER}\n")
    _print_allreduce_figures(console, comparison.allreduce_figures(ranks, num_bytes))


def expert_parallel_document(exchange: Exchange, predictions: list[Prediction]) -> dict[str, Any]:
    """What `epcomm model ep` prints, as data; bytes, µs, GB/s."""
    figures = comparison.expert_parallel_figures(exchange.mode, exchange.ranks)
    return {
        "request": asdict(exchange),
        "predictions": [asdict(each) | {"floor": each.floor()} for each in predictions],
        "published": [
            asdict(each)
            | {
                "microseconds": comparison.published_microseconds(each),
                "floor": comparison.expert_parallel_floor(each),
                "share_of_floor": comparison.share_of_floor(each),
            }
            for each in figures
        ],
    }


def allreduce_document(gpu: Gpu, ranks: int, predictions: list[AllreducePrediction]) -> dict[str, Any]:
    """What `epcomm model allreduce` prints, as data; bytes and µs."""
    num_bytes = int(predictions[0].memory_bytes / 2)
    return {
        "request": {"gpu": asdict(gpu), "ranks": ranks, "bytes": num_bytes},
        "predictions": [asdict(each) | {"floor": each.floor} for each in predictions],
        "crossovers": [
            {"from": small, "to": large, "bytes": allreduce.crossover(gpu, ranks, small, large)}
            for small, large in _RIVALS
        ],
        "published": [
            asdict(each)
            | {"floor": comparison.allreduce_floor(each), "share_of_floor": comparison.share_of_floor(each)}
            for each in comparison.allreduce_figures(ranks, num_bytes)
        ],
    }


def _print_expert_parallel_figures(console: Console, figures: Sequence[ExpertParallelFigure]) -> None:
    table = _table(
        f"Published with {figures[0].ranks} ranks, each beside the floor of its own configuration",
        *("system", "GPU", "tokens", "operation", "row per", "published", "µs", "floor µs", "share"),
    )
    for each in figures:
        table.add_row(
            each.system + ("*" if each.kernel_only else ""),
            each.gpu,
            str(each.tokens),
            f"{each.operation} {_SHORT[each.dtype]}",
            each.wire or "not said",
            f"{each.value:g} {each.unit}",
            _number(comparison.published_microseconds(each), ".1f"),
            _number(comparison.expert_parallel_floor(each), ".1f"),
            _number(comparison.share_of_floor(each), ".2f"),
        )
    console.print(table)
    _print_notes(console, [(each.system, each.note, each.source) for each in figures])
    if any(each.kernel_only for each in figures):
        console.print(KERNEL_ONLY)
    if any(each.unit == "GB/s" for each in figures):
        console.print(COUNTED)


def _print_allreduce_figures(console: Console, figures: Sequence[AllreduceFigure]) -> None:
    table = _table(
        f"Published with {figures[0].ranks} ranks and {size_text(figures[0].num_bytes)}, each beside its own floor",
        *("system", "GPU", "algorithm", "published µs", "floor µs", "share"),
    )
    for each in figures:
        table.add_row(
            each.system,
            each.gpu,
            each.algorithm or "another",
            f"{each.microseconds:g}",
            _number(comparison.allreduce_floor(each), ".1f"),
            _number(comparison.share_of_floor(each), ".2f"),
        )
    console.print(table)
    _print_notes(console, [(each.system, each.below_floor, each.source) for each in figures])


def _print_notes(console: Console, figures: list[tuple[str, str, str]]) -> None:
    """Each note and each source of (system, note, source) once, in their order."""
    for system, note in dict.fromkeys((system, note) for system, note, _ in figures if note):
        console.print(f"{system}: {note}.")
    console.print(f"Sources: {'; '.join(dict.fromkeys(source for _, _, source in figures))}.")


def _table(title: str, *columns: str) -> Table:
    return aligned_table(title, *columns, text=_TEXT_COLUMNS)


def _number(value: float | None, form: str) -> str:
    """A value, or a dash for hardware that has no model."""
    return "-" if value is None else format(value, form)
