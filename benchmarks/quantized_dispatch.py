"""Standard run: dispatch of rows that are quantised on the way, beside the same rows in bfloat16.

`python benchmarks/quantized_dispatch.py [--ranks 2 --tokens 2048 --json FILE]`, or `run_quantized_dispatch(...)`. One
handle and one routing for all, interleaved; what arrives is compared with torch's definition, bit by bit, before and
after. `two steps` is what it takes without `quantize=`: torch makes float8, then two tensors are dispatched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.reporting import RESULTS, integers, progress_bar, words
from benchmarks.timing import WHOLE, Contestant, Step, interleave, statistics
from benchmarks.workload import Case, Workload
from benchmarks.world import Progress, run_world

PLAIN = "bfloat16"
TWO_STEPS = "Float8 in two steps"
_CHECKED_ROWS = 1024  # at a time


class Receiver:
    """What the contestants share: a handle, a routing, and the rows that should arrive, as (source, token) of each."""

    def __init__(self, world: Any, case: Case):
        self.workload = Workload(case, world.rank)
        self.sources = [Workload(case, rank).x for rank in range(case.ranks)]
        self.handle = world.epcomm.expert_parallel(
            num_experts=case.experts, topk=case.topk, hidden=case.hidden, max_tokens=case.tokens, layout=case.layout
        )
        self.routing = self.handle.route(self.workload.topk_idx)
        self.rows = self._rows(case, world.rank)
        self.received: Any = None  # one for all: a handle lends two blocks

    def _rows(self, case: Case, rank: int) -> list[tuple[int, torch.Tensor]]:
        """(source, its tokens) in the order of arrival."""
        first = rank * self.workload.local_experts
        routings = [self.workload.routing_of(source) for source in range(case.ranks)]
        groups = [range(first, first + self.workload.local_experts)]
        if case.layout != "flat":
            groups = [range(expert, expert + 1) for expert in groups[0]]
        return [
            (source, ((routing >= group.start) & (routing < group.stop)).any(dim=1).nonzero()[:, 0])
            for group in groups
            for source, routing in enumerate(routings)
        ]

    def dispatch(self, x: Any, **options: Any) -> None:
        self.received = None
        self.received = self.handle.dispatch(x, self.routing, **options)

    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors that arrived."""
        x = self.received.x
        return x if isinstance(x, tuple) else (x,)

    def poison(self) -> None:
        if self.received is not None:
            for part in self.parts():
                part.view(torch.uint8).fill_(0xA5)

    def check(self, makes: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        """Raises unless what arrived is what `makes` makes of every row."""
        at = 0
        for source, tokens in self.rows:
            for chunk in tokens.split(_CHECKED_ROWS):
                made = makes(self.sources[source][chunk])
                for number, (got, wanted) in enumerate(zip(self.parts(), made, strict=True)):
                    got = got[at : at + len(chunk)].view(torch.uint8)
                    if not torch.equal(got, wanted.view(torch.uint8)):
                        raise AssertionError(f"tensor {number}, rows {at} to {at + len(chunk) - 1} from rank {source}")
                at += len(chunk)
        if at != len(self.parts()[0]):
            raise AssertionError(f"{len(self.parts()[0])} rows, wanted {at}")


def _contestants(receiver: Receiver) -> list[Contestant]:
    from epcomm import MXFP8, NVFP4, Float8

    x, float8 = receiver.workload.x, Float8()

    def contestant(name: str, call: Callable[[], None], makes: Callable[..., tuple[torch.Tensor, ...]]) -> Contestant:
        return Contestant(name, name, [Step("dispatch", call)], receiver.poison, lambda: receiver.check(makes))

    found = [contestant(PLAIN, lambda: receiver.dispatch(x), lambda rows: (rows,))]
    for name, quantize in (
        ("Float8", float8),
        ("Float8, scales 2^n", Float8(round_scales_to_power_of_two=True)),
        ("MXFP8", MXFP8()),
        ("NVFP4", NVFP4()),
    ):
        call = lambda quantize=quantize: receiver.dispatch(x, quantize=quantize)  # noqa: E731
        found.append(contestant(name, call, quantize.quantized))
    found.append(contestant(TWO_STEPS, lambda: receiver.dispatch(float8.quantized(x)), float8.quantized))
    # a family each: all are timed after another one's rows have gone through the caches
    return [Contestant(item.name, item.name.replace(" ", "_"), item.steps, item.poison, item.check) for item in found]


def measure_quantized(world: Any, cases: list[Case], budget: float) -> None:
    """The bench function that every rank runs; rank 0 emits rows as they come."""
    for index, case in enumerate(cases):
        world.progress(index, len(cases), case.label())
        receiver = Receiver(world, case)
        contestants = _contestants(receiver)
        timings = interleave(world, contestants, budget=budget, min_rounds=15, max_rounds=200, warm=False)
        for contestant in contestants:
            contestant.steps[0].call()
            row_bytes = sum(part.shape[-1] * part.element_size() for part in receiver.parts())
            world.gate.wait()
            numbers = statistics(timings[contestant.name].cold[WHOLE])
            payload = receiver.workload.payload_rows() * row_bytes
            row = results.row(
                case.as_dict(), case.label(), contestant.name, "epcomm", "dispatch", "cold", numbers,
                payload_bytes=payload,
            )  # fmt: skip
            world.emit("row", row)
        receiver.received = None
        receiver.handle.close()
    world.progress(len(cases), len(cases), "done")


def run_quantized_dispatch(
    ranks: Sequence[int] = (2,),
    tokens: Sequence[int] = (2048,),
    hidden: int = 7168,
    experts: int = 64,
    topk: int = 8,
    layout: Sequence[str] = ("flat", "contiguous"),
    budget: float = 10.0,
    on_progress: Progress | None = None,
) -> dict[str, Any]:
    """The document: times, bytes, and both as shares of bfloat16's."""
    options = {
        "ranks": list(ranks), "tokens": list(tokens), "hidden": hidden, "experts": experts, "topk": topk,
        "layout": list(layout), "budget": budget,
    }  # fmt: skip
    document = results.new_document("quantized_dispatch", options)
    for size in ranks:
        cases = [Case(size, count, hidden, experts, topk, layout=kind) for kind in layout for count in tokens]
        deadline = 120 + len(cases) * (6 * budget + 120)
        outcome = run_world(
            measure_quantized, size, cases, budget, without=("mpi",), deadline=deadline, on_progress=on_progress
        )
        results.add_outcome(document, outcome)
    plain = {item["label"]: item for item in document["rows"] if item["contestant"] == PLAIN}
    for item in document["rows"]:
        reference = plain[item["label"]]
        item["share_of_time"] = round(item["p50_us"] / reference["p50_us"], 3)
        item["share_of_bytes"] = round(item["bytes"] / reference["bytes"], 3)
    return document


def print_quantized(document: dict[str, Any], console: Console) -> None:
    """A line per case and format."""
    table = Table("case", "rows travel as", "p50 ms", "p95 ms", "MB", "of the time", "of the bytes")
    for item in document["rows"]:
        times = [f"{item[name] / 1e3:.2f}" for name in ("p50_us", "p95_us")]
        shares = [f"{item[name]:.2f}" for name in ("share_of_time", "share_of_bytes")]
        table.add_row(item["label"], item["contestant"], *times, f"{item['bytes'] / 1e6:.1f}", *shares)
    console.print(table)
    for failure in document["failures"]:
        console.print(failure, markup=False)


def main(
    ranks: str = typer.Option("2", help="world sizes, comma-separated"),
    tokens: str = typer.Option("2048", help="tokens per rank"),
    hidden: int = typer.Option(7168, help="elements per row"),
    layout: str = typer.Option("flat,contiguous", help="layouts of the received rows"),
    budget: float = typer.Option(10.0, help="seconds of interleaved timing per case"),
    json: Path = typer.Option(RESULTS / "quantized_dispatch.json", help="write the document here"),
) -> None:
    """Quantised dispatch beside bfloat16."""
    with progress_bar() as on_progress:
        document = run_quantized_dispatch(
            integers(ranks), integers(tokens), hidden, layout=words(layout), budget=budget, on_progress=on_progress
        )
    print_quantized(document, Console(width=118))
    results.save(document, json)
    raise typer.Exit(1 if document["failures"] else 0)


if __name__ == "__main__":
    typer.run(main)
