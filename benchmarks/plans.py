"""Allreduce by plans beside the kernels written by hand: `python benchmarks/plans.py [--protocols simple,ll,ll128]`.

All run bound, out of place, interleaved in random order; each sample is the slowest rank's. A row's `to_kernel` says
how many times the time of the best hand-written kernel its p50 is, in the same world, called in the same way (cold or
warm). Each case is measured in several worlds, since which ranks share a core, and whether cores share a cache, differs
from world to world; what is printed are medians of their ratios.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.allreduce_measurement import AllreduceCase, Message
from benchmarks.reporting import RESULTS, integers, words
from benchmarks.timing import WHOLE, Contestant, Step, interleave, statistics
from benchmarks.world import run_world
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import Plan
from epcomm.collectives.planned import named_plan
from epcomm.kernels.protocol.lines import PROTOCOLS, SIMPLE

_KERNELS = ("one_shot", "two_shot")
_ONE_SHOT_LIMIT = 32 << 10
_PLANS = "ring,bidirectional_ring,halving_doubling,double_binary_tree,pat,two_shot"
_SIZES = "1024,65536,1048576,4194304,16777216,67108864"
_MAX_ROUNDS = 300


def measured_plan(name: str, num_ranks: int, num_bytes: int, num_channels: int) -> Plan:
    """An algorithm's plan as its name makes it; where that means a kernel, the plainest."""
    if name in _KERNELS:
        return ALGORITHMS[name].plan("allreduce", num_ranks)
    return named_plan(name, "allreduce", num_ranks, 0, num_bytes, num_channels)


def _contestants(world: Any, message: Message, plans: Sequence[str], protocols: Sequence[str]) -> list[Contestant]:
    comm, num_bytes = world.epcomm, message.x.nbytes
    algorithms: dict[str, Any] = {
        f"kernel {name}": name for name in _KERNELS if name != "one_shot" or num_bytes <= _ONE_SHOT_LIMIT
    }
    for name, way in itertools.product(plans, protocols):
        plan = measured_plan(name, comm.size, num_bytes, comm._binder.num_channels)
        algorithms[f"plan {name}" + f" {way}" * (way != SIMPLE)] = replace(plan, protocol=way)
    found = []
    for name, algorithm in algorithms.items():
        out = torch.empty_like(message.x)
        call = comm.bind_allreduce(message.x, out=out, algorithm=algorithm)
        found.append(
            Contestant(
                name, f"epcomm {name}", [Step("allreduce", call)],
                poison=lambda out=out: out.fill_(float("nan")), check=lambda out=out: message.check(out),
            )
        )  # fmt: skip
    return found


def measure_plans(
    world: Any, cases: list[AllreduceCase], plans: Sequence[str], protocols: Sequence[str], budget: float
) -> None:
    """The bench function that every rank runs; rank 0 emits rows."""
    for index, case in enumerate(cases):
        world.progress(index, len(cases), case.label())
        contestants = _contestants(world, Message(case, world.rank), plans, protocols)
        timings = interleave(world, contestants, budget=budget, max_rounds=_MAX_ROUNDS)
        for temperature in ("cold", "warm"):
            numbers = {
                name: statistics(getattr(timing, temperature)[WHOLE])
                for name, timing in timings.items()
                if getattr(timing, temperature)
            }
            kernel = min(row["p50_us"] for name, row in numbers.items() if name.startswith("kernel"))
            for name, row in numbers.items():
                row["to_kernel"] = round(row["p50_us"] / kernel, 2)
                made = results.row(
                    asdict(case), case.label(), name, f"epcomm {name}", "allreduce", temperature, row,
                    payload_bytes=case.bytes,
                )  # fmt: skip
                world.emit("row", made)


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints medians over worlds, of each contestant and of each world's fastest plan."""
    times, ratios = defaultdict(list), defaultdict(list)
    fastest: dict[Any, float] = {}
    for row in rows:
        case = row["label"], row["temperature"]
        times[(*case, row["contestant"])].append(row["p50_us"])
        ratios[(*case, row["contestant"])].append(row["to_kernel"])
        if row["contestant"].startswith("plan"):
            world = *case, row["world"]
            fastest[world] = min(row["to_kernel"], fastest.get(world, row["to_kernel"]))
    for (label, temperature, _), ratio in fastest.items():
        ratios[label, temperature, "fastest plan"].append(ratio)
    table = Table("case", "", "", "p50, µs", "to kernel", "in worlds")
    for key in sorted(ratios, key=list(ratios).index):
        label, temperature, name = key
        time = f"{median(times[key]):.0f}" if key in times else ""
        spread = f"{min(ratios[key]):.2f} to {max(ratios[key]):.2f}"
        table.add_row(label, temperature, name, time, f"{median(ratios[key]):.2f}", spread)
    Console(width=120).print(table)


def main(
    ranks: str = typer.Option("2,4", help="world sizes, comma-separated"),
    sizes: str = typer.Option(_SIZES, help="message sizes in bytes"),
    plans: str = typer.Option(_PLANS, help="algorithms"),
    protocols: str = typer.Option(SIMPLE, help=f"of plans: {', '.join(PROTOCOLS)}"),
    budget: float = typer.Option(1.0, help="seconds of interleaved timing per case and world"),
    worlds: int = typer.Option(3, help="worlds that measure each case"),
    json: Path = typer.Option(RESULTS / "plans.json", help="write the document here"),
) -> None:
    """Plans beside kernels, for each size and number of ranks."""
    options = {"ranks": integers(ranks), "sizes": integers(sizes), "plans": words(plans)}
    options |= {"protocols": words(protocols), "budget": budget, "worlds": worlds}
    document = results.new_document("plans", options)
    for world, num_ranks in itertools.product(range(worlds), integers(ranks)):
        cases = [AllreduceCase(num_ranks, size, "float32") for size in integers(sizes)]
        deadline = 120 + len(cases) * (4 * budget + 60)
        outcome = run_world(
            measure_plans, num_ranks, cases, words(plans), words(protocols), budget,
            without=("mpi", "gloo"), deadline=deadline,
        )  # fmt: skip
        before = len(document["rows"])
        results.add_outcome(document, outcome)
        for row in document["rows"][before:]:
            row["world"] = world
    _show(document["rows"])
    results.save(document, json)
    raise typer.Exit(1 if document["failures"] else 0)


if __name__ == "__main__":
    typer.run(main)
