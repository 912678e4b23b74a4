"""Asynchronous operations, bound calls, alltoallv of any splits, and several communicators side by side."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import addend, payload, reduced, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import epcomm
from epcomm.errors import PeerFailedError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.adversary import Pauses, delay_operations
from epcomm.testing.ranks import run_ranks

SUM, MAX = "sum", "max"


def summed(comm: epcomm.Communicator, shape: tuple[int, ...], call: int, op: str = SUM) -> tuple[Any, torch.Tensor]:
    """This rank's input and the allreduce of all ranks'."""
    inputs = [addend(rank, shape, torch.float32, op, call, comm.size) for rank in range(comm.size)]
    return inputs[comm.rank], reduced(inputs, op)


# ---- async


def every_method() -> None:
    """Each asynchronous collective gives what its synchronous form gives, and works complete in the order of calls."""
    with epcomm.init(timeout=30.0) as comm:
        delay_operations(comm, seed=1)
        size, rank = comm.size, comm.rank
        parts = [payload(source, (size, 3), torch.int64, 0) for source in range(size)]
        own, whole = parts[rank], torch.cat(parts)
        x, wanted = summed(comm, (40_000,), 0)
        scattered = comm.broadcast(whole, 1)
        out = torch.empty(size, 3, dtype=torch.int64)
        calls = [
            (comm.allreduce(x, async_op=True), wanted),
            (comm.reduce(x, 1, async_op=True), wanted if rank == 1 else None),
            (comm.allgather(own, async_op=True), whole),
            (comm.gather(own, 0, async_op=True), whole if rank == 0 else None),
            (comm.broadcast(own, 1, async_op=True), parts[1]),
            (comm.scatter(whole if rank == 1 else None, 1, out=out, async_op=True), scattered.chunk(size)[rank]),
            (comm.reduce_scatter(own, async_op=True), sum(parts)[rank : rank + 1]),
            (comm.alltoall(own, async_op=True), torch.stack([part[rank] for part in parts])),
            (comm.alltoallv(own, [1] * size, async_op=True), torch.stack([part[rank] for part in parts])),
        ]
        done: list[int] = []
        callbacks = [
            work.get_future().then(lambda _, number=number: done.append(number))
            for number, (work, _) in enumerate(calls)
        ]
        for work, expected in reversed(calls):
            assert work.wait(timeout=20.0) is True
            assert work.is_completed() and work.exception() is None
            assert same_bits(work.result(), expected)
            (value,) = work.get_future().wait()
            assert same_bits(value, expected)
        for callback in callbacks:
            callback.wait()
        assert done == list(range(len(calls)))


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_async_form_of_every_collective(ranks: str) -> None:
    run_ranks(every_method, 3, ranks=ranks)


def sync_behind_async() -> None:
    with epcomm.init(timeout=30.0) as comm:
        pause = Pauses(7, comm.rank)
        for call in range(20):
            first, wanted_first = summed(comm, (30_000,), 3 * call)
            works = [comm.allreduce(first, out=first, async_op=True)]
            works.append(comm.allreduce(first, MAX, async_op=True))  # of what the first has made
            pause()
            second, wanted_second = summed(comm, (5,), 3 * call + 1)
            assert same_bits(comm.allreduce(second), wanted_second)
            assert all(work.is_completed() for work in works), "a synchronous call overtook asynchronous ones"
            assert same_bits(first, wanted_first) and same_bits(works[1].result(), wanted_first)
            works.append(comm.allreduce(second, async_op=True))
            comm.barrier()
            assert works[2].is_completed()


def test_synchronous_calls_queue_behind_asynchronous_ones() -> None:
    run_ranks(sync_behind_async, 3, disturb=3)


def results_in_callbacks() -> list[float]:
    with epcomm.init(timeout=30.0) as comm:
        seen: list[float] = []
        for call in range(3):
            x, _ = summed(comm, (11,), call)
            future = comm.allreduce(x, async_op=True).get_future()
            future.then(lambda f: seen.append(f.value()[0].sum().item()))
            future.wait()
        comm.barrier()
        return seen


def test_future_callbacks_get_the_result() -> None:
    wanted = [
        reduced([addend(rank, (11,), torch.float32, SUM, call, 2) for rank in range(2)], SUM).sum().item()
        for call in range(3)
    ]
    assert run_ranks(results_in_callbacks, 2) == [wanted, wanted]


def wait_with_deadline() -> None:
    with epcomm.init(timeout=30.0) as comm:
        if comm.rank == 0:
            work = comm.allreduce(torch.ones(3), async_op=True)
            with pytest.raises(EpcommTimeoutError):
                work.wait(timeout=0.05)
            assert not work.is_completed() and work.exception() is None
            comm.send(torch.ones(1), 1)
            assert work.wait() and work.result().tolist() == [2.0] * 3
        else:
            comm.recv(torch.ones(1), 0)
            comm.allreduce(torch.ones(3))


def test_waiting_for_work_with_a_deadline_leaves_it_running() -> None:
    run_ranks(wait_with_deadline, 2)


def failed_work() -> None:
    comm = epcomm.init(timeout=30.0)
    if comm.rank == 0:
        works = [comm.allreduce(torch.ones(3), async_op=True) for _ in range(3)]
        with pytest.raises(PeerFailedError, match="on purpose"):
            works[0].wait()
        for work in works[1:]:
            with pytest.raises(PeerFailedError, match="on purpose"):
                work.result()
        assert all(isinstance(work.exception(), PeerFailedError) and work.is_completed() for work in works)
        with pytest.raises(Exception, match="on purpose"):
            works[0].get_future().wait()
    else:
        time.sleep(0.05)
        comm.abort("on purpose")


def test_failure_is_raised_by_every_queued_work() -> None:
    run_ranks(failed_work, 2)


def dropped_works() -> None:
    """Nobody holds the works or their inputs."""
    with epcomm.init(timeout=30.0) as comm:
        out = torch.empty(20_000)
        for call in range(30):
            x, wanted = summed(comm, (20_000,), call)
            comm.allreduce(x.clone(), out=out, async_op=True)
            del x
            trash = torch.full((20_000,), float("nan"))
            comm.barrier()
            assert same_bits(out, wanted), call
            del trash


def test_works_keep_their_tensors_alive() -> None:
    run_ranks(dropped_works, 2)


# ---- bound allreduce


def bound_calls() -> None:
    with epcomm.init(timeout=30.0) as comm:
        delay_operations(comm, seed=2, longest=0.0005)
        for shape, op in [((2,), SUM), ((20_000,), MAX), ((300_001,), SUM)]:
            x, out = torch.empty(shape), torch.empty(shape)
            in_place, apart = comm.bind_allreduce(x, op), comm.bind_allreduce(x, op, out=out)
            for call in range(4):
                own, wanted = summed(comm, shape, call, op)
                x.copy_(own)
                assert apart() is out and same_bits(out, wanted) and same_bits(x, own)
                assert in_place() is x and same_bits(x, wanted)
                work = comm.allreduce(own, op, async_op=True)
                x.copy_(own)
                in_place()
                assert work.is_completed() and same_bits(x, wanted)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_bound_allreduce(world: int) -> None:
    run_ranks(bound_calls, world)


# ---- alltoallv


def exchange_splits(matrices: list[list[list[int]]], row: tuple[int, ...]) -> None:
    with epcomm.init(timeout=30.0) as comm:
        delay_operations(comm, seed=3, longest=0.0005)
        for call, matrix in enumerate(matrices):
            dtype = (torch.float32, torch.bool, torch.complex128)[call % 3]
            blocks = [
                [payload(8 * source + to, (rows, *row), dtype, call) for to, rows in enumerate(splits)]
                for source, splits in enumerate(matrix)
            ]
            own, wanted = torch.cat(blocks[comm.rank]), torch.cat([sent[comm.rank] for sent in blocks])
            receives = [sends[comm.rank] for sends in matrix]
            assert same_bits(comm.alltoallv(own, matrix[comm.rank]), wanted), (matrix, row, dtype)
            out = torch.empty_like(wanted)
            assert comm.alltoallv(own, matrix[comm.rank], receives, out=out) is out
            assert same_bits(out, wanted), (matrix, row, dtype)


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), world=st.sampled_from([1, 2, 3, 5]))
def test_alltoallv_of_any_splits(data: st.DataObject, world: int) -> None:
    counts = st.one_of(st.just(0), st.integers(0, 7), st.sampled_from([63, 64, 65, 1000]))
    matrices = st.lists(st.lists(counts, min_size=world, max_size=world), min_size=world, max_size=world)
    row = data.draw(st.sampled_from([(), (1,), (3,), (0,), (2, 40)]), label="row")
    run_ranks(exchange_splits, world, data.draw(st.lists(matrices, min_size=1, max_size=3), label="splits"), row)


def test_alltoallv_of_several_chunks() -> None:
    run_ranks(exchange_splits, 3, [[[0, 90_000, 5], [300_000, 1, 0], [7, 200_000, 65_537]]], (2,))


# ---- several communicators


def two_groups(port: int) -> None:
    """The world, and halves of it met over a prefixed store, used in turns and from two threads at once."""
    rank = epcomm.world.rendezvous.launched_rank.get().rank
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    half = dist.PrefixStore(f"half-{rank % 2}", store)
    members = [r for r in range(5) if r % 2 == rank % 2]
    with (
        epcomm.init(store=store, rank=rank, world_size=5, timeout=30.0) as world,
        epcomm.init(store=half, rank=members.index(rank), world_size=len(members), timeout=30.0) as group,
    ):
        assert epcomm.default_communicator() is world
        for comm in (world, group):
            delay_operations(comm, seed=4, longest=0.0005)

        def use(comm: epcomm.Communicator, calls: range) -> None:
            for call in calls:
                for shape in ((3,), (50_000,)):
                    x, wanted = summed(comm, shape, call)
                    assert same_bits(comm.allreduce(x), wanted), (comm, call, shape)

        for call in range(5):
            use(world, range(call, call + 1))
            use(group, range(call, call + 1))
        failures: list[BaseException] = []

        def in_thread() -> None:
            try:
                use(group, range(10))
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=in_thread)
        thread.start()
        use(world, range(10))
        thread.join()
        assert not failures, failures


def test_two_groups_side_by_side() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(two_groups, 5, store.port)


def test_default_communicator_of_each_thread_rank() -> None:
    def body() -> tuple[int, float]:
        with epcomm.init() as comm:
            assert epcomm.default_communicator() is comm
            return comm.rank, epcomm.allreduce(torch.tensor([float(comm.rank)])).item()

    assert run_ranks(body, 3, ranks="threads") == [(0, 3.0), (1, 3.0), (2, 3.0)]
