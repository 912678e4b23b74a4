"""Bench of `epcomm.moe.MoELayer` beside the same layer on gloo: inference and training steps, and where the time goes.

`python benchmarks/moe_layer.py [--ranks 2] [--budget 10] [--json FILE]`. Both layers have the same router and experts,
and the same weights. A training step is forward and backward without an optimizer. The shapes are those of published
models, and one whose experts cost next to nothing: what is left of it is what moves the rows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.competitors.gloo_moe_layer import GlooMoELayer
from benchmarks.reporting import RESULTS, progress_bar
from benchmarks.timing import WHOLE, Contestant, Step, interleave, statistics
from benchmarks.world import Progress, run_world


@dataclass(frozen=True)
class LayerCase:
    """A layer, bfloat16."""

    ranks: int
    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    model: str
    training: bool

    def label(self) -> str:
        """A short name for progress and tables."""
        step = "training" if self.training else "inference"
        return f"{self.ranks} ranks, {self.tokens} x {self.hidden}, {self.model}, {step}"


#: hidden, intermediate, experts, topk
SHAPES = {
    "OLMoE-1B-7B": (2048, 1024, 64, 8),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "Granite-3.0-1B-A400M": (1024, 512, 32, 8),
    "thin experts": (2048, 32, 64, 8),
}
_TOLERANCE = 4e-2  # of bfloat16 layers, relative to the largest result: they round in different places


class Subject:
    """A layer and its step."""

    def __init__(self, layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor, training: bool):
        self.layer, self.x, self.gradient, self.training = layer, x, gradient, training
        self.out: torch.Tensor | None = None

    def step(self) -> None:
        if not self.training:
            with torch.no_grad():
                self.out = self.layer(self.x)
            return
        self.x.grad = None
        self.layer.zero_grad()
        self.out = self.layer(self.x)
        self.out.backward(self.gradient)

    def results(self) -> list[torch.Tensor]:
        assert self.out is not None
        found = [self.out.detach()]
        if self.training:
            experts = self.layer.experts
            found += [self.x.grad, self.layer.router.weight.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
        return found


def _contestant(name: str, subject: Subject, wanted: list[torch.Tensor]) -> Contestant:
    def check() -> None:
        for index, (got, want) in enumerate(zip(subject.results(), wanted, strict=True)):
            error = (got.float() - want.float()).abs().max() / want.float().abs().max()
            if not error <= _TOLERANCE:
                raise AssertionError(f"result {index} is off by {float(error):.3g} of the largest")

    def poison() -> None:
        subject.out = None

    return Contestant(name, name, [Step("step", subject.step)], poison, check)


def measure_layers(world: Any, cases: list[LayerCase], budget: float) -> None:
    """The bench function that every rank runs; rank 0 emits rows as they come."""
    from epcomm.moe.layer import MoELayer

    for index, case in enumerate(cases):
        world.progress(index, len(cases), case.label())
        torch.manual_seed(0)  # the router's weights are the same on all ranks
        layer = MoELayer(
            world.epcomm,
            hidden=case.hidden,
            intermediate=case.intermediate,
            num_experts=case.experts,
            topk=case.topk,
            max_tokens=case.tokens,
        )
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(case.tokens, case.hidden, generator=generator).bfloat16()
        gradient = torch.randn(case.tokens, case.hidden, generator=generator).bfloat16()
        subjects = {}
        for name in ("epcomm", "gloo"):
            mine = layer
            if name == "gloo":
                parts = copy.deepcopy(layer.router), copy.deepcopy(layer.experts)
                mine = GlooMoELayer(*parts, case.experts, case.ranks)
            subjects[name] = Subject(mine, x.clone().requires_grad_(case.training), gradient, case.training)
        subjects["gloo"].step()
        wanted = [result.clone() for result in subjects["gloo"].results()]
        contestants = [_contestant(name, subject, wanted) for name, subject in subjects.items()]
        timings = interleave(world, contestants, budget=budget, warm=False)
        payload = case.tokens * case.topk * case.hidden * 2 * (4 if case.training else 2)
        for contestant in contestants:
            _emit(world, case, contestant.name, "round_trip", timings[contestant.name].cold[WHOLE], payload)
        if not case.training:
            for phase, samples in _parts(world, layer, x).items():
                _emit(world, case, "epcomm", phase, samples, None)
        layer.close()
    world.progress(len(cases), len(cases), "done")


def _parts(world: Any, layer: Any, x: torch.Tensor, iterations: int = 15) -> dict[str, Any]:
    """The parts of a forward pass, each from a barrier on."""
    made: dict[str, Any] = {}

    def route() -> None:
        made["idx"], made["weights"] = layer.router(x)
        made["routing"] = layer.ep.route(made["idx"])

    def dispatch() -> None:
        made["received"] = layer.ep.dispatch(x, made["routing"])

    def experts() -> None:
        received = made["received"]
        made["y"] = layer.experts(received.x, received.expert_offsets, out=received.output_buffer())

    def combine() -> None:
        layer.ep.combine(made["y"], made["received"], made["weights"])
        made.clear()

    calls: list[Callable[[], None]] = [route, dispatch, experts, combine]
    contestant = Contestant("parts", "parts", [Step(call.__name__, call) for call in calls], _nothing, _nothing)
    with torch.no_grad():
        timings = interleave(world, [contestant], budget=1.0, min_rounds=iterations, warm=False)
    return {call.__name__: timings["parts"].cold[call.__name__] for call in calls}


def _nothing() -> None:
    pass


def _emit(world: Any, case: LayerCase, name: str, phase: str, samples: Any, payload: float | None) -> None:
    numbers = statistics(samples)
    found = results.row(asdict(case), case.label(), name, name, phase, "cold", numbers, payload_bytes=payload)
    world.emit("row", found)


def run_moe_layer(
    ranks: int = 2, tokens: int = 512, budget: float = 10.0, on_progress: Progress | None = None
) -> dict[str, Any]:
    """The document: steps of both layers, interleaved, and the parts of epcomm's."""
    cases = [
        LayerCase(ranks, tokens, *shape, model, training)
        for model, shape in SHAPES.items()
        for training in (False, True)
    ]
    document = results.new_document("moe_layer", {"ranks": ranks, "tokens": tokens, "budget": budget})
    deadline = 120 + len(cases) * (6 * budget + 60)
    outcome = run_world(
        measure_layers, ranks, cases, budget, without=("mpi",), deadline=deadline, on_progress=on_progress
    )
    results.add_outcome(document, outcome)
    results.rate_contestants(document)
    return document


