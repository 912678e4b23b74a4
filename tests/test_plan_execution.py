"""Plans on ranks: every algorithm's results by definition, and what is refused or goes wrong."""

from __future__ import annotations

import pytest
import torch
from execution_checks import check_plans

import epcomm
from epcomm.testing.ranks import run_ranks

SMALL = [(0, torch.int64), (1, torch.float32), (37, torch.int64), (1501, torch.float16)]


@pytest.mark.parametrize("world", range(2, 9))
def test_every_algorithm(world: int) -> None:
    def body() -> None:
        with epcomm.init(timeout=60.0, num_threads=1) as comm:
            check_plans(comm, world // 2, 1 + world % 2, SMALL)

    run_ranks(body, world, ranks="threads", timeout=200.0)
