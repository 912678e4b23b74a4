"""What README.md and docs/ say: their code runs, what they name is there, their numbers are those of the results."""

from __future__ import annotations

import ast
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import epcomm
from epcomm.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def blocks(document: Path) -> list[str]:
    """The Python in it."""
    return [block.split("```")[0] for block in document.read_text().split("```python\n")[1:]]


# ---- names


@by_name
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)  # a link of code is still a link
    for link in re.findall(r"\]\((?!http)([^)]+)\)", prose):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name}: {link}"
        titles = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if anchor else []
        slugs = [re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles]
        assert not anchor or anchor in slugs, f"{document.name}: {link}"
    for path in re.findall(r"`((?:epcomm|benchmarks|tests|examples|docs)/[\w./*-]+)`", text):
        assert list(ROOT.glob(path)), f"{document.name}: {path}"


@by_name
def test_code_is_python(document: Path) -> None:
    for block in blocks(document):
        ast.parse(block)


@by_name
def test_calls_exist_as_they_are_written(document: Path) -> None:
    owners = {"comm": "epcomm.Communicator", "ep": "epcomm.ExpertParallel", "epcomm": "epcomm"}
    for code in re.findall(r"`([^`]+)`", document.read_text()):
        try:
            tree = ast.parse(code)
        except SyntaxError:
            continue  # of another kind
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] in owners:
                owner, _, name = ast.unparse(node.func).partition(".")
                home, _, name = f"{owners[owner]}.{name}".rpartition(".")
                found = getattr(pkgutil.resolve_name(home), name)
                wanted = {keyword.arg for keyword in node.keywords}
                assert wanted <= set(inspect.signature(found).parameters), f"{document.name}: {code}"


# ---- the README's code

FIVE_LINES, LAYER, WHOLE_LAYER = blocks(ROOT / "README.md")


def test_five_lines(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text(FIVE_LINES.replace("num_ranks=4", "num_ranks=2"))  # each takes its time to start
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.strip() == str([torch.ones(3)] * 2), done.stderr


def test_both_layers() -> None:
    sizes = LAYER.replace("hidden=7168, max_tokens=4096", "hidden=24, max_tokens=16")
    assert sizes != LAYER  # the same calls with less memory

    def run_experts(x: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
        assert ends[-1] == len(x)
        torch.mul(x, 2.0, out=out)

    def body() -> None:
        with epcomm.init(timeout=60.0) as comm:
            torch.manual_seed(comm.rank)
            x = torch.randint(-4, 5, (5 + comm.rank, 24)).bfloat16()
            topk_idx = torch.stack([torch.randperm(64)[:8] for _ in x])
            names = dict(comm=comm, x=x, topk_idx=topk_idx, topk_weights=torch.ones(len(x), 8), run_experts=run_experts)
            exec(sizes, names)
            assert torch.equal(names["out"], 16 * x)
            shapes = {"gate.weight": (16, 24), "experts.gate_up_proj": (16, 20, 24), "experts.down_proj": (16, 24, 10)}
            torch.manual_seed(7)
            weights = {name: torch.randn(shape) for name, shape in shapes.items()}
            names = dict(comm=comm, block=SimpleNamespace(state_dict=lambda: weights), x=x.float().requires_grad_())
            exec(WHOLE_LAYER, names)
            gradients = [names["x"].grad, *(parameter.grad for parameter in names["layer"].parameters())]
            assert len(gradients) == 4 and all(gradient.abs().sum() > 0 for gradient in gradients)

    run_ranks(body, 2)


# ---- docs/performance.md: each row again from the results

Cases = dict[tuple[Any, ...], dict[str, float]]


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]


def medians(name: str, phase: str, *keys: str) -> tuple[Cases, Cases]:
    """Of `benchmarks/results/name`, by temperature and the case's `keys`: microseconds of each contestant, and of which
    part of the roofline epcomm's other phases are.
    """
    found: Cases = {}
    shares: Cases = {}
    for row in rows_of(name):
        case = row["case"]
        if case.get("model") or case.get("experts", 64) != 64 or case.get("hidden", 7168) != 7168:
            continue
        key = row["temperature"], *(case[key] for key in keys)
        if row["phase"] == phase:
            found.setdefault(key, {})[row["contestant"]] = row["p50_us"]
        elif row["contestant"] == "epcomm" and "roofline_fraction" in row:
            shares.setdefault(key, {})[row["phase"]] = row["roofline_fraction"]
    return found, shares


def faster(times: dict[str, float], than: str, ours: str = "epcomm") -> float:
    """Than the best of a library's variants that move what we move: "mpi, packed rows only" is a line of its own."""
    packed = [name for name in times if name.endswith("packed rows only")]
    others = packed if than == "packed" else [name for name in times if name.startswith(than) and name not in packed]
    return min(times[name] for name in others) / times[ours]


def expected_rows() -> list[str]:
    rows = []
    for ranks in (2, 4):
        times, shares = medians(f"prefill_throughput_{ranks}_ranks.json", "round_trip", "layout", "tokens")
        for (temperature, layout, tokens), each in times.items():
            if temperature == "cold":
                ratios = " | ".join(f"{faster(each, than):.1f}x" for than in ("gloo", "mpi", "packed"))
                share = shares[temperature, layout, tokens]
                cells = f"{each['epcomm'] / 1e3:.2f} ms | {ratios} | {share['dispatch']:.2f} / {share['combine']:.2f}"
                rows.append(f"| {ranks} ranks, {layout}, {tokens} tokens | {cells} |")
    times, _ = medians("decode_latency.json", "round_trip", "ranks", "layout", "tokens")
    for layout in ("flat", "padded"):
        hot = (f"{times['hot', 2, layout, tokens]['epcomm']:.0f} µs" for tokens in (1, 8, 32, 128))
        rows.append(f"| {layout} | {' | '.join(hot)} |")
    for than, digits, text in (("gloo", 0, "gloo"), ("mpi", 1, "MPI"), ("packed", 1, "MPI moving packed rows only")):
        cold = (f"{faster(times['cold', 2, 'flat', tokens], than):.{digits}f}x" for tokens in (1, 8, 32, 128))
        rows.append(f"| flat, cold, vs {text} | {' | '.join(cold)} |")
    shares_of = {}
    for row in rows_of("quantized_dispatch.json"):
        cell = f"{row['share_of_time']:.2f} ({row['share_of_bytes']:.2f})"
        shares_of[row["case"]["layout"], row["contestant"]] = cell
    for layout in ("flat", "contiguous"):
        rows.append(f"| {layout} | {' | '.join(shares_of[layout, name] for name in ('Float8', 'MXFP8', 'NVFP4'))} |")
    for ranks, name in ((2, "allreduce_2_ranks.json"), (4, "allreduce_4_ranks.json"), (8, "allreduce.json")):
        times, _ = medians(name, "allreduce", "ranks", "bytes")
        for than, text in (("mpi", "MPI"), ("gloo", "gloo")):
            ratios = [
                faster(times["cold", ranks, size], than, "epcomm, bound")
                for size in (8, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20)
            ]
            cells = " | ".join(f"{ratio:.0f}x" if ratio > 10 else f"{ratio:.1f}x" for ratio in ratios)
            rows.append(f"| {ranks} ranks, vs {text} | {cells} |")
    return rows


def test_tables_of_measurements() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    missing = [row for row in expected_rows() if row not in text]
    assert not missing, "\n".join(missing)
