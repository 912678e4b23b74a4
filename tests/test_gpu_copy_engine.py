"""Data movement by copies between barriers, as GPUs' copy engines do it: the same code on CPU memory.

The barriers are the GPU target's kernel, interpreted. A rank stages 64 KiB there, so little data is several pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import FORMS, payload, same_bits
from failure_cases import Raised, raised_by

import epcomm
from epcomm import errors
from epcomm.collectives.copy_engine import copy_pieces
from epcomm.errors import ConfigError, MismatchError
from epcomm.heap.cuda_symmetric import register_group
from epcomm.heap.views import memory_view
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import rank_outcomes, run_ranks

ROOM, ALIGNMENT = 64 << 10, 256  # bytes


def on_ranks(world: int, body: Callable[..., Any]) -> list[Any]:
    """What ``body(communicator)`` returns on each rank of a world without kernels that move data."""

    def run() -> Any:
        with kernels_of("triton", sm_budget=0), epcomm.init(timeout=30.0) as comm:
            return body(comm)

    return run_ranks(run, world)


def check(comm: epcomm.Communicator, case: Any, got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert same_bits(got, wanted), f"rank {comm.rank}: {case}: got {got}, wanted {wanted}"


def sizes(piece: int) -> list[int]:
    """Bytes around the ends of pieces, some of which no dtype but uint8 has."""
    return [0, 1, 1000, piece - 1, piece, piece + 1, 3 * piece, 3 * piece + 7]


def check_allgather(comm: epcomm.Communicator) -> None:
    for call, size in enumerate(sizes(ROOM)):
        parts = [payload(rank, (size,), torch.uint8, call) for rank in range(comm.size)]
        whole, own = torch.cat(parts), parts[comm.rank]
        x = list(FORMS.values())[call % len(FORMS)](own)
        check(comm, size, comm.allgather(x), whole)
        check(comm, (size, "x changed"), x, own)
        out = torch.empty_like(whole)
        place = out[comm.rank * size : (comm.rank + 1) * size].copy_(own)
        check(comm, (size, "in place"), comm.allgather(place, out=out), whole)


def check_alltoall(comm: epcomm.Communicator) -> None:
    everyone = range(comm.size)
    for call, size in enumerate(sizes(ROOM // comm.size // ALIGNMENT * ALIGNMENT)):
        sent = [[payload(a * comm.size + b, (size,), torch.uint8, call) for b in everyone] for a in everyone]
        own, wanted = torch.cat(sent[comm.rank]), torch.cat([sent[source][comm.rank] for source in everyone])
        x = list(FORMS.values())[call % len(FORMS)](own)
        check(comm, size, comm.alltoall(x), wanted)
        check(comm, (size, "x changed"), x, own)
        check(comm, (size, "in place"), comm.alltoall(own, out=own), wanted)


@pytest.mark.parametrize("operation", [check_allgather, check_alltoall])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sizes(world: int, operation: Callable[[epcomm.Communicator], None]) -> None:
    on_ranks(world, operation)


def check_dtypes(comm: epcomm.Communicator) -> None:
    """Dtypes that can only be moved, a scalar, and tensors that torch lets nobody write to in place."""
    for call, dtype in enumerate((torch.complex64, torch.bool, torch.float8_e4m3fn, torch.int64)):
        parts = [payload(rank, (3, 5), dtype, call) for rank in range(comm.size)]
        check(comm, dtype, comm.allgather(parts[comm.rank]), torch.cat(parts))
    check(comm, "scalar", comm.allgather(torch.tensor(comm.rank)), torch.arange(comm.size))
    leaf = torch.zeros(comm.size, requires_grad=True)
    with torch.inference_mode():
        frozen = torch.zeros(comm.size)
    for out in (leaf, frozen):
        comm.allgather(torch.tensor([float(comm.rank)]), out=out)
        assert out.tolist() == list(range(comm.size))


def test_dtypes() -> None:
    on_ranks(2, check_dtypes)


def check_relatives(comm: epcomm.Communicator) -> None:
    """The other movements of data, and operations with kernels, before, between and after them."""
    size, rank = comm.size, comm.rank
    for call in range(3):
        parts = [payload(source, (ROOM // 3 + 1,), torch.uint8, call) for source in range(size)]
        root, whole = call % size, torch.cat(parts)
        check(comm, "broadcast", comm.broadcast(parts[rank], root), parts[root])
        check(comm, "gather", comm.gather(parts[rank], root), whole if rank == root else None)
        check(comm, "allreduce", comm.allreduce(torch.ones(9)), torch.full((9,), float(size)))
        out = torch.empty_like(parts[rank])
        check(comm, "scatter", comm.scatter(whole if rank == root else None, root, out=out), parts[rank])
        counts = [[(source + 2 * to + call) % 4 for to in range(size)] for source in range(size)]
        rows = [payload(source, (sum(counts[source]), 3), torch.float32, call) for source in range(size)]
        wanted = torch.cat([rows[source].split(counts[source])[rank] for source in range(size)])
        check(comm, "alltoallv", comm.alltoallv(rows[rank], counts[rank]), wanted)
        works = [comm.allgather(part, async_op=True) for part in (parts[rank], rows[rank][:0])]
        check(comm, "asynchronous", works[0].result(), whole)
        check(comm, "reduce_scatter", comm.reduce_scatter(torch.ones(size)), torch.full((1,), float(size)))
        assert works[1].result().shape == (0, 3)


def test_relatives() -> None:
    on_ranks(3, check_relatives)


# ---- the copies by themselves: memory of threads, and a barrier that writes down what it orders


@pytest.mark.parametrize("shared", [True, False], ids=["allgather", "alltoall"])
def test_copies_and_barriers(shared: bool) -> None:
    """Two barriers per piece; between a rank's two, nothing in its staging memory changes."""
    world, each = 3, 2100
    staging = [torch.zeros(3000 if shared else 3 * 1024, dtype=torch.uint8) for _ in range(world)]
    piece = 3000 if shared else 1024
    meeting, seen = threading.Barrier(world), [[] for _ in range(world)]
    sent = [payload(rank, (each if shared else world * each,), torch.uint8, 0) for rank in range(world)]
    received = [torch.zeros(world * each, dtype=torch.uint8) for _ in range(world)]
    offsets = [rank * each for rank in range(world)]
    table = [[0] * world if shared else offsets, [each] * world, offsets, [each] * world]

    def rank_of(rank: int) -> None:
        def barrier() -> None:
            meeting.wait(20)
            seen[rank].append(staging[rank].clone())

        copy_pieces(rank, sent[rank], received[rank], staging, table, each, shared, barrier)

    threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(world):
        parts = sent if shared else [whole.split(each)[rank] for whole in sent]
        assert torch.equal(received[rank], torch.cat(parts))
        assert len(seen[rank]) == 2 * -(-each // piece)
        assert all(torch.equal(*pair) for pair in zip(seen[rank][::2], seen[rank][1::2], strict=True))


def test_view_of_memory() -> None:
    memory = torch.arange(10, dtype=torch.uint8)
    view = memory_view(memory.data_ptr() + 2, 5, memory.device)
    assert view.tolist() == [2, 3, 4, 5, 6]
    view[0] = 99
    assert memory[2] == 99
    assert memory_view(0, 0, memory.device).shape == (0,)


# ---- failures


def test_all_ranks_must_copy() -> None:
    def body() -> None:
        with kernels_of("mixed", sm_budget=0):
            epcomm.init(timeout=30.0)

    for outcome in rank_outcomes(body, 2):
        assert isinstance(outcome, ConfigError) and "got cpu, cpu with sm_budget=0 by rank" in str(outcome)


def test_negative_budget() -> None:
    with pytest.raises(ConfigError, match="`sm_budget`: wanted an integer of at least 0, got -1"):
        epcomm.init(sm_budget=-1)


def test_mismatched_calls() -> None:
    def body(comm: epcomm.Communicator) -> Raised:
        x = torch.ones(4)
        raised = raised_by(lambda: comm.allgather(x) if comm.rank else comm.alltoall(x))
        comm.reset()
        check(comm, "after reset", comm.allgather(x), torch.ones(4 * comm.size))
        return raised

    for raised in on_ranks(2, body):
        assert isinstance(raised.error, MismatchError), raised
        assert "allgather(" in raised.text and "alltoall(" in raised.text


def test_deadline() -> None:
    def body(comm: epcomm.Communicator) -> Raised:
        comm.barrier()
        if comm.rank == 1:
            return raised_by(lambda: comm.allgather(torch.ones(4), timeout=0.3))
        return raised_by(lambda: [comm.check() for _ in iter(int, 1)])  # until the peer has given up

    raised = on_ranks(2, body)[1]
    assert isinstance(raised.error, errors.TimeoutError) and "rank 0" in raised.text, raised


# ---- torch's symmetric memory: as much of it as there is without a GPU


def test_store_of_a_group() -> None:
    """The ranks find each other's store, and torch takes the group."""

    def body(comm: epcomm.Communicator) -> str:
        def exchange(payload: bytes) -> list[bytes]:
            return [message for message, _ in comm._runtime._allgather(payload)]

        return register_group(comm.rank, comm.size, exchange)

    names = on_ranks(3, body)
    assert names[0].startswith("epcomm-") and len(set(names)) == 1
