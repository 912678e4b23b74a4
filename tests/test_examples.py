"""The examples and the command run as a newcomer would run them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_moe_layer():
    lines = run("examples/moe_layer.py").splitlines()
    assert [line.split(":")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"]


def test_allreduce_by_launch_and_by_torchrun():
    wanted = "mean [1.5, 1.5, 1.5, 1.5], ranks [0, 1], after 3 steps [24.0, 24.0, 24.0, 24.0]"
    assert run("examples/allreduce.py").splitlines() == [f"rank 0: {wanted}", f"rank 1: {wanted}"]
    printed = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/allreduce.py")
    # Two processes write to one pipe: a line may end after the other's began.
    assert [printed.count(f"rank {rank}: {wanted}") for rank in range(2)] == [1, 1], printed


def test_overlap():
    assert "same results: True" in run("examples/overlap.py")


def test_plans():
    printed = run("examples/plans.py")
    proven = [line.split(",")[0] for line in printed.splitlines() if ": proven" in line]
    assert proven == ["ring", "hierarchical", "all pairs"]
    assert "rank 1 has [600, 604, 608" in printed and "rank 1 has [1500, 1506, 1512]" in printed
    assert "rank 1 has [1, 101, 201]" in printed and "proven at a FIFO depth of 8" in printed


def test_what_the_document_on_plans_shows():
    document = (ROOT / "docs" / "plans.md").read_text()
    # those that begin with a communicator are for ranks
    blocks = [block for block in document.split("```python\n")[1:] if not block.startswith("comm.")]
    assert len(blocks) == 4
    code = "\n".join(block.split("```")[0] for block in blocks)
    printed = run("-c", code + "\nprint(proof.roundings, crossings(order, machines.node_of), timeline.makespan)")
    assert "ring allreduce: allreduce of 8 ranks" in printed and printed.splitlines()[-1].startswith("7 2 ")


def test_programs_in_the_language_are_short():
    tree = ast.parse((ROOT / "examples" / "plans.py").read_text())
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in tree.body if isinstance(node, ast.FunctionDef)}
    programs = ("ring_allreduce", "hierarchical_allreduce", "all_pairs_alltoall")
    assert all(lengths[name] < 20 for name in programs), lengths


def test_notebook():
    printed = run("examples/notebook.py")
    assert "[33, 33, 33]" in printed and "[63, 63, 63]" in printed
    assert "rank 1 has a problem" in printed and "barrier()" in printed and "allreduce(" in printed


@pytest.mark.slow
def test_transformers():
    pytest.importorskip("transformers")
    lines = run("examples/transformers_generate.py").splitlines()
    assert [line.split(":")[0] for line in lines] == ["rank 0", "rank 1"]


def test_info():
    printed = " ".join(run("-m", "epcomm.cli", "info").split())
    assert "epcomm bench" in printed and "comes with a checkout" not in printed


def test_benchmarks_of_a_checkout():
    assert "allreduce" in run("-m", "epcomm.cli", "bench", "--help")


def test_info_without_triton():
    code = "import sys; sys.modules['triton'] = None; from epcomm.cli.main import app; app(['info'])"
    assert "pip install 'epcomm[gpu]'" in " ".join(run("-c", code).split())


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_demo_without_comparison(ranks):
    printed = run("-m", "epcomm.cli", "demo", "--ranks", ranks, "--tokens", "33", "--no-compare")
    assert "every result checked" in printed
