"""The backend of `torch.distributed`: everything that goes through it, on 2 and on 3 ranks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from c10d_cases import CASES, run_case

from epcomm.testing.ranks import run_ranks


def run_cases(names: list[str]) -> dict[str, tuple[float, str]]:
    """Each case in a group of its own: seconds, and the traceback of what it raised."""
    found = {}
    for name in names:
        begin, error = time.monotonic(), ""
        try:
            run_case(name)
        except Exception:
            error = traceback.format_exc()
        found[name] = time.monotonic() - begin, error
    return found


@pytest.fixture(scope="module", params=[2, 3])
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[dict[str, tuple[float, str]]]]:
    """By rank and case: one launch for all."""
    yield run_ranks(run_cases, request.param, list(CASES), timeout=110.0)


def failures(outcomes: list[Any], name: str) -> list[str]:
    """What the ranks raised in a case."""
    return [f"rank {rank}: {name}: {found[name][1]}" for rank, found in enumerate(outcomes) if found[name][1]]


@pytest.mark.parametrize("name", CASES)
def test_case(outcomes: list[Any], name: str) -> None:
    errors = failures(outcomes, name)
    assert not errors, "\n".join(errors)
