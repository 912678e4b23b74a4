"""How the backend of `torch.distributed` is found, and how ranks that were started in other ways meet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import epcomm.integrations.c10d  # noqa: F401
from epcomm.testing.ranks import run_ranks
from epcomm.world.rendezvous import launched_rank

ROOT = Path(__file__).resolve().parent.parent


def output_of(code: str, *folders: Path, **environment: str) -> str:
    path = os.pathsep.join(map(str, [*folders, ROOT]))
    command, environment = [sys.executable, "-W", "ignore", "-c", code], os.environ | environment | {"PYTHONPATH": path}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_torch_finds_the_backend_and_loads_little_of_it(tmp_path: Path) -> None:
    """As installed: `import torch` registers the backend, and loads no more than that takes."""
    project = (ROOT / "pyproject.toml").read_text()
    group, line = re.findall(r'entry-points\."(torch\.backends)"\](?:\n#.*)*\n(\w+ = ".*")', project)[0]
    metadata = tmp_path / "entry_of_epcomm-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: entry-of-epcomm\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{line}\n".replace('"', ""))
    code = (
        "import sys, epcomm, torch; print('epcomm' in torch.distributed.Backend.backend_list, "
        "*sorted(name for name in sys.modules if name.split('.')[0] in ('epcomm', 'numba', 'llvmlite', 'cloudpickle')))"
    )
    names = ["epcomm", "epcomm.integrations", "epcomm.integrations.c10d", "epcomm.integrations.c10d.rendezvous"]
    assert output_of(code, tmp_path).split() == ["True", *names]
    assert output_of(code, tmp_path, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split() == ["False", "epcomm"]


def meet_by_environment(port: int) -> list[float]:
    """As under torchrun, which keeps the store and tells of it in the environment."""
    rank = launched_rank.get()
    assert rank is not None
    launched_rank.set(None)
    told = {"RANK": rank.rank, "WORLD_SIZE": rank.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    told["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ |= {name: str(value) for name, value in told.items()}
    found = []
    try:
        for method in ("env://", "epcomm://", None):
            dist.init_process_group("epcomm", init_method=method)
            x = torch.tensor([float(dist.get_rank()), 1.0])
            dist.all_reduce(x)
            found += x.tolist()
            dist.destroy_process_group()
    finally:
        for name in told:
            del os.environ[name]
        launched_rank.set(rank)
    return found


def test_ranks_that_the_environment_describes(port: int) -> None:
    assert run_ranks(meet_by_environment, 3, port) == [[3.0, 3.0] * 3] * 3


def use_both() -> Any:
    """A communicator of one's own beside the group that introduces its ranks."""
    dist.init_process_group("epcomm", init_method="epcomm://")
    with epcomm.init(group=dist.group.WORLD) as comm:
        x = torch.tensor([float(comm.rank)])
        result = comm.allreduce(x).item()
        dist.all_reduce(x)
        assert x.item() == result
    dist.destroy_process_group()
    return result


def test_communicator_of_a_group() -> None:
    assert run_ranks(use_both, 2) == [1.0, 1.0]


def beside_gloo() -> list[float]:
    """A group of epcomm where the default one is gloo's."""
    dist.init_process_group("gloo", init_method="epcomm://")
    group, x = dist.new_group([0, 2], backend="epcomm"), torch.full((3,), float(dist.get_rank()))
    if dist.get_rank() != 1:
        dist.all_reduce(x, group=group)
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return x.tolist()


def test_group_beside_one_of_gloo() -> None:
    assert run_ranks(beside_gloo, 3) == [[2.0] * 3, [1.0] * 3, [2.0] * 3]


_SCRIPT = """
import torch, torch.distributed as dist, epcomm.integrations.c10d
dist.init_process_group("epcomm")
for _ in range(3):
    x = torch.full((100_000,), float(dist.get_rank()))
    dist.all_reduce(x)
    assert x.unique().tolist() == [1.0]
dist.broadcast(x, 1)
if {destroys}:
    dist.destroy_process_group()
print("rank", dist.get_rank() if dist.is_initialized() else "done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("destroys", [True, False])
def test_torchrun(tmp_path: Path, destroys: bool) -> None:
    """Ranks of torchrun, which may also just end."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT.format(destroys=destroys))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert result.returncode == 0 and result.stdout.count("rank") == 2, result.stderr
