"""Bench of DistributedDataParallel on epcomm's backend of `torch.distributed`, beside gloo: time per training step.

`python benchmarks/ddp.py [--ranks 2] [--budget 20] [--json FILE]`. Both train copies of one model in the same processes
on the same data, a step of the one after a step of the other in random order. A step is forward, backward and SGD; the
losses of the two are compared bit by bit with 2 ranks (with more, gloo adds in another order), before and after timing.
`round_trip` is the step, `allreduce` that of DDP's buckets alone. Bytes are those of the gradients, per rank; the
roofline is what copying as many takes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.reporting import RESULTS, progress_bar
from benchmarks.roofline import Rooflines
from benchmarks.timing import WHOLE, Contestant, Step, interleave, statistics
from benchmarks.world import Progress, run_world


@dataclass(frozen=True)
class ModelCase:
    """A model, float32, and the batch of each rank."""

    ranks: int
    model: str
    width: int
    depth: int
    batch: int

    def label(self) -> str:
        """A short name for progress and tables."""
        return f"{self.ranks} ranks, {self.model}"

    def build(self) -> nn.Module:
        """The same weights on all ranks."""
        torch.manual_seed(0)
        if self.model.startswith("transformer"):
            layers = [
                nn.TransformerEncoderLayer(self.width, 4, 4 * self.width, dropout=0.0, batch_first=True)
                for _ in range(self.depth)
            ]
        else:
            layers = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.depth)]
        return nn.Sequential(*layers, nn.Linear(self.width, 1))

    def data(self, rank: int) -> torch.Tensor:
        """The batch of a rank: [batch, width], or [batch, 16, width] for a transformer."""
        shape = (self.batch, 16, self.width) if self.model.startswith("transformer") else (self.batch, self.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


#: width, depth, batch
MODELS = {
    "MLP, 0.5 MB of gradients": (128, 8, 32),
    "MLP, 8 MB": (512, 8, 32),
    "MLP, 64 MB": (1448, 8, 32),
    "transformer, 13 MB": (256, 4, 8),
}


class Trainer:
    """A model in DistributedDataParallel on a group, and its step."""

    def __init__(self, case: ModelCase, group: Any, rank: int):
        self.module = case.build()
        self.model = nn.parallel.DistributedDataParallel(self.module, process_group=group)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)
        self.x, self.group = case.data(rank), group
        self.losses: list[float] = []
        numel = sum(parameter.numel() for parameter in self.module.parameters())
        self.buckets = list(torch.ones(numel).split(25 * 2**20 // 4))  # DDP's default is 25 MiB

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = ((self.model(self.x) - 1) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def allreduce(self) -> None:
        for bucket in self.buckets:
            dist.all_reduce(bucket, group=self.group)

    def poison(self) -> None:
        for bucket in self.buckets:
            bucket.fill_(1.0)

    def check_buckets(self) -> None:
        if not all(bool((bucket == dist.get_world_size()).all()) for bucket in self.buckets):
            raise AssertionError("wrong sums")


def check_losses(trainers: dict[str, Trainer], ranks: int) -> None:
    """Those of the steps that both have done."""
    pairs = list(zip(trainers["gloo"].losses, trainers["epcomm"].losses))
    tolerance = 0.0 if ranks <= 2 else 1e-5
    wrong = [pair for pair in pairs if not abs(pair[0] - pair[1]) <= tolerance * abs(pair[0])]
    if wrong or len({gloo for gloo, _ in pairs}) < 2:
        raise AssertionError(f"losses of gloo and epcomm differ, or stay as they are: {(wrong or pairs)[:3]}")


def measure_steps(world: Any, cases: list[ModelCase], budget: float) -> None:
    """The bench function that every rank runs; rank 0 emits rows as they come."""
    import epcomm.integrations.c10d  # noqa: F401

    rooflines = Rooflines(world)
    groups = {"gloo": dist.group.WORLD, "epcomm": dist.new_group(backend="epcomm")}
    for index, case in enumerate(cases):
        world.progress(index, len(cases), case.label())
        trainers = {name: Trainer(case, group, world.rank) for name, group in groups.items()}

        num_bytes = sum(bucket.nbytes for bucket in trainers["gloo"].buckets)
        roofline = rooflines.at(1 << 16, num_bytes)
        for trainer in [*trainers.values()] * 2:
            trainer.step()
        check = partial(check_losses, trainers, case.ranks)
        steps = [Contestant(name, name, [Step("step", each.step)], _nothing, check) for name, each in trainers.items()]
        sums = [
            Contestant(name, name, [Step("sum", each.allreduce)], each.poison, each.check_buckets)
            for name, each in trainers.items()
        ]
        for phase, contestants, limit in ((WHOLE, steps, None), ("allreduce", sums, roofline)):
            timings = interleave(world, contestants, budget=budget, min_rounds=20, max_rounds=300, warm=False)
            for name in trainers:
                numbers = statistics(timings[name].cold[WHOLE])
                found = results.row(asdict(case), case.label(), name, name, phase, "cold", numbers,
                                    payload_bytes=num_bytes, roofline=limit)  # fmt: skip
                world.emit("row", found)
    world.progress(len(cases), len(cases), "done")
    dist.destroy_process_group(groups["epcomm"])


def _nothing() -> None:
    pass


def run_ddp(ranks: int = 2, budget: float = 20.0, on_progress: Progress | None = None) -> dict[str, Any]:
    """The document: steps of both, interleaved, and the allreduce of the gradients alone."""
    cases = [ModelCase(ranks, model, *shape) for model, shape in MODELS.items()]
    document = results.new_document("ddp", {"ranks": ranks, "budget": budget})
    deadline = 120 + len(cases) * (6 * budget + 60)
    outcome = run_world(
        measure_steps, ranks, cases, budget, without=("mpi",), deadline=deadline, on_progress=on_progress
    )
    results.add_outcome(document, outcome)
    results.rate_contestants(document)
    return document


def print_steps(document: dict[str, Any], console: Console) -> None:
    """A line per case and phase."""
    table = Table("model", "", "epcomm ms (p95)", "gloo ms (p95)", "faster", "of the copy roofline")
    by_label: dict[tuple[str, str], dict[str, dict]] = {}
    for item in document["rows"]:
        by_label.setdefault((item["label"], item["phase"]), {})[item["library"]] = item
    for (label, phase), found in by_label.items():
        ours, gloo = found["epcomm"], found["gloo"]
        cells = [f"{item['p50_us'] / 1e3:.2f} ({item['p95_us'] / 1e3:.2f})" for item in (ours, gloo)]
        fraction = str(ours.get("roofline_fraction", ""))
        table.add_row(label, phase, *cells, f"{ours['ratios']['gloo']:.2f}x", fraction)
    console.print(table)
    for failure in document["failures"]:
        console.print(failure, markup=False)


def main(
    ranks: int = typer.Option(2, help="number of ranks"),
    budget: float = typer.Option(20.0, help="seconds of interleaved timing per case"),
    json: Path = typer.Option(RESULTS / "ddp.json", help="write the document here"),
) -> None:
    """Training steps on epcomm and on gloo."""
    with progress_bar() as on_progress:
        document = run_ddp(ranks, budget, on_progress)
    print_steps(document, Console())
    results.save(document, json)
    raise typer.Exit(1 if document["failures"] else 0)


if __name__ == "__main__":
    typer.run(main)
