"""Ranks on several hosts: how they meet, exchange, fail and part. No payload travels here.

Most hosts are parts of this machine that share no memory; one test has real ones, in network namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failure_cases import SOON, Raised, raised_by
from host_cases import EVERY_WORLD, WORLDS

import epcomm
from epcomm.errors import MismatchError, PeerFailedError, PeerLostError, UnsupportedError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.hosts.tcp_proxy import NoProxy
from epcomm.kernels import target
from epcomm.kernels.cpu.target import CpuTarget
from epcomm.runtime import Runtime
from epcomm.testing import namespaces
from epcomm.testing.hosts import pretend_hosts
from epcomm.testing.ranks import rank_outcomes, run_ranks
from epcomm.world import rendezvous, tcp
from epcomm.world.rendezvous import StoreRendezvous, find_rendezvous

SOON_ELSEWHERE = 1.0  # seconds until ranks of other hosts know of an error


def join(port: int, hosts: list[int], timeout: float = 20.0) -> epcomm.Communicator:
    """A communicator of ranks that take themselves for ranks of `hosts`."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    with pretend_hosts(hosts):
        return epcomm.init(store=store, rank=own_rank(), world_size=len(hosts), timeout=timeout)


def own_rank() -> int:
    return rendezvous.launched_rank.get().rank


def meet(runtime: Runtime) -> None:
    runtime.hub.barrier(timeout=20.0, check=runtime.check)


def leave(comm: epcomm.Communicator) -> None:
    """Collective: as `close`, whose barrier would be a kernel's."""
    comm._close(lambda: None)


def check_until_raised(runtime: Runtime) -> Raised:
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            runtime.check()
        except epcomm.errors.EpcommError as error:
            return Raised(error, time.monotonic())
        time.sleep(0.005)
    raise AssertionError("expected to hear of a failure")


def stays_healthy(runtime: Runtime, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        runtime.check()
        time.sleep(0.01)


# ---- meeting and exchanging


def exchange(comm: epcomm.Communicator, hosts: list[int]) -> None:
    hub = comm._runtime.hub
    first = list(dict.fromkeys(hosts))
    assert hub.nodes == [first.index(host) for host in hosts]
    assert hub.leaders == [hosts.index(host) for host in first]
    for size in (0, 5, 300_000):
        read, write = os.pipe()
        payload = bytes([comm.rank]) * (size + comm.rank)
        messages = hub.allgather(payload, [write], timeout=20.0, check=comm.check)
        assert [message for message, _ in messages] == [bytes([rank]) * (size + rank) for rank in range(comm.size)]
        for rank, (_, descriptors) in enumerate(messages):
            assert len(descriptors) == (hosts[rank] == hosts[comm.rank])
            for descriptor in descriptors:
                os.write(descriptor, bytes([comm.rank]))
                os.close(descriptor)
        hub.barrier(timeout=20.0, check=comm.check)
        assert sorted(os.read(read, 100)) == [rank for rank in range(comm.size) if hosts[rank] == hosts[comm.rank]]
        os.close(read)
        os.close(write)
    bases = comm._runtime.control.bases
    assert [base != 0 for base in bases] == [host == hosts[comm.rank] for host in hosts]
    assert len(hub.addresses) == comm.size and all(socket.getaddrinfo(address, 0) for address in hub.addresses)


@EVERY_WORLD
def test_exchange(hosts: list[int], port: int) -> None:
    def body() -> None:
        for _ in range(3):
            comm = join(port, hosts)
            exchange(comm, hosts)
            leave(comm)

    run_ranks(body, len(hosts), disturb=3)


def test_process_group_and_torchrun(port: int) -> None:
    hosts = WORLDS["2+2"]

    def body(torchrun_port: int) -> None:
        rank = own_rank()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        of_group = find_rendezvous(dist.group.WORLD, None, None, None, 20.0)
        assert of_group.store_hosts() == ["127.0.0.1"] == StoreRendezvous(store, 0, 1).store_hosts()
        with pretend_hosts(hosts):
            comm = epcomm.init(dist.group.WORLD, timeout=20.0)
        dist.destroy_process_group()
        exchange(comm, hosts)
        leave(comm)
        os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(torchrun_port))
        launched = rendezvous.launched_rank.get()
        try:
            with pretend_hosts(hosts):
                identity = epcomm.world.bootstrap.host_identity()
                epcomm.world.bootstrap.host_identity = lambda: identity
                rendezvous.launched_rank.set(None)
                comm = epcomm.init(timeout=20.0)
            exchange(comm, hosts)
            leave(comm)
        finally:
            rendezvous.launched_rank.set(launched)
            for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        torchrun_port = probe.getsockname()[1]
    run_ranks(body, 4, torchrun_port)


