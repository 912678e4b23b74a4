"""What all tests share: the pool of rank processes ends with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from epcomm.testing.ranks import close_pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-networks",
        action="store_true",
        help="fail, not skip, what needs NCCL's or NVSHMEM's wheels (epcomm[link]) if they aren't installed",
    )


@pytest.fixture(scope="session", autouse=True)
def pooled_ranks() -> Iterator[None]:
    """The processes that `run_ranks` starts serve all tests; none outlives the session."""
    yield
    close_pool()
