"""Plans by the GPU target's kernel, interpreted: worlds of it, and worlds that mix it with the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import REDUCTIONS
from execution_checks import check_plan, check_plans

import epcomm
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import run_ranks


def on_ranks(kind: str, world: int, body: Callable[..., Any], *args: Any) -> None:
    def run() -> None:
        with kernels_of(kind), epcomm.init(timeout=60.0) as comm:
            body(comm, *args)

    run_ranks(run, world, timeout=200.0)


@pytest.mark.parametrize("kind, world", [("triton", 2), ("mixed", 3)])
def test_every_algorithm(kind: str, world: int) -> None:
    on_ranks(kind, world, check_plans, 1, 1, [(37, torch.float16)])
