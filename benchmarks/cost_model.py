"""How good prices and simulations are: `python benchmarks/cost_model.py [--json FILE]`. It measures nothing itself.

Five comparisons, all in µs:

* `schedules`: allgathers of TE-CCL's solver, replayed event by event, beside the finish times it published;
* `published`: allreduces of 8 ranks on H100s, priced, beside what others measured or what NCCL's model says;
* `choices`: the plan of the least price, of each collective, simulated, beside the best of all algorithms' plans by
  simulation;
* `fits`: constants of ranks that are processes on CPUs, fitted by least squares of relative errors to the medians of
  benchmarks/results/allreduce.json, and what they predict for runs that they were not fitted to;
* `meetings`: what a plan takes longer than the kernel of its algorithm, in benchmarks/results/plans.json, where bytes
  don't matter, beside a fitted round: in it all ranks of a plan meet, and else both do the same.
"""

from __future__ import annotations

import itertools
import json as json_module
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import typer
from rich.console import Console

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import results
from benchmarks.published_schedules import SCHEDULES, read_schedule
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.choice import CHANNELS, Candidate, Request, candidates
from epcomm.collectives.cost.machines import Machine, find_machine
from epcomm.collectives.cost.protocols import PRICED, costs_of
from epcomm.collectives.cost.schedules import SCHEDULES as ROUNDS
from epcomm.collectives.plan import COLLECTIVES
from epcomm.kernels.protocol.collectives import ONE_SHOT_BYTES
from epcomm.model.published import ALLREDUCE as PUBLISHED
from epcomm.rich_tables import aligned_table, size_text
from epcomm.simulation.costs import Costs
from epcomm.simulation.events import simulate
from epcomm.simulation.network import Cluster, RoutedNetwork
from epcomm.simulation.rounds import Schedule

RESULTS = Path(__file__).parent / "results"
#: ASTRA-sim's inputs/network/analytical/HGX-H100-validated.yml: 8 GPUs around a switch, GB/s and µs of a hop
ASTRA_SIM = Cluster(8, 8, ("nvlink", 400.0, 0.93625))
_SIZES = tuple(4**power for power in range(5, 15))
_MEASURED = {"NCCL": None, "custom 1-stage": "one_shot", "custom 2-stage": "two_shot"}


def compare_schedules() -> Iterator[dict]:
    """Each schedule's published finish time and ours."""
    for path in sorted(SCHEDULES.glob("*.json")):
        schedule = read_schedule(path)
        timeline = simulate(schedule.plan(), schedule.chunk_bytes, RoutedNetwork(schedule.topology))
        yield _compared(schedule.name, "TE-CCL", schedule.num_bytes, schedule.finish, timeline.makespan)


def compare_published() -> Iterator[dict]:
    """Measured allreduces beside the cheapest plan of the same algorithm, or of a ring or tree for NCCL's: whose ranks
    don't meet first, and whose times are compared without that.
    """
    machine = find_machine("dgx_h100", 8)
    ring = ALGORITHMS["ring"].plan("allreduce", 8)
    for figure in PUBLISHED:
        name = figure.system.removeprefix("vLLM: ")
        if figure.ranks != 8 or name not in _MEASURED:
            continue
        algorithm = _MEASURED[name]
        names = ("ring", "double_binary_tree") if algorithm is None else (algorithm,)
        request = Request(figure.num_bytes, machine)
        price = candidates(request, algorithms=names, protocols=tuple(PRICED))[0].microseconds
        price -= machine.meeting if algorithm is None else 0.0
        yield _compared(f"{name}, measured", figure.source, figure.num_bytes, figure.microseconds, price)
        if algorithm is None:
            astra = simulate(ring, figure.num_bytes, ASTRA_SIM).makespan
            yield _compared("NCCL, measured; ring with ASTRA-sim's constants", figure.source, figure.num_bytes,
                            figure.microseconds, astra)  # fmt: skip
    for protocol, num_bytes in itertools.product(_NCCL_RING, _SIZES):
        model, price = nccl_ring(protocol, num_bytes), _ring_price(machine, protocol, num_bytes)
        yield _compared(f"ring, {protocol}: NCCL's model", "NCCL src/graph/tuning.cc", num_bytes, model, price)