def print_layers(document: dict[str, Any], console: Console) -> None:
    """A line per case."""
    parts = ("route", "dispatch", "experts", "combine")
    table = Table("layer", "epcomm ms", "gloo ms", "faster", *parts, title="median of the slowest rank")
    by_label: dict[str, dict[tuple[str, str], float]] = {}
    for item in document["rows"]:
        by_label.setdefault(item["label"], {})[item["library"], item["phase"]] = item["p50_us"] / 1e3
    for label, found in by_label.items():
        ours, gloo = found["epcomm", "round_trip"], found["gloo", "round_trip"]
        split = [f"{found['epcomm', part]:.2f}" if ("epcomm", part) in found else "" for part in parts]
        table.add_row(label, f"{ours:.1f}", f"{gloo:.1f}", f"{gloo / ours:.2f}x", *split)
    console.print(table)
    for failure in document["failures"]:
        console.print(failure, markup=False)


def main(
    ranks: int = typer.Option(2, help="number of ranks"),
    tokens: int = typer.Option(512, help="tokens per rank"),
    budget: float = typer.Option(10.0, help="seconds of interleaved timing per case"),
    json: Path = typer.Option(RESULTS / "moe_layer.json", help="write the document here"),
) -> None:
    """MoE layers on epcomm and on gloo."""
    with progress_bar() as on_progress:
        document = run_moe_layer(ranks, tokens, budget, on_progress)
    print_layers(document, Console())
    results.save(document, json)
    raise typer.Exit(1 if document["failures"] else 0)


if __name__ == "__main__":
    typer.run(main)
