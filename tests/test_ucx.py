"""Ranks on several hosts that put by UCX, over its TCP transport: there is no RDMA device where this is developed."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import payload, same_bits
from ep_cases import Case, Step, in_all_kinds, round_trip, run_cases
from failure_cases import SOON, raised_by, works
from host_cases import on_hosts
from test_expert_parallel import traffic_cases
from test_hosts_collectives import WAITS, a_program_of_calls, failing_rank, late_rank
from test_hosts_expert_parallel import run_after_reset

import epcomm
from epcomm.device.cpu import network
from epcomm.errors import PeerFailedError, PeerLostError, UnsupportedError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.heap import ucx
from epcomm.testing import namespaces
from epcomm.testing.adversary import delay_operations
from epcomm.testing.hosts import pretend_hosts
from epcomm.testing.ranks import rank_outcomes, run_ranks
from epcomm.world import rendezvous

WORLDS = {"1+1": [0, 1], "2+2": [0, 0, 1, 1], "1+1+1": [0, 1, 2]}
EVERY_WORLD = pytest.mark.parametrize("hosts", WORLDS.values(), ids=WORLDS)


@pytest.fixture(autouse=True)
def installed(request: pytest.FixtureRequest) -> None:
    try:
        ucx.library()
    except UnsupportedError as error:
        if request.config.getoption("--require-networks"):
            pytest.fail(f"{error}; epcomm[link] is required")
        pytest.skip(f"{error}; make test-gpu-link installs it")


def join(port: int, hosts: list[int]) -> epcomm.Communicator:
    rank = rendezvous.launched_rank.get().rank
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with pretend_hosts(hosts):
        return epcomm.init(store=store, rank=rank, world_size=len(hosts), timeout=20.0, transport="ucx")


@EVERY_WORLD
def test_collectives(hosts: list[int], port: int) -> None:
    def body(comm: epcomm.Communicator) -> str:
        delay_operations(comm, seed=comm.size, longest=0.001)
        a_program_of_calls(comm)
        works(comm)
        return comm.transport

    assert set(on_hosts(hosts, port, body, transport="ucx")) == {"ucx"}


@EVERY_WORLD
def test_expert_parallel(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, run_cases, list(in_all_kinds(traffic_cases()[::5])), transport="ucx")


def test_more_records_than_an_outbox_holds(port: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        for call in range(2 * network.NUM_RECORDS):
            root = call // 300 % comm.size  # the others lag behind it
            x = payload(comm.rank, (call % 40 + 1,), torch.uint8, call)
            assert same_bits(comm.broadcast(x, root), payload(root, x.shape, torch.uint8, call))
        big = torch.arange(5_000_001, dtype=torch.int32)
        for call in range(3):
            assert torch.equal(comm.broadcast(big + call, call % comm.size), big + call)

    on_hosts(WORLDS["1+1+1"], port, body, transport="ucx")


def test_an_idle_engine_sleeps(port: int) -> None:
    """What the process computes for while nothing is sent, and that a rank which comes later wakes it."""

    def body(comm: epcomm.Communicator) -> float:
        comm.barrier()
        used = time.process_time()
        time.sleep(1.0)
        used = time.process_time() - used
        for call in range(3):
            time.sleep(0.05 * (comm.rank + 1))
            assert comm.allreduce(torch.tensor([call])).item() == comm.size * call
        return used

    for used in on_hosts(WORLDS["1+1"], port, body, transport="ucx"):
        assert used < 0.5


def test_memory_of_freed_segments_is_given_back(port: int) -> None:
    def body(comm: epcomm.Communicator) -> list[int]:
        mapped = []
        case = Case(max_tokens=64, hidden=512)
        for _ in range(6):
            ep = case.handle(comm)
            for number in range(3):
                round_trip(ep, Step(case, comm.size, number))
            ep.close()
            del ep
            gc.collect()
            mapped.append(len(comm._runtime._proxy._engine._parts))
        return mapped

    for mapped in on_hosts(WORLDS["2+2"], port, body, transport="ucx"):
        assert mapped[2:] == mapped[2:3] * 4, mapped


# ---- what goes wrong


def test_a_rank_that_cannot_connect(port: int) -> None:
    """All ranks are told; those that could leave nothing behind that disturbs the next communicator."""

    def cannot(*_: object) -> int:
        raise UnsupportedError("no way there")

    def body() -> list[str]:
        connect, rank = ucx.Worker.connect, rendezvous.launched_rank.get().rank
        texts = []
        for _ in range(3):
            if rank == 1:
                ucx.Worker.connect = cannot  # type: ignore[method-assign]
            try:
                texts.append(raised_by(join, port, WORLDS["1+1+1"]).text)
            finally:
                ucx.Worker.connect = connect  # type: ignore[method-assign]
        with join(port, WORLDS["1+1+1"]) as comm:
            works(comm)
        return texts

    for texts in run_ranks(body, 3):
        assert all("rank 1: no way there" in text for text in texts), texts


@EVERY_WORLD
def test_reset(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, run_after_reset, Case(max_tokens=64, hidden=512), transport="ucx")


@EVERY_WORLD
def test_a_failure_ends_waits(hosts: list[int], port: int) -> None:
    *others, _ = on_hosts(hosts, port, failing_rank, transport="ucx")
    assert all("no more" in text for text in others), others


def test_timeouts(port: int) -> None:
    *others, _ = on_hosts([0, 1, 1, 2], port, late_rank, transport="ucx")
    for number, name in enumerate(WAITS):
        errors = [found[number] for found in others]
        assert all(isinstance(error, (EpcommTimeoutError, PeerFailedError)) for error in errors), (name, errors)


def test_the_last_words_of_one_who_leaves_arrive(port: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        x = torch.arange(3_000_000, dtype=torch.float32)
        got = comm.broadcast(x if comm.rank == 0 else torch.empty_like(x), 0)
        assert torch.equal(got, x)
        comm._close(None)  # not together: the others may still wait for what this one has sent

    for _ in range(3):
        on_hosts(WORLDS["1+1+1"], port, body, transport="ucx")


@EVERY_WORLD
def test_killed_rank(hosts: list[int], port: int) -> None:
    victim = len(hosts) - 1

    def body() -> Any:
        comm = join(port, hosts)
        works(comm)
        if comm.rank == victim:
            time.sleep(0.2)  # what it has written down is sent
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        lost = raised_by(lambda: [comm.allreduce(torch.ones(900_000)) for _ in range(1000)])
        reset = raised_by(comm.reset)
        closing = time.monotonic()
        comm.close()
        return lost.error, reset.error, lost.when - began, time.monotonic() - closing

    *others, _ = rank_outcomes(body, len(hosts), expendable=[victim])
    for outcome in others:
        assert isinstance(outcome, tuple), outcome
        lost, reset, seconds, closing = outcome
        for error in (lost, reset):
            assert isinstance(error, PeerLostError) and error.rank == victim, error
        assert seconds < SOON and closing < 10.0, outcome


# ---- real hosts


def test_hosts_in_namespaces() -> None:
    if (reason := namespaces.available()) is not None:
        pytest.skip(f"network namespaces: {reason}")
    hosts = [0, 1, 1, 2]

    def body() -> str:
        if namespaces.LINK not in os.listdir("/sys/class/net"):
            return "not shown"
        rank = rendezvous.launched_rank.get().rank
        store = namespaces.open_store(rank)
        comm = epcomm.init(store=store, rank=rank, world_size=len(hosts), timeout=30.0, transport="ucx")
        with comm:
            a_program_of_calls(comm)
            run_cases(comm, list(in_all_kinds(traffic_cases()[::9])))
            return comm.transport

    outcomes = namespaces.rank_outcomes_on_hosts(body, hosts)
    if outcomes == ["not shown"] * 4:
        pytest.skip("network namespaces: /sys can't be mounted, where UCX looks for interfaces")
    assert outcomes == ["ucx"] * 4
