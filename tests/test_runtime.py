"""How ranks meet: every way of `init`, the default communicator, what is refused, and forked children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failure_cases import SOON, WAITS, X, raised_by, works

import epcomm
from epcomm.errors import ClosedError, ConfigError, PeerLostError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.ranks import rank_outcomes, run_ranks
from epcomm.world import rendezvous
from epcomm.world.rendezvous import StoreRendezvous


@pytest.fixture
def store_port() -> Any:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def not_launched() -> int:
    """Makes `init` look for another way to meet; returns the rank."""
    launched = rendezvous.launched_rank.get()
    rendezvous.launched_rank.set(None)
    return launched.rank


def check_world(comm: epcomm.Communicator, rank: int, size: int) -> None:
    assert (comm.rank, comm.size, comm.device.type, comm.transport) == (rank, size, "cpu", "shared_memory")
    works(comm)


# ---- the ways to meet


def meet_by_store(make_store: Callable[[], Any]) -> None:
    rank = not_launched()
    for _ in range(2):  # the same store serves several communicators, also through new clients
        store = make_store()
        with epcomm.init(store=store, rank=rank, world_size=3, timeout=20.0) as comm:
            check_world(comm, rank, 3)
            with epcomm.init(store=store, rank=rank, world_size=3, timeout=20.0) as second:
                check_world(second, rank, 3)
                works(comm)


def test_init_with_tcp_store(store_port: int) -> None:
    run_ranks(meet_by_store, 3, lambda: dist.TCPStore("127.0.0.1", store_port, is_master=False))


def test_init_with_file_store(tmp_path: Path) -> None:
    run_ranks(meet_by_store, 3, lambda: dist.FileStore(str(tmp_path / "store"), 3))


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_init_with_store_in_another_rank_order(store_port: int, ranks: str) -> None:
    def body() -> None:
        rank = 2 - rendezvous.launched_rank.get().rank
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        with epcomm.init(store=store, rank=rank, world_size=3, timeout=20.0) as comm:
            check_world(comm, rank, 3)

    run_ranks(body, 3, ranks=ranks)


def test_init_with_process_groups(store_port: int) -> None:
    def body() -> None:
        rank = not_launched()
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        odd = dist.new_group([3, 1])
        even = dist.new_group([0, 2])
        try:
            with epcomm.init(timeout=20.0) as world, epcomm.init(odd if rank % 2 else even, timeout=20.0) as half:
                assert epcomm.default_communicator() is world
                check_world(world, rank, 4)
                check_world(half, dist.get_rank(odd if rank % 2 else even), 2)
                with pytest.raises(ConfigError, match="not a member"):
                    epcomm.init(even if rank % 2 else odd)
                dist.destroy_process_group()  # only introduced the ranks
                works(world)
                works(half)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    run_ranks(body, 4)


def test_init_with_torchrun_environment() -> None:
    def body(port: int) -> None:
        rank = not_launched()
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        try:
            with epcomm.init(timeout=20.0) as comm:
                check_world(comm, rank, 2)
            with epcomm.init(timeout=20.0) as comm:
                check_world(comm, rank, 2)
        finally:
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(body, 2, port)


@pytest.mark.slow
def test_init_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import epcomm, torch\n"
        "with epcomm.init() as comm:\n"
        "    total = int(epcomm.allreduce(torch.tensor(comm.rank + 1)))\n"
        "    print(f'rank {comm.rank} of {comm.size}: {total}\\n', end='', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert sorted(result.stdout.splitlines()) == [f"rank {rank} of 3: 6" for rank in range(3)], result.stderr


def test_world_of_one() -> None:
    def body() -> None:
        not_launched()
        with epcomm.init() as comm:
            check_world(comm, 0, 1)
            assert comm.alltoallv(X, [4], [4]).tolist() == X.tolist()
            assert comm.gather(X).tolist() == comm.scatter(X).tolist() == X.tolist()

    run_ranks(body, 1)


# ---- who doesn't come, or can't


def test_rank_that_does_not_come(store_port: int) -> None:
    def body() -> Any:
        launched = rendezvous.launched_rank.get()
        if launched.rank == 1:
            return None
        by_launch = raised_by(epcomm.init, timeout=0.4)
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        by_store = raised_by(epcomm.init, store=store, rank=launched.rank, world_size=3, timeout=0.4)
        return by_launch, by_store

    outcomes = run_ranks(body, 3)
    assert isinstance(outcomes[0][0].error, EpcommTimeoutError) and "[1]" in outcomes[0][0].text, outcomes[0]
    assert isinstance(outcomes[2][0].error, (EpcommTimeoutError, PeerLostError)), outcomes[2]
    for _, raised in (outcomes[0], outcomes[2]):
        assert isinstance(raised.error, EpcommTimeoutError) and "[1] of 3" in raised.text, raised


def test_rank_of_a_group_that_does_not_come(store_port: int) -> None:
    def body() -> Any:
        rank = not_launched()
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        try:
            return None if rank == 1 else raised_by(epcomm.init, dist.group.WORLD, timeout=0.4)
        finally:
            dist.destroy_process_group()

    outcomes = run_ranks(body, 3)
    for raised in (outcomes[0], outcomes[2]):  # within init's timeout, whatever the group's is
        assert isinstance(raised.error, EpcommTimeoutError) and "[1] of 3" in raised.text, raised


# ---- the default communicator


def test_default_communicator() -> None:
    def body() -> None:
        with pytest.raises(ClosedError, match="init"):
            epcomm.allreduce(X)
        with pytest.raises(ClosedError, match="init"):
            epcomm.default_communicator()
        first, second = epcomm.init(timeout=20.0), epcomm.init(timeout=20.0)
        assert epcomm.default_communicator() is first
        assert epcomm.allreduce(X).tolist() == [2.0] * 4
        work = epcomm.allgather(X, async_op=True)
        assert work.result().shape == (8,)
        epcomm.barrier()
        first.close()
        with pytest.raises(ClosedError):
            epcomm.barrier()
        works(second)
        with epcomm.init(timeout=20.0) as third:
            assert epcomm.default_communicator() is third
        second.close()
        assert "rank" in repr(second) and "closed" in repr(second)

    run_ranks(body, 2)


# ---- fork


def in_fork(call: Callable[[], Any]) -> str:
    """Runs `call` in a forked child; "" if it returned, else what it raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends it if it hangs: it isn't among the processes that the harness kills
        try:
            call()
            text = ""
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.parametrize("num_threads", [1, 2])
def test_forked_child(num_threads: int) -> None:
    def body() -> None:
        with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
            works(comm)
            calls = [call for name, call in WAITS.items() if name not in ("close", "send", "recv", "alltoallv")]
            peer = 1 - comm.rank
            calls += [lambda c: c.send(X, peer), lambda c: c.recv(X.clone(), peer), lambda c: c.reset()]
            calls += [lambda c: c.expert_parallel(num_experts=2, topk=1, hidden=8, max_tokens=4)]
            for call in calls:
                assert in_fork(lambda call=call: call(comm)).startswith("ClosedError"), call

            def leave() -> None:
                comm.abort()
                comm.close()

            assert in_fork(leave) == ""
            works(comm)  # the parent is the rank, and none of this has disturbed it

            def own_world() -> None:
                not_launched()
                with epcomm.init(num_threads=num_threads) as alone:
                    works(alone)

            assert in_fork(own_world) == ""
            works(comm)

    run_ranks(body, 2)