def _ring_price(machine: Machine, protocol: str, num_bytes: int) -> float:
    """As NCCL's model has it: ranks don't meet, and steps come one after the other, for there is one piece."""
    schedule = Schedule(ROUNDS["ring"]["allreduce"](machine.world), machine.pricing_network)
    costs = {channels: costs_of(machine.kind, protocol, "ring", channels, 1) for channels in CHANNELS}
    return min(float(schedule.times(num_bytes, costs[each], channels=each).max()) for each in costs)


def compare_choices() -> Iterator[dict]:
    """The cheapest plan beside the best, of one of each algorithm, all simulated; and its price beside that."""
    for kind, name, num_bytes in itertools.product(COLLECTIVES, ("dgx_h100", "dgx1_v100"), (1 << 10, 1 << 20, 1 << 24)):
        found: dict[str, Candidate] = {}
        request = Request(num_bytes, find_machine(name, 8), kind=kind)
        for each in candidates(request, protocols=tuple(PRICED)):
            found.setdefault(each.algorithm, each)
        times = {algorithm: each.simulated().makespan for algorithm, each in found.items()}
        chosen, best = next(iter(found)), min(times, key=lambda algorithm: times[algorithm])
        row = _compared(f"{kind} on {name}: {chosen} chosen", "simulated", num_bytes, times[best], times[chosen])
        yield row | {"best": best, "price_us": round(found[chosen].microseconds, 3)}


# base and step latency, µs; bus bandwidth, GB/s, of 16 channels on 8 H100s whose links carry 450
_NCCL_RING = {
    "ll": (6.6, 0.6, min(141.0, 0.5 * 450.0)),
    "ll128": (14.0, 1.9, min(0.92 * 450.0, 16 * 36.7)),
    "simple": (8.4, 3.4, 450.0),
}


def nccl_ring(protocol: str, num_bytes: int, num_ranks: int = 8) -> float:
    """NCCL's model of an allreduce by a ring in one node: base + steps * latency + bytes / algorithm bandwidth."""
    base, latency, bus = _NCCL_RING[protocol]
    steps = 2 * (num_ranks - 1)
    return base + steps * latency + num_bytes / (bus * num_ranks / steps * 1e3)


def _compared(name: str, source: str, num_bytes: int, wanted: float, ours: float) -> dict:
    return {
        "name": name, "source": source, "bytes": num_bytes, "reference_us": round(wanted, 3), "ours_us": round(ours, 3),
        "ratio": round(ours / wanted, 3),
    }  # fmt: skip


def measured(path: Path, num_ranks: int) -> list[tuple[int, float]]:
    """(bytes, median µs) of epcomm's float32 allreduces, called again at once."""
    return [
        (row["case"]["bytes"], row["p50_us"]) for row in json_module.loads(path.read_text())["rows"]
        if row["case"]["ranks"] == num_ranks and row["case"]["dtype"] == "float32" and row["library"] == "epcomm"
        and row["temperature"] == "warm" and row["phase"] == "allreduce" and row["best"]
    ]  # fmt: skip


def features(num_ranks: int, num_bytes: int) -> tuple[float, float, float]:
    """What launch, a round's latency and a byte are multiplied by: one_shot for small sizes, else two_shot.

    A rank's program moves what it sends and what it gets.
    """
    if num_bytes <= ONE_SHOT_BYTES:
        return 1.0, 1.0, 2.0 * (num_ranks - 1) * num_bytes
    return 1.0, 2.0, 4.0 * (num_ranks - 1) / num_ranks * num_bytes


