"""What all tests share: the pool of rank processes ends with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epcomm.testing.ranks import close_pool


@pytest.fixture(scope="session", autouse=True)
def pooled_ranks() -> Iterator[None]:
    """The processes that `run_ranks` starts serve all tests; none outlives the session."""
    yield
    close_pool()
