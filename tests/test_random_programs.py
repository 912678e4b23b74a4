"""Random sequences of collectives and messages on one communicator, with ranks stopped at random in the middle of them.

What one operation leaves in shared memory must not be seen by the next: sizes, kinds and ways of calling vary.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import FORMS, MOVED, REDUCTIONS, addend, payload, reduced, same_bits

import epcomm
from epcomm.testing.adversary import Pauses
from epcomm.testing.ranks import run_ranks

Pending = tuple[str, Any, torch.Tensor | None]  # what it is, the result or its work, what it must be


def any_size(choose: random.Random) -> int:
    """Mostly small; now and then around a limit, or of several chunks."""
    limit = choose.choice([4, 4, 30, 120, 8192, 8192, 70_000, 300_000])
    return max(0, limit + choose.randint(-4, 4))


def reduction(comm: epcomm.Communicator, choose: random.Random, call: int, is_async: bool) -> Pending:
    dtype, op = choose.choice(REDUCTIONS)
    kind, size = choose.choice(["allreduce", "reduce", "reduce_scatter"]), any_size(choose)
    form, root, algorithm = choose.choice(list(FORMS)), choose.randrange(comm.size), choose.choice(["auto", "two_shot"])
    shape = (size // comm.size * comm.size,)
    inputs = [addend(rank, shape, dtype, op, call, comm.size) for rank in range(comm.size)]
    wanted, x = reduced(inputs, op), FORMS[form](inputs[comm.rank])
    label = f"{kind} {dtype} {op} {shape} {form}"
    if kind == "allreduce":
        out = x if form == "contiguous" else None
        return label, comm.allreduce(x, op, out=out, algorithm=algorithm, async_op=is_async), wanted
    if kind == "reduce":
        return label, comm.reduce(x, root, op, async_op=is_async), wanted if comm.rank == root else None
    return label, comm.reduce_scatter(x, op, async_op=is_async), wanted.chunk(comm.size)[comm.rank]


def movement(comm: epcomm.Communicator, choose: random.Random, call: int, is_async: bool) -> Pending:
    dtype, size, rank = choose.choice(MOVED), comm.size, comm.rank
    kind = choose.choice(["allgather", "gather", "broadcast", "scatter", "alltoall", "alltoallv"])
    rows, root = any_size(choose) // size, choose.randrange(size)
    splits = [[choose.choice([0, rows, choose.randint(0, rows)]) for _ in range(size)] for _ in range(size)]
    label = f"{kind} {dtype} {rows} root {root}"
    if kind in ("allgather", "gather"):
        wanted = torch.cat([payload(r, (rows,), dtype, call) for r in range(size)])
        x = payload(rank, (rows,), dtype, call)
        if kind == "allgather":
            return label, comm.allgather(x, async_op=is_async), wanted
        return label, comm.gather(x, root, async_op=is_async), wanted if rank == root else None
    if kind == "broadcast":
        x = payload(rank, (rows,), dtype, call)
        return label, comm.broadcast(x, root, async_op=is_async), payload(root, (rows,), dtype, call)
    if kind == "scatter":
        x, out = payload(root, (rows * size,), dtype, call), torch.empty(rows, dtype=dtype)
        result = comm.scatter(x if rank == root else None, root, out=out, async_op=is_async)
        return label, result, x[rank * rows : (rank + 1) * rows]
    if kind == "alltoall":
        splits = [[rows] * size] * size
    sent = [[payload(size * r + to, (n,), dtype, call) for to, n in enumerate(splits[r])] for r in range(size)]
    wanted = torch.cat([blocks[rank] for blocks in sent])
    x = torch.cat(sent[rank])
    if kind == "alltoall":
        return label, comm.alltoall(x, async_op=is_async), wanted
    return label, comm.alltoallv(x, splits[rank], async_op=is_async), wanted


def message(comm: epcomm.Communicator, choose: random.Random, call: int, is_async: bool) -> Pending:
    size, distance = any_size(choose), choose.randrange(1, max(2, comm.size))
    if comm.size == 1:
        return "nothing", None, None
    to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
    out = torch.empty(size, dtype=torch.uint8)
    comm.send(payload(comm.rank, (size,), torch.uint8, call), to, tag=call, async_op=True)
    received = comm.recv(out, source, tag=call, async_op=is_async)
    return f"message of {size} from {source}", received, payload(source, (size,), torch.uint8, call)


def program(seed: int, steps: int, num_threads: int | None) -> None:
    choose = random.Random(seed)  # the same choices on all ranks
    with epcomm.init(timeout=40.0, num_threads=num_threads) as comm:
        pause, pending = Pauses(seed, comm.rank, longest=0.001), []

        def settle(label: str, result: Any, wanted: torch.Tensor | None) -> None:
            value = result.result() if isinstance(result, epcomm.Work) else result
            assert same_bits(value, wanted), f"rank {comm.rank}, seed {seed}: {label}: got {value}, wanted {wanted}"

        for call in range(steps):
            step: Callable[..., Pending] = choose.choice([reduction, reduction, movement, movement, message])
            pause()
            pending.append(step(comm, choose, call, is_async=choose.random() < 0.4))
            if choose.random() < 0.2:
                comm.barrier()
            while len(pending) > choose.randrange(5):
                settle(*pending.pop(0))
        for entry in pending:
            settle(*entry)


CASES = [
    (1, "processes", None),
    (2, "processes", None),
    (3, "processes", 2),
    (5, "processes", None),
    (3, "threads", None),
]


@pytest.mark.parametrize("world, ranks, num_threads", CASES)
def test_random_program(world: int, ranks: str, num_threads: int | None) -> None:
    disturb = world if ranks == "processes" else None
    run_ranks(program, world, 100 + world, 120, num_threads, ranks=ranks, disturb=disturb)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world, ranks, num_threads", [*CASES, (7, "processes", None), (4, "processes", 3)])
def test_long_random_program(world: int, ranks: str, num_threads: int | None) -> None:
    for seed in range(5):
        run_ranks(program, world, seed, 600, num_threads, ranks=ranks, disturb=seed, timeout=170.0)