def test_killed_rank_that_leaves_a_forked_child() -> None:
    """The child has inherited descriptors, but it isn't the rank."""

    def body() -> Any:
        comm = epcomm.init(timeout=20.0)
        works(comm)
        if comm.rank == 1:
            rank = os.getpid()
            if os.fork() == 0:
                while os.getppid() == rank:
                    time.sleep(0.05)
                time.sleep(5.0)
                os._exit(0)
            os.kill(rank, signal.SIGKILL)
        entered = time.monotonic()
        lost = raised_by(comm.barrier)
        return lost, raised_by(comm.reset), entered

    lost, reset, entered = rank_outcomes(body, 2, expendable=[1])[0]
    assert isinstance(lost.error, PeerLostError) and isinstance(reset.error, PeerLostError), (lost, reset)
    assert reset.when < entered + 2 * SOON, (reset, entered)


def test_messages_to_closed_communicator_say_who() -> None:
    def body() -> None:
        comm = epcomm.init(timeout=20.0)
        comm.close()
        for call in (lambda: comm.allreduce(torch.ones(3)), comm.check):
            text = raised_by(call).text
            assert f"rank {comm.rank}" in text and "closed" in text

    run_ranks(body, 2)


@pytest.mark.parametrize("deadline", [0.0004, 0.2])  # stores count whole milliseconds
def test_who_came_too_early_meets_the_others_at_the_next_attempt(deadline: float) -> None:
    store = dist.HashStore()
    early, late = StoreRendezvous(store, 0, 2), StoreRendezvous(store, 1, 2)
    for _ in range(2):
        with pytest.raises(EpcommTimeoutError, match=r"rank 0: init waited .* s for rank\(s\) \[1\] of 2"):
            early.allgather("too early", deadline)
    for attempt in range(3):
        with ThreadPoolExecutor() as pool:
            texts = [pool.submit(each.allgather, f"{each.rank}, {attempt}", 20.0) for each in (early, late)]
            assert [text.result() for text in texts] == 2 * [[f"0, {attempt}", f"1, {attempt}"]]
