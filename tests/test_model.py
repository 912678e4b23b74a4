"""`epcomm model`: closed forms against enumeration and simulation, floors against published figures, the commands."""

from __future__ import annotations

import ast
import itertools
import json
import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epcomm.cli.main import app
from epcomm.errors import ConfigError
from epcomm.model import allreduce, comparison, expert_parallel
from epcomm.model.expert_parallel import Exchange
from epcomm.model.gpus import GPUS
from epcomm.model.published import ALLREDUCE, EXPERT_PARALLEL
from epcomm.model.routing import Routing, node_blocks, rank_blocks

# A figure may beat its floor by this share before it needs an explanation: figures are rounded to two digits.
TOLERANCE = 0.02

H100 = GPUS["h100"]
runner = CliRunner()


def all_choices(routing: Routing) -> list[tuple[int, ...]]:
    """Every choice of experts, as often as choices of groups lead to it."""
    size = routing.experts // routing.groups
    return [
        choice
        for groups in itertools.combinations(range(routing.groups), routing.topk_groups)
        for choice in itertools.combinations([g * size + e for g in groups for e in range(size)], routing.topk)
    ]


def touched(choice: tuple[int, ...], blocks: list[range]) -> set[int]:
    return {index for index, block in enumerate(blocks) if any(expert in block for expert in choice)}


@pytest.mark.parametrize(
    "routing, parts",
    [
        (Routing(8, 3), 4),
        (Routing(8, 1), 8),
        (Routing(8, 8), 3),
        (Routing(9, 4), 2),
        (Routing(10, 3), 4),  # blocks of 3, 3, 2 and 2
        (Routing(3, 2), 5),  # more ranks than experts
        (Routing(12, 3, groups=4, topk_groups=2), 4),  # a rank is a group
        (Routing(12, 3, groups=4, topk_groups=2), 2),  # a rank is two groups
        (Routing(12, 3, groups=3, topk_groups=2), 6),  # a rank is half a group
        (Routing(12, 4, groups=3, topk_groups=1), 5),  # ranks across groups
    ],
    ids=str,
)
def test_expected_ranks_are_the_mean_over_all_choices(routing: Routing, parts: int) -> None:
    blocks = rank_blocks(routing.experts, parts)
    choices = all_choices(routing)
    mean = sum(len(touched(choice, blocks)) for choice in choices) / len(choices)
    assert routing.expected_blocks(blocks) == pytest.approx(mean, rel=1e-12)


def test_closed_form_for_deepseek_v3() -> None:
    assert Routing(256, 8).expected_blocks(rank_blocks(256, 8)) == pytest.approx(5.29, abs=0.005)
    # at most 4 nodes when groups are nodes
    assert Routing(256, 8, 8, 4).expected_blocks(rank_blocks(256, 8)) < 4


def test_blocks_cover_all_experts_evenly() -> None:
    for experts, ranks in itertools.product((1, 7, 64, 257), (1, 2, 6, 64)):
        blocks = rank_blocks(experts, ranks)
        assert [expert for block in blocks for expert in block] == list(range(experts))
        assert max(map(len, blocks)) - min(map(len, blocks)) <= 1
    assert node_blocks(64, 16, 8) == [range(0, 32), range(32, 64)]


