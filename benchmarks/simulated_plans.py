"""Simulations of plans beside our own measurements: `python benchmarks/simulated_plans.py [--json FILE]`.

It measures nothing itself: benchmarks/results/plans.json has the times of plans that ranks ran on cores. For each
number of ranks three constants of a core, launch, message and bytes, are fitted to one algorithm's plans, by the
simulation itself. Then all other algorithms' plans are simulated on that machine, event by event, with as many threads
per rank as it had. The document's rows have the measured time, the simulated one, and their ratio.
"""

from __future__ import annotations

import json as json_module
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import typer
from rich.console import Console

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.plans import measured_plan
from epcomm.rich_tables import aligned_table, size_text
from epcomm.simulation.costs import Costs
from epcomm.simulation.events import simulate
from epcomm.simulation.network import RoutedNetwork
from epcomm.topology import PRESETS

RESULTS = Path(__file__).parent / "results"
_FITTED = "ring"
_NUM_THREADS = 1  # of a rank, on the machine that was measured: it has two cores
_FIRST_GUESS = (1.0, 1.0, 10.0)  # launch and message, µs; GB/s that a core moves
_FASTER_THAN_CORES = 1e5  # GB/s: only cores limit


def measured() -> dict[int, dict[tuple[str, int], float]]:
    """µs of plans by the protocol simple, called again at once, by ranks: of an algorithm and bytes the median of the
    worlds' medians.
    """
    times: dict[int, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in json_module.loads((RESULTS / "plans.json").read_text())["rows"]:
        kind, name, *protocol = row["contestant"].split()
        if kind == "plan" and not protocol and row["temperature"] == "warm":
            times[row["case"]["ranks"]][name, row["case"]["bytes"]].append(row["p50_us"])
    return {ranks: {case: median(each) for case, each in found.items()} for ranks, found in times.items()}


def simulated(name: str, num_ranks: int, num_bytes: int, constants: tuple[float, float, float]) -> float:
    """µs of the plan that was measured, on cores of these constants."""
    launch, message, channel = constants
    costs = Costs(launch, channel=channel, latency={"nvlink": message})
    network = RoutedNetwork(PRESETS["full_mesh"](num_ranks, _FASTER_THAN_CORES))
    plan = measured_plan(name, num_ranks, num_bytes, _NUM_THREADS)
    return simulate(plan, num_bytes, network, costs, num_workers=_NUM_THREADS).makespan


def fit(num_ranks: int, times: dict[tuple[str, int], float]) -> tuple[float, float, float]:
    """The constants for which the fitted algorithm's simulations are closest, by squares of logarithms of ratios."""

    def error(constants: tuple[float, ...]) -> float:
        launch, message, channel = constants
        found = (
            math.log(simulated(name, num_ranks, num_bytes, (launch, message, channel)) / time)
            for (name, num_bytes), time in times.items() if name == _FITTED
        )  # fmt: skip
        return sum(each**2 for each in found)

    best, factor = _FIRST_GUESS, 4.0
    least = error(best)
    while factor > 1.01:
        steps = [
            tuple(value * by if at == changed else value for at, value in enumerate(best))
            for changed in range(len(best)) for by in (factor, 1 / factor)
        ]  # fmt: skip
        nearest, to = min((error(each), each) for each in steps)
        if nearest < least:
            best, least = (to[0], to[1], to[2]), nearest
        else:
            factor = math.sqrt(factor)
    return best


def compared() -> Iterator[dict]:
    """Each number of ranks: the constants, its rows, and of those not fitted the factors by which they are off."""
    for num_ranks, times in measured().items():
        launch, message, channel = constants = fit(num_ranks, times)
        rows = [_row(name, num_ranks, num_bytes, time, constants) for (name, num_bytes), time in times.items()]
        factors = [max(row["ratio"], 1 / row["ratio"]) for row in rows if not row["fitted"]]
        yield {
            "ranks": num_ranks, "launch_us": round(launch, 3), "message_us": round(message, 3),
            "channel_gb_per_s": round(channel, 3), "median_factor": round(median(factors), 3),
            "largest_factor": round(max(factors), 3), "rows": rows,
        }  # fmt: skip


def _row(name: str, num_ranks: int, num_bytes: int, time: float, constants: tuple[float, float, float]) -> dict:
    ours = simulated(name, num_ranks, num_bytes, constants)
    return {
        "name": name, "bytes": num_bytes, "fitted": name == _FITTED, "measured_us": round(time, 3),
        "simulated_us": round(ours, 3), "ratio": round(ours / time, 3),
    }  # fmt: skip


def main(json: Path | None = typer.Option(None, help="file to write")) -> None:
    """Compares simulations with what ranks on cores took."""
    document = results.new_document("simulated_plans", {})
    document["worlds"] = list(compared())
    for world in document["worlds"]:
        title = "{ranks} ranks: launch {launch_us} µs, message {message_us} µs, {channel_gb_per_s} GB/s".format(**world)
        table = aligned_table(title, "plan", "size", "measured, µs", "simulated, µs", "ratio", text=("plan",))
        for row in world["rows"]:
            numbers = (f"{row[name]:.1f}" for name in ("measured_us", "simulated_us"))
            name = row["name"] + ", fitted" * row["fitted"]
            table.add_row(name, size_text(row["bytes"]), *numbers, f"{row['ratio']:.2f}")
        Console().print(table)
        Console().print("not fitted: off by {median_factor}x in the median, {largest_factor}x at most".format(**world))
    if json is not None:
        results.save(document, json)


if __name__ == "__main__":
    typer.run(main)
