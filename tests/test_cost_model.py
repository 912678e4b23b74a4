"""Prices and the choice by them, machines by name, `epcomm explain`, and the committed comparison with others."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from functools import cache
from statistics import median

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from benchmarks import cost_model, results, simulated_plans
from benchmarks.published_schedules import SCHEDULES, read_schedule
from epcomm.cli.main import app
from epcomm.collectives.cost.choice import SURE, Candidate, Request, candidates, choose
from epcomm.collectives.cost.machines import Machine, find_machine
from epcomm.collectives.cost.protocols import CPU_COSTS, CPU_PLAN_COSTS, KERNEL, PRICED, costs_of, protocols_of
from epcomm.collectives.cost.schedules import algorithms_of
from epcomm.collectives.plan import COLLECTIVES
from epcomm.collectives.plan.conditions import REDUCTIONS, ROOTED
from epcomm.collectives.plan.verify import verify
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.explain.alternatives import ALTERNATIVES
from epcomm.explain.drawings import check_path, draw_placement, draw_schedule
from epcomm.explain.explanation import explain
from epcomm.simulation.events import simulate
from epcomm.simulation.network import RoutedNetwork

MIB = 1 << 20


@cache
def machine(name: str, num_ranks: int) -> Machine:
    return find_machine(name, num_ranks)


def chosen(
    num_bytes: int, name: str = "dgx_h100", num_ranks: int = 8, dtype: str = "float32", kind: str = "allreduce"
) -> Candidate:
    return choose(Request(num_bytes, machine(name, num_ranks), dtype, kind))


def plans(request: Request) -> list[Candidate]:
    """Of every protocol, cheapest first."""
    return candidates(request, protocols=tuple(PRICED))


def cheapest_plan(num_bytes: int, name: str = "dgx_h100", num_ranks: int = 8) -> Candidate:
    return plans(Request(num_bytes, machine(name, num_ranks)))[0]


def test_small_tensors_get_few_steps_and_large_ones_few_bytes():
    small, large = cheapest_plan(1024), cheapest_plan(1024 * MIB)
    assert (small.algorithm, small.protocol, small.channels) == ("one_shot", "ll", 1)
    assert large.algorithm.endswith("ring") and large.protocol == "simple" and large.channels > 1
    assert cheapest_plan(1024, "dgx1_v100").algorithm == "recursive_doubling"  # where not all are neighbours
    assert cheapest_plan(256 * MIB, "dgx_h100", 16).algorithm == "hierarchical"  # the network carries an eighth of it
    assert cheapest_plan(1024, "ring").algorithm.endswith("ring")  # ranks that forward are the only way


def test_prices_grow_with_bytes():
    before = 0.0
    for power in range(8, 31, 2):
        found = plans(Request(2**power, machine("dgx_h100", 8)))
        prices = [each.microseconds for each in found]
        assert prices == sorted(prices) and prices[0] > before
        assert {(each.algorithm, each.protocol) for each in found} == {
            (name, protocol) for name in algorithms_of("allreduce") if name != "hierarchical" for protocol in PRICED
        }
        before = prices[0]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 7])
def test_odd_worlds(num_ranks):
    for name in ("dgx_h100", "full_mesh", "two_socket_host"):
        found = candidates(Request(1 << 16, machine(name, num_ranks)))
        assert found and all(each.microseconds > 0 for each in found)
        assert found[0].simulated().makespan > 0
        powers = {"swing"} if num_ranks & (num_ranks - 1) else set()
        assert not powers & {each.algorithm for each in found}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_sums_round_once(dtype):
    for num_bytes in (1024, MIB, 256 * MIB):
        half, single = chosen(num_bytes, dtype=dtype), chosen(num_bytes)
        assert half.rounds_once and half.wide_sums and half.roundings == 1
        found = plans(half.request)
        narrow = [each for each in found if not each.wide_sums]
        assert len(narrow) == len(found) / 2 and not any(each.rounds_once for each in narrow)
        assert all(each.roundings > 1 for each in narrow[:4])
        assert not single.wide_sums
        assert single.roundings == verify(single.plan).roundings
    two = plans(Request(MIB, machine("dgx_h100", 2), dtype))
    assert all(each.roundings == 1 and not each.wide_sums for each in two)  # one sum: nothing to widen


def test_wide_sums_cost_bytes_where_sums_travel():
    def price(name: str, dtype: str) -> float:
        request = Request(64 * MIB, machine("dgx_h100", 8), dtype)
        found = candidates(request, algorithms=(name,), protocols=("simple",))
        return next(each for each in found if each.rounds_once or dtype == "float32").microseconds

    assert price("ring", "bfloat16") > 1.2 * price("ring", "float32")
    assert price("two_shot", "bfloat16") == price("two_shot", "float32")


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_prices_are_close_to_simulations(kind):
    for name, num_ranks in (("dgx_h100", 8), ("dgx1_v100", 8), ("full_mesh", 5), ("two_socket_host", 4)):
        for num_bytes in (1 << 10, 1 << 20):
            request = Request(num_bytes, machine(name, num_ranks), kind=kind)
            found = candidates(request, protocols=protocols_of(name))[0]
            assert 0.8 < found.simulated().makespan / found.microseconds < 1.25


def test_ranks_of_plans_meet_first_and_those_of_kernels_do_not():
    request = Request(1024, machine("dgx_h100", 16))
    assert request.machine.meeting == 2.7  # a word on its way to another node
    assert machine("dgx_h100", 8).meeting == 0.7 and machine("dgx_h100", 1).meeting == 0
    for num_ranks, protocol in ((8, "simple"), (16, "ll")):
        request = Request(1024, machine("dgx_h100", num_ranks))
        found = candidates(request, algorithms=("ring",), protocols=(protocol,))[0]
        launch = PRICED[protocol].base[0] + request.machine.meeting
        assert found.costs.launch == pytest.approx(launch)
        assert found.simulated().parts["launch"] == pytest.approx(launch)
    for name, wanted in (("dgx_h100", PRICED["ll"].base[0]), ("two_socket_host", CPU_COSTS.launch)):
        found = candidates(Request(1024, machine(name, 8)), algorithms=("two_shot",), protocols=(KERNEL,))[0]
        assert found.costs.launch == wanted


def test_more_pieces_than_half_a_fifo_have_only_broadcasts_and_reduces():
    for kind in COLLECTIVES:
        found = plans(Request(16 * MIB, machine("dgx_h100", 8), kind=kind))
        assert max(each.pieces for each in found) == (8 if kind in ROOTED else 4)


def test_each_collective_has_its_candidates():
    for kind in COLLECTIVES:
        found = plans(Request(MIB, machine("dgx_h100", 16), kind=kind, root=5 if kind in ROOTED else 0))
        assert {each.algorithm for each in found} == set(algorithms_of(kind))
        assert all(each.plan.collective.kind == kind for each in found[:2])
    gathered = chosen(64 * MIB, kind="allgather", dtype="bfloat16")
    assert not gathered.request.is_half and gathered.roundings == 0 and not gathered.wide_sums
    assert chosen(1024, kind="alltoall").algorithm == "direct"
    assert chosen(MIB, num_ranks=16, kind="reduce_scatter").algorithm == "hierarchical"


def test_costs_are_the_protocols():
    costs = costs_of("dgx_h100", "ll", "ring", 4, 1)
    assert (costs.launch, costs.efficiency, costs.channel) == (6.6, 0.5, 141 / 4)
    assert costs.latency["nvlink"] == 0.6 and costs.latency["network"] == 2.7
    tree = costs_of("dgx_h100", "simple", "double_binary_tree", 4, 2)
    assert (tree.launch, tree.latency["nvlink"], tree.latency["network"]) == (8.4, 4.0, 14.0)
    by_hand = costs_of("dgx_h100", KERNEL, "two_shot", 16, 1)
    assert (by_hand.launch, by_hand.efficiency, by_hand.latency["nvlink"]) == (6.6, 1.0, 3.4)
    assert costs_of("two_socket_host", KERNEL, "two_shot", 1, 1) is CPU_COSTS
    assert costs_of("host", "simple", "ring", 1, 1) is CPU_PLAN_COSTS and CPU_PLAN_COSTS.channel < CPU_COSTS.channel


def test_machines_by_name(tmp_path):
    assert len(machine("dgx_h100", 20).nodes) == 3 and machine("dgx_h100", 20).world.ranks_per_node == 20
    assert machine("dgx_h100", 24).world.ranks_per_node == 8
    large = machine("dgx_h100", 4096)
    assert (large.name, large.world.ranks_per_node) == ("dgx_h100 x 512", 8)
    assert large.nodes[-1] == [*range(4088, 4096)]
    part = machine("dgx1_v100", 3)
    assert part.num_ranks == 3 and len([d for d in part.topology.devices if d.kind == "gpu"]) == 3
    assert machine("dgx1_v100", 8).world.order is not None and machine("dgx_h100", 8).world.order is None
    dump = tmp_path / "machine.xml"
    dump.write_text((cost_model.RESULTS.parents[1] / "tests/data/topology/rccl_topo_4p3l.xml").read_text())
    assert find_machine(str(dump), 4).topology.num_ranks == 4
    no_text = tmp_path / "no_text.xml"
    no_text.write_bytes(b"\xff\xfe\x00")
    for name, num_ranks, message in (
        (str(no_text), 8, "argument `topology`: no_text.xml is no text"),
        ("dgx_h10", 8, "argument `topology`: wanted one of host, ring, .* got 'dgx_h10'"),
        ("dgx_h100", 0, "argument `ranks`: wanted an integer >= 1, got 0"),
        (str(dump), 5, "argument `ranks`: wanted at most 4 on .*, got 5"),
        ("dgx1_v100", 129, "argument `ranks`: wanted at most 128 on dgx1_v100, got 129"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_machine(name, num_ranks)


@pytest.mark.parametrize(
    "num_bytes, dtype, message",
    [
        (0, "float32", "argument `bytes`: wanted a multiple of 4, .* got 0"),
        (1022, "float32", "argument `bytes`: wanted a multiple of 4, .* got 1022"),
        (1024, "float12", "argument `dtype`: wanted one of float64, .* got 'float12'"),
    ],
)
def test_bad_requests(num_bytes, dtype, message):
    with pytest.raises(ConfigError, match=message):
        Request(num_bytes, machine("dgx_h100", 8), dtype)


def test_requests_of_no_collective():
    with pytest.raises(ConfigError, match="wanted one of allreduce, .* got 'scatter'"):
        Request(MIB, machine("dgx_h100", 8), kind="scatter")
    with pytest.raises(ConfigError, match="broadcast: root: wanted a rank below 8, got 8"):
        Request(MIB, machine("dgx_h100", 8), kind="broadcast", root=8)
    with pytest.raises(ConfigError, match="argument `root`: alltoall has none, got 2"):
        Request(MIB, machine("dgx_h100", 8), kind="alltoall", root=2)


def test_names_that_are_not_known():
    request = Request(MIB, machine("dgx_h100", 6))
    with pytest.raises(ConfigError, match="argument `algorithm`: wanted one of auto, ring, .* got 'rign'"):
        explain(request, "rign")
    with pytest.raises(ConfigError, match="argument `protocol`: on dgx_h100 wanted one of ll, .* got 'll64'"):
        explain(request, protocol="ll64")
    with pytest.raises(ConfigError, match="argument `protocol`: on two_socket_host wanted one of simple, .* got 'll'"):
        explain(Request(MIB, machine("two_socket_host", 2)), protocol="ll")
    with pytest.raises(ConfigError, match="argument `algorithm`: swing: wanted a power of two of ranks, got 6"):
        explain(request, "swing")
    with pytest.raises(ConfigError, match="argument `algorithm`: .*no way from"):
        explain(Request(MIB, machine("ring", 6)), "one_shot")


def run(*words: str, kind: str = "allreduce", code: int = 0) -> str:
    result = CliRunner().invoke(app, ["explain", kind, *words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_explain_gives_four_answers():
    output = run("--ranks", "8", "--bytes", "1048576", "--topology", "dgx_h100", "--dtype", "bfloat16")
    for text in ("1. State transition", "2. Algorithm: two_shot", "3. Mapping onto dgx_h100", "4. Fit"):
        assert text in output
    best = explain(Request(MIB, machine("dgx_h100", 8), "bfloat16"))
    assert f"simulated: {best.timeline.makespan:.1f} µs; price: {best.chosen.microseconds:.1f} µs" in output
    assert f"cut bound: {2 * 7 / 8 * MIB / 450e3:.1f} µs" in output
    assert sum(best.shares.values()) == pytest.approx(1)
    assert output.count("->") > 1 and "once" in output and "7 times" in output


# before and after, as told of 5 ranks; what else to ask for
TOLD = {
    "allreduce": ("every rank has x_0 + ... + x_4", ["reduce", "reduce_scatter", "reduce_scatter, allgather"]),
    "allgather": ("every rank has b_0, ..., b_4, 320 KiB", ["allreduce", "alltoall"]),
    "reduce_scatter": ("rank r has block r of x_0 + ... + x_4", ["allreduce", "reduce"]),
    "broadcast": ("rank 3 has x, 64 KiB of bfloat16", ["allgather"]),
    "reduce": ("rank 3 has x_0 + ... + x_4", ["reduce_scatter", "allreduce"]),
    "alltoall": ("rank r has what each rank had for it, by rank", ["allgather", "reduce_scatter"]),
}


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_each_collective_is_explained(kind):
    root = ["--root", "3"] if kind in ROOTED else []
    output = run("--ranks", "5", "--bytes", "65536", "--dtype", "bfloat16", *root, kind=kind)
    state, instead = TOLD[kind]
    assert state in output and f"is {kind} the right thing to ask for?" in output and "cut bound: " in output
    request = Request(65536, machine("dgx_h100", 5), "bfloat16", kind, 3 if root else 0)
    found = explain(request)
    assert [", ".join(alternative.kinds) for alternative, _ in found.alternatives] == instead
    assert all(f"{microseconds:.1f}" in output for _, microseconds in found.alternatives)
    assert found.bound < found.timeline.makespan and found.chosen.rounds_once >= found.request.is_half
    assert ("only what rounds once is chosen" in output) == (kind in REDUCTIONS)
    assert ("each row once per rank" in output) == (kind == "alltoall")
    assert ("takes plans only as algorithm=" in output) == (kind != "allreduce")
    assert found.chosen.plan.collective.root == request.root


def test_what_to_ask_for_instead_is_priced():
    def price(kind: str, num_bytes: int) -> float:
        return choose(Request(num_bytes, machine("dgx_h100", 8), kind=kind)).microseconds

    found = explain(Request(64 * MIB, machine("dgx_h100", 8)))
    wanted = [
        price("reduce", 64 * MIB), price("reduce_scatter", 8 * MIB),
        price("reduce_scatter", 8 * MIB) + price("allgather", 8 * MIB),
    ]  # fmt: skip
    assert [microseconds for _, microseconds in found.alternatives] == pytest.approx(wanted)
    assert wanted[1] < 0.7 * found.chosen.microseconds  # half of the bytes
    # a part that isn't a whole number of elements is rounded up
    odd = Request(4 * 7, machine("dgx_h100", 3), kind="broadcast")
    assert [each.num_bytes for each in ALTERNATIVES["broadcast"][0].requests(odd)] == [4 * 3]


def test_explain_takes_an_algorithm_and_tells_roundings():
    output = run("--ranks", "8", "--bytes", "4096", "--algorithm", "ring", "--topology", "dgx1_v100")
    assert "2. Algorithm: ring" in output and "ring order: 0 " in output and "7 times" in output
    assert "Most of the time is fixed cost" in output
    assert "Bytes dominate" in run("--bytes", str(256 * MIB), "--ranks", "4")
    small = " ".join(run("--ranks", "8", "--bytes", "1024").split())  # a plan is cheaper, but not surely
    assert "-> one_shot kernel" in small and f"where a kernel's price is more than {SURE} times theirs" in small
    alone = run("--ranks", "1")
    assert "nothing to communicate" in alone and "busiest links" not in alone
    # of 4 ranks on cores each moves 6.7 MB far more slowly than links would: not a fixed cost
    cores = run("--ranks", "4", "--bytes", "6710884", "--topology", "two_socket_host", "--algorithm", "two_shot")
    assert "Bytes dominate" in cores and "There is room up to the bound" in cores
    ring = run("--ranks", "5", "--topology", "ring", "--bytes", "65536", "--algorithm", "ring")
    assert "cut bound: " in ring and "1 channel, in 4 pieces" in ring and "inf" not in ring
    uneven = run("--ranks", "12")
    assert "no price: it is known among nodes of one size only; these have 4 to 8 ranks" in uneven
    large = run("--ranks", "256", "--bytes", "1048576", "--trace", "unwritten.json")
    assert "plans of more than 32 ranks are not made" in large and "256 ranks in 32 nodes" in large
    assert "price: " in large and "cut bound: " in large and "of the price: launch " in large
    assert "node 0, NIC 0, out" in large
    many = explain(Request(64 * MIB, machine("dgx_h100", 4096)))
    assert sum(many.shares.values()) == pytest.approx(1) and many.is_mostly_fixed  # a ring of 512 nodes
    assert 0 < many.busiest_links[0][1] < many.shares["bytes"] and many.bound < 0.1 * many.microseconds


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ranks", "0"), "argument `ranks`: wanted an integer >= 1, got 0"),
        (("--bytes", "-4"), "argument `bytes`"),
        (("--programs", "0"), "argument `programs`: wanted an integer >= 1, got 0"),
        (("--programs", "1000000"), "Invalid value for '--programs': "),
        (("--topology", "nowhere.xml"), "argument `topology`"),
        (("--algorithm", "best"), "argument `algorithm`: wanted one of auto"),
        (("--algorithm", "direct"), "argument `algorithm`: wanted one of auto, ring, bidirectional_ring, double_bin"),
        (("--root", "1"), "argument `root`: allreduce has none, got 1"),
        (("--draw", "picture.txt"), "argument `draw`: wanted a name that ends in .svg, .png, .pdf, got picture.txt"),
        (("--draw", "/nowhere/picture.svg"), "argument `draw`: wanted a folder that exists, got /nowhere"),
        (("--trace", "/nowhere/trace.json"), "No such file"),
    ],
)
def test_explain_refuses_bad_input(words, message):
    output = " ".join(run(*words, code=2).replace("│", " ").split())
    assert message in output


def test_explain_writes_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    run("--ranks", "4", "--bytes", "4096", "--trace", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_explain_draws(tmp_path, ending):
    schedule, ring = tmp_path / f"schedule.{ending}", tmp_path / f"ring.{ending}"
    run("--ranks", "4", "--bytes", "65536", "--algorithm", "ring", "--topology", "dgx1_v100",
        "--draw", str(schedule), "--draw-ring", str(ring))  # fmt: skip
    for path in (schedule, ring):
        head = path.read_bytes()[:100]
        assert head.startswith(b"\x89PNG") if ending == "png" else b"<?xml" in head
        assert path.stat().st_size > 5000


SUMMING, COPYING, CRITICAL, WAITING = "#2166ac", "#5aae61", "#b2182b", "#888888"


def test_what_is_drawn(tmp_path):
    """A bar per step and an arrow per message, those of the critical path in red; ranks in the order of the ring."""
    request = Request(65536, machine("dgx1_v100", 8))
    timeline = explain(request, "ring").timeline
    schedule, ring, pixels = tmp_path / "schedule.svg", tmp_path / "ring.svg", tmp_path / "schedule.png"
    draw_schedule(timeline, schedule)
    draw_schedule(timeline, pixels)
    draw_placement(request.machine.topology, list(request.world.order), ring)
    text = schedule.read_text()
    drawn = Counter(re.findall("(?:fill|stroke): (#[0-9a-f]{6})", text))
    path = timeline.critical_path
    steps = {segment.step for segment in path}
    arrows = {segment.step for segment in path if segment.is_message}
    others = [step.op for number, (_, step) in enumerate(timeline.graph.plan.steps()) if number not in steps]
    assert drawn[SUMMING] == sum(op.reduces for op in others) and drawn[CRITICAL] == len(steps) + len(arrows)
    assert drawn[COPYING] == len(others) - drawn[SUMMING]
    assert drawn[WAITING] == (timeline.graph.match >= 0).sum() - len(arrows)
    assert all(f"<!-- rank {rank}, program 0 -->" in text for rank in range(8))
    labels = re.findall(r"<!-- (\d+|\d+ GB/s) -->", ring.read_text())
    assert labels == ["50 GB/s"] * 8 + [str(rank) for rank in request.world.order]
    image = imread(pixels)[..., :3]
    for colour in (SUMMING, COPYING, CRITICAL):  # bars let a fifth of the white behind them through
        wanted = 0.8 * np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]) + 0.2
        assert (abs(image - wanted).max(axis=2) < 0.02).sum() > 100, colour


def test_drawings_without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="pip install 'epcomm\\[plot\\]'"):
        check_path("draw", tmp_path / "schedule.svg")


@pytest.mark.parametrize("path", sorted(SCHEDULES.glob("ndv2*.json")), ids=lambda path: path.stem)
def test_replayed_schedules_finish_as_published(path):
    # TE-CCL counts time in epochs, and drops latencies that are small beside them.
    schedule = read_schedule(path)
    plan = schedule.plan()
    verify(plan)
    timeline = simulate(plan, schedule.chunk_bytes, RoutedNetwork(schedule.topology))
    assert timeline.makespan == pytest.approx(schedule.finish, rel=0.1)


def test_the_committed_comparison_is_what_the_command_finds():
    document = results.load(cost_model.RESULTS / "cost_model.json")
    found = {"schedules": cost_model.compare_schedules(), "published": cost_model.compare_published(),
             "choices": cost_model.compare_choices(), "meetings": cost_model.compare_meetings(),
             "fits": cost_model.compare_fits()}  # fmt: skip
    for key, rows in found.items():
        for row, committed in zip(rows, document[key], strict=True):
            for name, value in row.items():
                if isinstance(value, float):
                    assert value == pytest.approx(committed[name], rel=1e-3)
                elif name not in ("fitted", "held_out"):  # which have rows of their own
                    assert value == committed[name]
    assert cost_model.cpu_costs(document) == CPU_COSTS


def test_the_committed_simulations_are_what_the_command_finds():
    """Two of each world's rows, by the committed constants, which fit one algorithm only; and what is said of all."""
    document = results.load(cost_model.RESULTS / "simulated_plans.json")
    times = simulated_plans.measured()
    assert [world["ranks"] for world in document["worlds"]] == [2, 4]
    for world in document["worlds"]:
        constants = (world["launch_us"], world["message_us"], world["channel_gb_per_s"])
        assert {(row["name"], row["bytes"]) for row in world["rows"]} == set(times[world["ranks"]])
        for row in world["rows"][6:18:5]:
            assert row["measured_us"] == pytest.approx(times[world["ranks"]][row["name"], row["bytes"]], abs=1e-3)
            found = simulated_plans.simulated(row["name"], world["ranks"], row["bytes"], constants)
            assert found == pytest.approx(row["simulated_us"], rel=0.01)
        others = [max(row["ratio"], 1 / row["ratio"]) for row in world["rows"] if not row["fitted"]]
        assert world["median_factor"] == pytest.approx(median(others), abs=1e-3) and world["median_factor"] < 1.3
        assert {row["name"] for row in world["rows"] if row["fitted"]} == {"ring"} and len(others) == 30
