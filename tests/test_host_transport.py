"""Which way CPU ranks of several hosts take, and why not another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from failure_cases import raised_by
from host_cases import WORLDS, on_hosts

import epcomm
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.heap import ucx
from epcomm.hosts import transport
from epcomm.testing.hosts import pretend_hosts
from epcomm.testing.ranks import run_ranks
from epcomm.world import rendezvous


def join(port: int, hosts: list[int], wanted: list[str]) -> epcomm.Communicator:
    """Of ranks that want each its own transport."""
    rank = rendezvous.launched_rank.get().rank
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with pretend_hosts(hosts):
        return epcomm.init(store=store, rank=rank, world_size=len(hosts), timeout=20.0, transport=wanted[rank])


def error_of(port: int, hosts: list[int], wanted: list[str]) -> BaseException:
    return raised_by(join, port, hosts, wanted).error


@pytest.mark.parametrize("wanted", ["tcp", "auto"])
def test_tcp_without_rdma(wanted: str, port: int) -> None:
    def body(comm: epcomm.Communicator) -> str:
        for call in range(3):
            assert comm.allreduce(torch.tensor([call])).item() == 2 * call
        return comm.transport

    if not ucx.refusal_of_rdma():
        pytest.skip("this machine has an RDMA device that UCX can use")
    assert on_hosts(WORLDS["1+1"], port, body, transport=wanted) == ["tcp", "tcp"]


def test_ranks_that_want_different_transports(port: int) -> None:
    for error in run_ranks(error_of, 3, port, [0, 1, 1], ["tcp", "auto", "tcp"]):
        assert isinstance(error, ConfigError), error
        assert "`transport`: wanted the same on all ranks, got 'auto', 'tcp'" in str(error)


def test_shared_memory_is_for_one_host(port: int) -> None:
    for error in run_ranks(error_of, 3, port, [0, 1, 1], ["shared_memory"] * 3):
        assert isinstance(error, UnsupportedError) and "on 2 hosts, by rank [0, 1, 1]" in str(error), error


def test_all_ranks_say_what_is_missing(port: int) -> None:
    """One rank has no UCX."""

    def body() -> Any:
        paths = ucx._paths
        if rendezvous.launched_rank.get().rank == 1:
            ucx._paths = lambda: iter(["libucp.so.none"])
        ucx.library.cache_clear()
        try:
            return error_of(port, WORLDS["1+1"], ["ucx", "ucx"])
        finally:
            ucx._paths = paths
            ucx.library.cache_clear()

    for error in run_ranks(body, 2):
        assert isinstance(error, UnsupportedError), error
        assert "got 'ucx', but" in str(error) and "pip install 'epcomm[ucx]'" in str(error), error


@pytest.mark.parametrize("reason", ["", "no RDMA device"])
def test_what_info_says(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx, "refusal_of_rdma", lambda: reason)
    by_name = dict(transport.explained())
    if reason:
        assert by_name == {"ucx": f"not taken by auto: {reason}", "tcp": "taken by auto between hosts"}
    else:
        assert by_name["ucx"] == "taken by auto between hosts" and by_name["tcp"].endswith("where ucx is refused")
