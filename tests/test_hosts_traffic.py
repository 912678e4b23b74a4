"""Collectives among three and five hosts: what each of them sends, how often sums are rounded, who runs ahead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import addend, payload, reduced
from collective_checks import (
    CHUNK,
    KIB,
    ONE_SHOT,
    around,
    check,
    check_gathers,
    check_reduce_scatter,
    check_reductions,
    check_rooted,
    check_traffic,
    traffic,
)
from host_cases import on_hosts

import epcomm
from epcomm.collectives.selection import is_scattered_by_rails, num_shares
from epcomm.testing.adversary import delay_operations

WORLDS = {
    "1+1+1": [0, 1, 2],
    "1+1+1+1+1": [0, 1, 2, 3, 4],
    "2+2+2": [0, 0, 1, 1, 2, 2],
    "uneven": [0, 1, 2, 1, 0],
}
EVERY_WORLD = pytest.mark.parametrize("hosts", WORLDS.values(), ids=WORLDS)
LARGEST_SLOW = pytest.mark.parametrize(
    "hosts",
    [pytest.param(WORLDS[name], id=name, marks=marks) for name, marks in (
        ("1+1+1", ()), ("uneven", ()), ("1+1+1+1+1", pytest.mark.slow), ("2+2+2", pytest.mark.slow)
    )],
)  # fmt: skip
MESSAGE = 4 << 20  # bytes


def disturbed(comm: epcomm.Communicator, body: Callable[..., Any], *args: Any) -> None:
    delay_operations(comm, seed=comm.size, longest=0.001)
    body(comm, *args)


def reduction_cases(num_hosts: int) -> list[tuple[torch.dtype, str, tuple[int, ...]]]:
    """Messages without a byte, of fewer elements than shares, at the limit of one hop, and of several chunks."""
    few = [(0,), (1,), (7, 9)]
    cases = [(dtype, op, shape) for dtype, op in ((torch.float32, "prod"), (torch.bfloat16, "avg")) for shape in few]
    limit = ONE_SHOT // (num_hosts - 1)
    for dtype in (torch.float32, torch.float16, torch.uint8):
        cases += [(dtype, "sum", (size,)) for size in around(limit, dtype.itemsize)]
    cases += [(torch.bfloat16, op, (CHUNK // 2 + 77,)) for op in ("sum", "max")]
    cases += [(torch.complex128, "sum", (CHUNK // 16 + 5,)), (torch.int64, "bxor", (2 * CHUNK // 8, 3))]
    return cases


@EVERY_WORLD
def test_reductions(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, disturbed, check_reductions, reduction_cases(max(hosts) + 1), "auto")


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1, 1], [0, 0, 1, 0, 0]], ids=str)
def test_reduce_scatter_of_many_ranks_per_host(hosts: list[int], port: int) -> None:
    """By rails where that sends less: of 3 ranks and more, of 16-bit floats 4 and more."""
    small = [(torch.float32, "sum", (n,)) for n in (1, 7)]
    large = [(torch.float32, "avg", (CHUNK // 4 + 333,)), (torch.uint8, "max", (3, CHUNK // 16 + 1))]
    halves = [(torch.bfloat16, "sum", (20_001,)), (torch.float16, "avg", (CHUNK // 2 + 3,))]
    on_hosts(hosts, port, disturbed, check_reduce_scatter, small + large + halves, num_threads=1 + (hosts[2] == 0))


def check_broadcasts(comm: epcomm.Communicator) -> None:
    """From every rank, of sizes that go down a chain and down a tree."""
    for call, num_bytes in enumerate([0, 1, 64 * KIB, 200 * KIB + 1, CHUNK - 1, 5 * CHUNK + 3]):
        for root in range(comm.size):
            x, wanted = (payload(rank, (num_bytes,), torch.uint8, call) for rank in (comm.rank, root))
            check(comm, (num_bytes, root), comm.broadcast(x, root), wanted)
            check(comm, (num_bytes, root, "in place"), comm.broadcast(x, root, out=x), wanted)


@LARGEST_SLOW
def test_broadcasts(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, disturbed, check_broadcasts)


@pytest.mark.parametrize("body", [pytest.param(check_rooted, marks=pytest.mark.slow), check_gathers])
def test_data_movement(port: int, body: Callable[[epcomm.Communicator], None]) -> None:
    on_hosts(WORLDS["1+1+1"], port, disturbed, body)


def several_programs(comm: epcomm.Communicator) -> None:
    check_reductions(comm, reduction_cases(3)[::2], "auto")
    check_broadcasts(comm)


@pytest.mark.parametrize("hosts", [WORLDS["1+1+1"], WORLDS["uneven"]], ids=str)
def test_two_programs_per_rank(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, several_programs, num_threads=2)


def a_program_of_calls(comm: epcomm.Communicator) -> None:
    """All that share the rings of slots behind one another, with a rank behind the others, and with no rest between."""
    for call in range(36):
        if call % comm.size == comm.rank and call % 3 == 0:
            time.sleep(0.003)
        root, size = (call * 2 + 1) % comm.size, (9, CHUNK + 5, 70_001, 2 * CHUNK)[call % 4]
        data = [payload(rank, (size,), torch.uint8, call) for rank in range(comm.size)]
        inputs = [addend(rank, (size // 3,), torch.bfloat16, "sum", call, comm.size) for rank in range(comm.size)]
        works = [comm.broadcast(data[comm.rank], (root + more) % comm.size, async_op=True) for more in range(3)]
        works.append(comm.allreduce(inputs[comm.rank], async_op=True))
        if call % 2:
            check(comm, ("allgather", call), comm.allgather(data[comm.rank]), torch.cat(data))
        result = comm.reduce(inputs[comm.rank], root)
        check(comm, ("reduce", call), result, reduced(inputs, "sum") if comm.rank == root else None)
        for more in range(3):
            check(comm, ("broadcast", call, more), works[more].result(), data[(root + more) % comm.size])
        check(comm, ("allreduce", call), works[3].result(), reduced(inputs, "sum"))


@LARGEST_SLOW
def test_calls_behind_one_another(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, a_program_of_calls)


# ---- rounding


def check_rounding(comm: epcomm.Communicator) -> None:
    """Sums of 16-bit floats that float32 holds exactly, but 16 bits don't: rounded once, as float64's are."""
    for dtype in (torch.bfloat16, torch.float16):
        most = 255 if dtype is torch.bfloat16 else 2047  # all digits of the format
        for size in (33, 300_001):
            inputs = []
            for rank in range(comm.size):
                generator = torch.Generator().manual_seed(rank)
                digits = torch.randint(-most, most + 1, (size,), generator=generator)
                inputs.append((digits * 2.0 ** (rank % 5)).to(dtype))
            exact = torch.stack([x.double() for x in inputs]).sum(0)
            rounded = rounded_often(inputs)
            assert size < 100 or not torch.equal(rounded, exact.to(dtype))  # the inputs tell one rounding from more
            for _ in range(3):
                check(comm, (dtype, size), comm.allreduce(inputs[comm.rank]), exact.to(dtype))
            average = (exact.float() / comm.size).to(dtype)
            check(comm, (dtype, size, "avg"), comm.allreduce(inputs[comm.rank], "avg"), average)
            result = comm.reduce(inputs[comm.rank], comm.size - 1)
            check(comm, (dtype, size, "reduce"), result, exact.to(dtype) if comm.rank == comm.size - 1 else None)


def rounded_often(inputs: list[torch.Tensor]) -> torch.Tensor:
    """The sum that is rounded after each addition."""
    total = inputs[0]
    for x in inputs[1:]:
        total = total + x
    return total


@EVERY_WORLD
def test_sums_of_16_bits_are_rounded_once(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, check_rounding)


# ---- traffic


def sent_bytes(comm: epcomm.Communicator, call: Callable[[], Any]) -> int:
    """Bytes of segments that this rank sends other hosts in a call."""
    comm.barrier()
    time.sleep(0.1)  # what was sent for it is counted
    before = comm._runtime._proxy.sent_bytes
    call()
    comm.barrier()  # what was written down before it has been sent when it arrives
    time.sleep(0.1)
    return comm._runtime._proxy.sent_bytes - before


def send_messages(comm: epcomm.Communicator) -> list[int]:
    return traffic(comm, lambda call: sent_bytes(comm, call), MESSAGE)


@pytest.mark.parametrize("hosts", [[0, 1], *WORLDS.values()], ids=str)
def test_traffic(hosts: list[int], port: int) -> None:
    check_traffic(hosts, on_hosts(hosts, port, send_messages), MESSAGE, within=0.01)


def test_messages_that_take_one_hop() -> None:
    assert num_shares(64 << 20, 2, 1) == 1  # as many bytes either way
    assert num_shares(64 << 20, 2, 2) == 2 and num_shares(64 << 20, 3, 1) == 3
    assert num_shares(ONE_SHOT, 2, 2) == 1 and num_shares(ONE_SHOT + 1, 2, 2) == 2
    assert num_shares(ONE_SHOT // 4, 5, 1) == 1 and num_shares(ONE_SHOT // 4 + 1, 5, 1) == 5


def test_reduce_scatters_that_go_by_rails() -> None:
    assert is_scattered_by_rails(1 << 20, 3, 1) and is_scattered_by_rails(1 << 20, 4, 2)
    assert not (is_scattered_by_rails(1 << 20, 2, 1) or is_scattered_by_rails(1 << 20, 3, 2))
    assert not is_scattered_by_rails(ONE_SHOT, 8, 1)