def test_gpus_without_a_transport(port: int) -> None:
    """All ranks say why each transport was refused."""

    class OnGpus(CpuTarget):
        def connect(self, rank: int, hosts: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> Any:
            from epcomm.heap import transport

            return transport.connect("auto", rank, hosts, torch.device("cuda", 0), exchange)

    def body() -> Raised:
        token = target.make_target.set(OnGpus)
        try:
            return raised_by(join, port, WORLDS["2+2"])
        finally:
            target.make_target.reset(token)

    for raised in run_ranks(body, 4):
        assert isinstance(raised.error, UnsupportedError), raised
        for reason in ("the ranks are on 2 hosts, by rank [0, 0, 1, 1]", "NVSHMEM needs a GPU", "GIN needs a GPU"):
            assert reason in raised.text, raised


def test_network_is_closed_by_all_or_left() -> None:
    """What all ranks must give back together is given back by a close that all have come to, and by no other."""
    closed: list[bool] = []

    class Network(NoProxy):
        nodes = [0, 0]

        def close(self, is_together: bool = False) -> None:
            closed.append(is_together)

    class OnNetwork(CpuTarget):
        def connect(self, rank: int, hosts: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> Any:
            assert [list(hosts), exchange(str(rank).encode())] == [[0, 0], [b"0", b"1"]]
            return Network()

    def body() -> list[bool]:
        token = target.make_target.set(OnNetwork)
        try:
            with epcomm.init(timeout=20.0) as comm:
                assert comm.nodes == [0, 0]
                comm.barrier()
            comm.close()  # once more
            failed = epcomm.init(timeout=20.0)
            if failed.rank == 0:
                failed.abort()
            raised_by(failed.barrier)
            failed.close()
            revived = epcomm.init(timeout=20.0)
            if revived.rank == 1:
                revived.abort()
            raised_by(revived.barrier)
            revived.reset()
            revived.close()
            with pytest.raises(ZeroDivisionError), epcomm.init(timeout=20.0):
                raise ZeroDivisionError
        finally:
            target.make_target.reset(token)
        return closed

    assert run_ranks(body, 2) == [[True, False, True, False]] * 2


# ---- failing


@pytest.mark.parametrize("world, victim", [*(("2+2", v) for v in range(4)), ("1+2+1", 1), ("1+2+1", 2), ("1+1", 0)])
def test_killed_rank(world: str, victim: int, port: int) -> None:
    hosts = WORLDS[world]

    def body() -> Any:
        runtime = join(port, hosts)._runtime
        meet(runtime)
        if runtime.rank == victim:
            time.sleep(0.2)
            die()
        waiting = runtime.rank % 2 == 0  # the others look now and then
        found = raised_by(meet, runtime) if waiting else check_until_raised(runtime)
        return found, raised_by(runtime.reset), when_killed()

    def when_killed() -> float:
        return float(dist.TCPStore("127.0.0.1", port, is_master=False).get("killed"))

    def die() -> None:
        dist.TCPStore("127.0.0.1", port, is_master=False).set("killed", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    outcomes = rank_outcomes(body, len(hosts), expendable=[victim])
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert isinstance(outcome, tuple), outcome
            found, reset, when = outcome
            for raised in (found, reset):
                assert isinstance(raised.error, PeerLostError) and raised.error.rank == victim, raised
            assert found.when < when + SOON, (rank, found.when - when)
            print(f"rank {rank} learns of the end of rank {victim} after {found.when - when:.3f} s")


@EVERY_WORLD
@pytest.mark.parametrize("culprit", [0, -1])
def test_error_reaches_all_hosts_and_reset_revives(hosts: list[int], culprit: int, port: int) -> None:
    culprit %= len(hosts)

    def body() -> Any:
        comm = join(port, hosts)
        runtime = comm._runtime
        found = []
        for number in range(5):
            meet(runtime)
            if comm.rank == culprit:
                failed = time.monotonic()
                with pytest.raises(ValueError):
                    fail(comm, number)
                found.append(Raised(raised_by(comm.check).error, failed))
            else:
                found.append(raised_by(meet, runtime) if number % 2 else check_until_raised(runtime))
            comm.reset()
            stays_healthy(runtime, 0.05)
            exchange(comm, hosts)
        leave(comm)
        return found

    def fail(comm: epcomm.Communicator, number: int) -> None:
        try:
            raise ValueError(f"no more tokens ({number}), {'and so on ' * 1000}")
        except ValueError as error:
            comm.abort(f"{type(error).__name__}: {error}")
            raise

    by_rank = run_ranks(body, len(hosts))
    for rank, found in enumerate(by_rank):
        for number, raised in enumerate(found):
            assert isinstance(raised.error, PeerFailedError), raised
            assert f"ValueError: no more tokens ({number})" in raised.text, raised
            assert raised.when < by_rank[culprit][number].when + SOON_ELSEWHERE, (rank, number)
            if rank != culprit:
                assert f"rank {culprit}" in raised.text, raised


def test_first_cause_stays(port: int) -> None:
    """Two ranks fail at once; every rank quotes one of them, and the text is that one's."""
    hosts = WORLDS["1+2+1"]

    def body() -> list[Raised]:
        comm = join(port, hosts)
        found = []
        for _ in range(10):
            meet(comm._runtime)
            if comm.rank in (0, 2):
                comm.abort(f"said by {comm.rank}")
            found.append(check_until_raised(comm._runtime))
            comm.reset()
        leave(comm)
        return found

    for rank, found in enumerate(run_ranks(body, 4)):
        for raised in found:
            assert isinstance(raised.error, PeerFailedError), raised
            if rank in (1, 3):
                assert any(f"rank {r} failed" in raised.text and f"said by {r}" in raised.text for r in (0, 2)), raised


def test_mismatch_text(port: int) -> None:
    hosts = WORLDS["1+2+1"]

    def body() -> Any:
        comm = join(port, hosts)
        runtime = comm._runtime
        texts = {rank: f"allreduce of rank {rank}" for rank in range(4)}
        own = runtime.texts.fingerprint(texts[comm.rank])
        fingerprints = [
            int.from_bytes(payload, "little")
            for payload, _ in runtime.hub.allgather(own.to_bytes(8, "little"), timeout=20.0, check=runtime.check)
        ]
        for rank, fingerprint in enumerate(fingerprints):
            assert runtime._abort.peer_text(rank, fingerprint) == texts[rank]
            assert runtime._abort.peer_text(rank, 12345) is None
        meet(runtime)
        leave(comm)

    run_ranks(body, 4)


def test_mismatch_text_of_a_stopped_host(port: int) -> None:
    def body() -> Any:
        comm = join(port, WORLDS["1+1"])
        meet(comm._runtime)
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.2)
        asked = time.monotonic()
        return comm._runtime._abort.peer_text(1, 12345), time.monotonic() - asked

    text, seconds = rank_outcomes(body, 2, expendable=[1])[0]
    assert text is None and 1.0 < seconds < 3.0


def test_mismatch_is_one_everywhere(port: int) -> None:
    def body() -> Raised:
        comm = join(port, WORLDS["2+2"])
        meet(comm._runtime)
        if comm.rank == 0:
            comm._runtime.fail(MismatchError("barrier() here"), epcomm.device.control.PEER_MISMATCH)
        return check_until_raised(comm._runtime)

    for raised in run_ranks(body, 4):
        assert isinstance(raised.error, MismatchError) and "barrier() here" in raised.text, raised


def test_killed_rank_that_leaves_a_forked_child(port: int) -> None:
    """The child has inherited connections, but it isn't the rank."""

    def body() -> Any:
        comm = join(port, WORLDS["2+2"])
        meet(comm._runtime)
        if comm.rank == 2:
            rank = os.getpid()
            if os.fork() == 0:
                while os.getppid() == rank:
                    time.sleep(0.05)
                time.sleep(5.0)
                os._exit(0)
            time.sleep(0.2)
            os.kill(rank, signal.SIGKILL)
        entered = time.monotonic()
        return raised_by(meet, comm._runtime), entered

    outcomes = rank_outcomes(body, 4, expendable=[2])
    for lost, entered in (outcomes[0], outcomes[1], outcomes[3]):
        assert isinstance(lost.error, PeerLostError) and lost.error.rank == 2, lost
        assert lost.when < entered + SOON, (lost, entered)


def test_forked_child_that_leaves_disturbs_nobody(port: int) -> None:
    def body() -> None:
        comm = join(port, WORLDS["1+1"])
        meet(comm._runtime)
        child = os.fork()
        if child == 0:
            comm.abort()
            comm.close()
            del comm
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        stays_healthy(comm._runtime, 0.3)
        meet(comm._runtime)
        leave(comm)

    run_ranks(body, 2)


# ---- parting


def close_early(comm: epcomm.Communicator) -> None:
    comm._close(None)


def collect(comm: epcomm.Communicator) -> None:
    epcomm.initialize._process_default = None


@pytest.mark.parametrize("part", [close_early, collect])
@pytest.mark.parametrize("early", [0, 2, 3])
def test_no_alarm_when_a_rank_leaves(part: Callable[..., None], early: int, port: int) -> None:
    def body() -> None:
        comm = join(port, WORLDS["2+2"])
        runtime = comm._runtime
        meet(runtime)
        if comm.rank == early:
            part(comm)
            del comm, runtime
            gc.collect()
        else:
            stays_healthy(runtime, 0.5)

    run_ranks(body, 4)


@EVERY_WORLD
def test_nothing_is_left(hosts: list[int], port: int) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def body() -> None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        before = None
        for number in range(12):
            with pretend_hosts(hosts):
                comm = epcomm.init(store=store, rank=own_rank(), world_size=len(hosts), timeout=20.0, num_threads=1)
            meet(comm._runtime)
            if number % 3 == 0:
                leave(comm)
            elif number % 3 == 1:
                comm._close(None)
            else:
                epcomm.initialize._process_default = None
            del comm
            if number == 3:
                before = held()
        deadline = time.monotonic() + 5.0
        while held() != before and time.monotonic() < deadline:
            time.sleep(0.02)
        assert held() == before

    run_ranks(body, len(hosts))


# ---- who doesn't come, and who shouldn't


def test_rank_that_does_not_come(port: int) -> None:
    hosts = WORLDS["1+2+1"]

    def body() -> Any:
        if own_rank() == 2:
            return None
        return raised_by(join, port, hosts, timeout=0.5)

    for rank, raised in enumerate(run_ranks(body, 4)):
        if rank != 2:
            assert isinstance(raised.error, EpcommTimeoutError) and "[2] of 4" in raised.text, raised


def test_rank_that_does_not_come_to_an_exchange(port: int) -> None:
    hosts = WORLDS["1+2+1"]

    def body() -> Any:
        comm = join(port, hosts)
        meet(comm._runtime)
        if comm.rank == 3:
            time.sleep(1.0)
            return None
        return raised_by(comm._runtime.hub.barrier, timeout=0.5, check=comm.check)

    outcomes = run_ranks(body, 4)
    for raised in outcomes[:3]:
        assert isinstance(raised.error, (EpcommTimeoutError, PeerLostError)), raised
    assert "[3]" in outcomes[0].text, outcomes


def test_stranger_is_turned_away() -> None:
    listener = tcp.Listener(0)
    endpoint = listener.endpoint(["127.0.0.1"])
    listener.listen(4)
    strangers = []
    for greeting in (b"x" * 32, bytes.fromhex(endpoint.token)[16:] + b"\1" + b"\0" * 15, b"GET / HTTP/1.1\r\n" * 3):
        stranger = socket.create_connection(("127.0.0.1", endpoint.port))
        stranger.sendall(greeting)
        strangers.append(stranger)
    started = time.monotonic()
    error = raised_by(listener.accept, [(1, 7)], time.monotonic() + 0.3, lambda: None).error
    assert isinstance(error, EpcommTimeoutError) and "[7]" in str(error) and time.monotonic() < started + 1.0
    for stranger in strangers:
        assert select.select([stranger], [], [], 1.0)[0], "it should have been closed"
        with contextlib.suppress(ConnectionResetError):  # it said more than was read
            assert stranger.recv(100) == b""
        stranger.close()
    listener.close()


def test_dialing_tries_every_address() -> None:
    """Nobody is at the first address, and whoever doesn't know the token is no rank."""
    listener = tcp.Listener(3)
    endpoint = listener.endpoint(["192.0.2.1", "127.0.0.1"])
    listener.listen(4)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(listener.accept([(2, 5)], time.monotonic() + 20, lambda: None))
    )
    thread.start()
    error = raised_by(tcp.dial, replace(endpoint, token="00" * 32), 2, 5, time.monotonic(), lambda: None).error
    assert isinstance(error, EpcommTimeoutError) and "rank 3" in str(error) and "127.0.0.1" in str(error)
    connection = tcp.dial(endpoint, 2, 5, time.monotonic() + 20, lambda: None)
    thread.join()
    connection.sendall(b"hello")
    assert found[0][2, 5].recv(5) == b"hello"
    for each in (connection, found[0][2, 5], listener):
        each.close()


# ---- real hosts


def test_hosts_in_namespaces() -> None:
    if (reason := namespaces.available()) is not None:
        pytest.skip(f"network namespaces: {reason}")
    hosts = WORLDS["1+2+1"]

    def body() -> Any:
        rank = own_rank()
        store = namespaces.open_store(rank)
        comm = epcomm.init(store=store, rank=rank, world_size=len(hosts), timeout=30.0)
        runtime = comm._runtime
        exchange(comm, hosts)
        assert runtime.hub.addresses == [namespaces.Network.address(host) for host in hosts]
        if rank == 3:
            comm.abort("no more tokens")
        found = check_until_raised(runtime)
        comm.reset()
        meet(runtime)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        lost = raised_by(meet, runtime)
        return found, lost, lost.when - started

    outcomes = namespaces.rank_outcomes_on_hosts(body, hosts, expendable=[1])
    for rank in (0, 2, 3):
        assert isinstance(outcomes[rank], tuple), outcomes[rank]
        found, lost, seconds = outcomes[rank]
        assert isinstance(found.error, PeerFailedError) and "no more tokens" in found.text, found
        assert isinstance(lost.error, PeerLostError) and lost.error.rank == 1 and seconds < SOON, lost