def fit(num_ranks: int, points: Sequence[tuple[int, float]]) -> np.ndarray:
    """µs of the launch, of a round, of a byte: least squares of relative errors, none below zero."""
    table = np.array([features(num_ranks, num_bytes) for num_bytes, _ in points])
    wanted = np.array([time for _, time in points])
    best, least = np.zeros(3), np.inf
    for used in itertools.product((False, True), repeat=3):
        columns = np.flatnonzero(used)
        if not len(columns):
            continue
        found, *_ = np.linalg.lstsq(table[:, columns] / wanted[:, None], np.ones(len(wanted)), rcond=None)
        error = float(((table[:, columns] @ found / wanted - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[columns] = found
    return best


def compare_fits() -> Iterator[dict]:
    """Each number of ranks: the constants, and the ratio of prediction and measurement, fitted and held out."""
    for num_ranks in (2, 4, 8):
        points = measured(RESULTS / "allreduce.json", num_ranks)
        constants = fit(num_ranks, points)
        launch, latency, per_byte = constants
        document = {
            "ranks": num_ranks, "launch_us": round(launch, 3), "round_us": round(latency, 3),
            "channel_gb_per_s": round(1e-3 / per_byte, 3), "fitted": _predicted(num_ranks, points, constants),
        }  # fmt: skip
        other = RESULTS / f"allreduce_{num_ranks}_ranks.json"
        if other.exists():
            document["held_out"] = _predicted(num_ranks, measured(other, num_ranks), constants)
        yield document


def compare_meetings() -> Iterator[dict]:
    """Of two_shot and 1 KiB, in the median of all worlds and of calls both cold and warm."""
    rows = json_module.loads((RESULTS / "plans.json").read_text())["rows"]
    for num_ranks in (2, 4):
        case = {"ranks": num_ranks, "bytes": 1024, "dtype": "float32"}
        plans, kernels = (
            {(row["world"], row["temperature"]): row["p50_us"] for row in rows
             if row["case"] == case and row["contestant"] == contestant}
            for contestant in ("plan two_shot", "kernel two_shot")
        )  # fmt: skip
        longer = float(np.median([time - kernels[call] for call, time in plans.items()]))
        _, one_round, _ = fit(num_ranks, measured(RESULTS / "allreduce.json", num_ranks))
        yield _compared(f"{num_ranks} ranks meet", "measured", 1024, longer, float(one_round))


def _predicted(num_ranks: int, points: Sequence[tuple[int, float]], constants: np.ndarray) -> dict:
    """Rows, and the median and largest factor by which they are off, up or down."""
    rows = [
        _compared("allreduce", "measured", num_bytes, time, float(np.dot(features(num_ranks, num_bytes), constants)))
        for num_bytes, time in points
    ]
    factors = [max(row["ratio"], 1 / row["ratio"]) for row in rows]
    summary = {"median_factor": round(float(np.median(factors)), 3), "largest_factor": round(max(factors), 3)}
    return summary | {"rows": rows}


def cpu_costs(document: dict) -> Costs:
    """The constants of 2 ranks as a kernel's costs."""
    two = next(each for each in document["fits"] if each["ranks"] == 2)
    latency = {"cache": two["round_us"], "socket": two["round_us"]}
    return Costs(launch=two["launch_us"], channel=two["channel_gb_per_s"], latency=latency)


def main(json: Path | None = typer.Option(None, help="file to write")) -> None:
    """Compares prices and simulations with what others published and with our own measurements."""
    document = results.new_document("cost_model", {})
    document |= {
        "schedules": list(compare_schedules()), "published": list(compare_published()),
        "choices": list(compare_choices()), "meetings": list(compare_meetings()), "fits": list(compare_fits()),
    }  # fmt: skip
    console = Console()
    titles = {"schedules": "replayed", "published": "priced", "choices": "chosen, against the best",
              "meetings": "plans beside kernels"}  # fmt: skip
    for key, title in titles.items():
        table = aligned_table(title, "name", "size", "reference, µs", "ours, µs", "ratio", text=("name",))
        for row in document[key]:
            numbers = (f"{row[name]:.1f}" for name in ("reference_us", "ours_us"))
            table.add_row(row["name"], size_text(row["bytes"]), *numbers, f"{row['ratio']:.2f}")
        console.print(table)
    table = aligned_table("fitted to CPUs", "ranks", "launch, µs", "round, µs", "GB/s", "fitted: median", "largest",
                          "held out: median", "largest off", text=())  # fmt: skip
    for each in document["fits"]:
        numbers = [f"{each[name]:.2f}" for name in ("launch_us", "round_us", "channel_gb_per_s")]
        for key in ("fitted", "held_out"):
            factors = ("median_factor", "largest_factor")
            numbers += [f"{each[key][name]:.2f}x" for name in factors] if key in each else ["-", "-"]
        table.add_row(str(each["ranks"]), *numbers)
    console.print(table)
    if json is not None:
        results.save(document, json)


if __name__ == "__main__":
    typer.run(main)