@pytest.mark.parametrize("wire", expert_parallel.WIRES)
@pytest.mark.parametrize("groups, topk_groups", [(1, 1), (8, 4)])
def test_bytes_equal_a_simulated_exchange(wire: str, groups: int, topk_groups: int) -> None:
    """Sends tokens of every rank row by row, counts bytes on links, and compares with the closed form."""
    routing = Routing(64, 6, groups, topk_groups)
    exchange = Exchange(H100, ranks=16, tokens=400, hidden=256, routing=routing, dtype="float8")
    random_numbers = random.Random(0)
    experts_per_rank, size = 64 // 16, 64 // groups
    nvlink = nic = 0
    for source, _ in itertools.product(range(16), range(exchange.tokens)):
        chosen = random_numbers.sample(range(groups), topk_groups)
        experts = random_numbers.sample([g * size + e for g in chosen for e in range(size)], routing.topk)
        ranks = [expert // experts_per_rank for expert in experts]
        if wire != "expert":
            ranks = sorted(set(ranks))
        for rank in ranks:
            # per node, the copy for another node arrives at the rank of the source's place and goes on from there
            sender = rank // 8 * 8 + source % 8 if wire == "node" else source
            if rank // 8 != sender // 8:
                nic += 1
            elif rank != sender:
                nvlink += 1
        if wire == "node":
            nic += len({rank // 8 for rank in ranks} - {source // 8})
    row = 256 + 2 * 4
    predicted = expert_parallel.traffic(exchange, "dispatch", wire)
    assert predicted.nvlink == pytest.approx(nvlink * row / 16, rel=0.02)
    assert predicted.nic == pytest.approx(nic * row / 16, rel=0.02)


def test_floors_of_the_notes() -> None:
    """Bytes out of a rank at 128 tokens, worked out by hand: MB over NVLink for 8 ranks, over the NIC for 16."""
    eight = Exchange(H100, 8, 128, mode="latency", dtype="float8")
    assert eight.row_bytes("dispatch") == 7168 + 56 * 4
    for operation, wire, megabytes in (
        ("dispatch", "expert", 6.62),
        ("dispatch", "rank", 4.38),
        ("combine", "expert", 12.85),
        ("combine", "rank", 8.5),
    ):
        assert expert_parallel.traffic(eight, operation, wire).nvlink == pytest.approx(megabytes * 1e6, rel=1e-3)
    sixteen = Exchange(H100, 16, 128, mode="latency", dtype="float8")
    assert expert_parallel.traffic(sixteen, "dispatch", "expert").nic == pytest.approx(3.78e6, rel=2e-3)
    assert expert_parallel.traffic(sixteen, "dispatch", "node").nic == pytest.approx(0.94e6, rel=1e-2)


def test_a_lone_rank_sends_nothing() -> None:
    for prediction in expert_parallel.predict_all(Exchange(H100, 1, 128)):
        assert (prediction.traffic.nvlink, prediction.traffic.nic, prediction.signals) == (0, 0, 0)
        assert prediction.bandwidth_bound == "memory"


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("mode", expert_parallel.MODES)
def test_more_work_is_never_faster(gpu: str, mode: str) -> None:
    for ranks in (2, 8, 72 * 8):
        routings = [Routing(256, topk) for topk in (1, 2, 8, 64)]
        series = [
            [Exchange(GPUS[gpu], ranks, tokens, mode=mode) for tokens in (1, 2, 128, 4096)],
            [Exchange(GPUS[gpu], ranks, 128, hidden, mode=mode) for hidden in (1, 127, 128, 7168)],
            [Exchange(GPUS[gpu], ranks, 128, routing=routing, mode=mode) for routing in routings],
            [Exchange(GPUS[gpu], ranks, 128, mode=mode, dtype=dtype) for dtype in ("float8", "bfloat16")],
        ]
        for exchanges in series:
            floors = [[each.floor() for each in expert_parallel.predict_all(exchange)] for exchange in exchanges]
            for less, more in itertools.pairwise(floors):
                assert all(before <= after for before, after in zip(less, more))


def test_floor_is_below_what_is_reachable() -> None:
    for gpu, ranks, mode in itertools.product(GPUS.values(), (1, 2, 8, 72 * 2), expert_parallel.MODES):
        for each in expert_parallel.predict_all(Exchange(gpu, ranks, 512, mode=mode)):
            assert each.floor(launched=False) < each.floor() <= each.reachable


def test_fewer_rows_on_the_slow_link_win() -> None:
    """On one node a row per rank never loses; across nodes a row per node does best."""
    for ranks, best in ((8, "rank"), (32, "node"), (64, "node")):
        exchange = Exchange(H100, ranks, 4096)
        for operation in expert_parallel.OPERATIONS:
            floors = {wire: expert_parallel.predict(exchange, operation, wire).floor() for wire in exchange.wires()}
            assert min(floors, key=floors.__getitem__) == best


@pytest.mark.parametrize(
    "figure", EXPERT_PARALLEL, ids=lambda f: f"{f.system}-{f.gpu}-{f.ranks}-{f.operation}-{f.dtype}"
)
def test_no_published_exchange_beats_its_floor(figure: comparison.ExpertParallelFigure) -> None:
    share = comparison.share_of_floor(figure)
    assert (share is None) == (figure.gpu not in GPUS)
    assert share is None or 0.05 < share < 1 + TOLERANCE


@pytest.mark.parametrize("figure", ALLREDUCE, ids=lambda f: f"{f.system}-{f.ranks}-{f.num_bytes}")
def test_a_published_allreduce_that_beats_its_floor_is_explained(figure: comparison.AllreduceFigure) -> None:
    share = comparison.share_of_floor(figure)
    assert share is not None and (share > 1 + TOLERANCE) == bool(figure.below_floor)
    # an algorithm that moves fewer bytes is under the time all the same
    best = allreduce.predict_all(GPUS[figure.gpu], figure.ranks, figure.num_bytes)[0]
    assert best.floor < figure.microseconds


def test_bandwidth_above_the_adapter_is_local_traffic() -> None:
    """58 GB/s on a 50 GB/s adapter: of 4 nodes one is the own, so 43.5 GB/s cross it."""
    figure = next(f for f in EXPERT_PARALLEL if f.source.startswith("DeepEP docs") and f.value == 58)
    assert figure.value > GPUS[figure.gpu].nic.peak > figure.value * 3 / 4
    assert comparison.share_of_floor(figure) == pytest.approx(43.5 / 50, abs=0.02)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_allreduce_bytes_by_counting(ranks: int) -> None:
    """Bytes out of one rank for an input of `ranks` slices of one byte."""
    peers = ranks - 1
    assert allreduce.predict(H100, ranks, ranks, "one-shot").nvlink_bytes == pytest.approx(peers * ranks)
    reduce_scatter, allgather = peers, peers  # a slice to each peer; the reduced slice to each peer
    assert allreduce.predict(H100, ranks, ranks, "two-shot").nvlink_bytes == pytest.approx(reduce_scatter + allgather)
    # the switch asks for every slice once, and takes the reduced one
    assert allreduce.predict(H100, ranks, ranks, "multimem").nvlink_bytes == pytest.approx(ranks + 1)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_crossover_is_where_the_floors_meet(gpu: str, ranks: int) -> None:
    for small, large in (("one-shot", "two-shot"), ("one-shot", "multimem"), ("two-shot", "multimem")):
        start = allreduce.crossover(GPUS[gpu], ranks, small, large)
        sizes = (1, 1 << 40) if start is None else (start * 0.99, start * 1.01)
        pairs = [[allreduce.predict(GPUS[gpu], ranks, int(n), name).floor for name in (small, large)] for n in sizes]
        assert pairs[0][0] <= pairs[0][1]
        assert (pairs[1][0] > pairs[1][1]) == (start is not None)


def test_small_inputs_go_one_shot_and_large_ones_through_the_switch() -> None:
    assert allreduce.predict_all(H100, 8, 1024)[0].algorithm == "one-shot"
    assert allreduce.predict_all(H100, 8, 128 * 1024)[0].algorithm == "two-shot"
    assert allreduce.predict_all(H100, 8, 64 << 20)[0].algorithm == "multimem"
    floors = [allreduce.predict_all(H100, 8, 1 << power)[0].floor for power in range(34)]
    assert floors == sorted(floors)


def test_ep_command_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    options = "--gpu h100 --ranks 16 --tokens 128 --mode latency --dtype float8 --json".split()
    result = runner.invoke(app, ["model", "ep", *options, str(file)], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "DeepEP V1" in result.output and "nothing measured" in result.output
    document = json.loads(file.read_text(encoding="utf-8"))
    assert len(document["predictions"]) == 6  # two operations, three wire formats
    for each in document["predictions"]:
        assert f"{each['floor']:.1f}" in result.output
    assert {each["ranks"] for each in document["published"]} == {16}
    assert all(each["share_of_floor"] is None or each["share_of_floor"] < 1 for each in document["published"])


@pytest.mark.parametrize("mode", expert_parallel.MODES)
@pytest.mark.parametrize("gpu", GPUS)
def test_ep_command_runs_for_every_gpu(gpu: str, mode: str) -> None:
    result = runner.invoke(app, ["model", "ep", "--gpu", gpu, "--ranks", "4", "--mode", mode])
    assert result.exit_code == 0, result.output


def test_allreduce_command_writes_what_it_prints(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    options = ["--gpu", "h100", "--bytes", "4194304", "--json", str(file)]
    result = runner.invoke(app, ["model", "allreduce", *options], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text(encoding="utf-8"))
    assert [each["algorithm"] for each in document["predictions"]] == ["multimem", "two-shot", "one-shot"]
    assert "two-shot beats one-shot: from 50.22 KiB on" in result.output
    assert any(each["below_floor"] for each in document["published"])


@pytest.mark.parametrize(
    "arguments, allowed",
    [
        ("ep", "--gpu"),
        ("ep --gpu a100", "h100, h800, h200, b200, gb200"),
        ("ep --gpu h100 --ranks 12", "at most 8 or a multiple"),
        ("ep --gpu gb200 --ranks 100", "at most 72 or a multiple"),
        ("ep --gpu h100 --ranks 0", "at least 1"),
        ("ep --gpu h100 --tokens 0", "at least 1"),
        ("ep --gpu h100 --hidden -1", "at least 1"),
        ("ep --gpu h100 --topk 257", "at most 256"),
        ("ep --gpu h100 --groups 7", "multiple of groups"),
        ("ep --gpu h100 --groups 8 --topk-groups 9", "at most groups"),
        ("ep --gpu h100 --mode fast", "throughput or latency"),
        ("ep --gpu h100 --dtype float16", "bfloat16 or float8"),
        ("ep --gpu h100 --json /nowhere/at/all.json", "No such file"),
        ("allreduce --gpu v100", "h100, h800, h200, b200, gb200"),
        ("allreduce --gpu h100 --ranks 9", "1 to 8"),
        ("allreduce --gpu h100 --bytes 0", "at least 1"),
    ],
)
def test_bad_options_are_rejected(arguments: str, allowed: str) -> None:
    result = runner.invoke(app, ["model", *arguments.split()], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert allowed in result.output


def test_bad_values_raise_config_errors() -> None:
    with pytest.raises(ConfigError, match="mode is 'fast'"):
        Exchange(H100, 8, 128, mode="fast")
    with pytest.raises(ConfigError, match="experts is 0"):
        Routing(0)


def test_the_model_knows_nothing_of_the_runtime() -> None:
    for path in (Path(__file__).parents[1] / "epcomm" / "model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("epcomm"):
                assert re.match(r"epcomm\.(errors|rich_tables|model\b)", node.module or ""), path.name
