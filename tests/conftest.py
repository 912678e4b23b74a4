"""What all tests share: the pool of rank processes ends with the session."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch.distributed as dist

from epcomm.testing.ranks import close_pool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-networks",
        action="store_true",
        help="fail, not skip, what needs NCCL's, NVSHMEM's or UCX's wheels (epcomm[link]) if they aren't installed",
    )


@pytest.fixture(scope="session", autouse=True)
def pooled_ranks() -> Iterator[None]:
    """The processes that `run_ranks` starts serve all tests; none outlives the session."""
    yield
    close_pool()


@pytest.fixture
def port() -> Iterator[int]:
    """A store through which ranks on several hosts meet."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture(scope="module")
def compilers() -> Iterator[ProcessPoolExecutor]:
    """Processes that compile."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)
