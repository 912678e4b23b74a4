"""Every collective with the GPU target's kernels among ranks of several nodes, by a network late and out of order.

The checks are those of ranks on several hosts, on few cases: the interpreter needs milliseconds for what a kernel does
in microseconds. Chunks are small, so that little data goes through each slot of the rings several times; and messages
that take two hops are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from collective_cases import addend, payload, reduced
from collective_checks import (
    check,
    check_alltoall,
    check_gathers,
    check_reduce_scatter,
    check_reductions,
    check_rooted,
    check_rounding,
    check_traffic,
    traffic,
)
from execution_checks import check_plan
from failure_cases import Raised
from test_gpu_collectives import ALL_REDUCTIONS, exchange_messages, fail_and_recover
from test_gpu_network import WORLDS, on_nodes, tell_late

import epcomm
from epcomm.collectives import selection
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.errors import MismatchError
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol import plans as plan_protocol

CHUNK = 2048
ONE_HOP = CHUNK // 2  # bytes of a message that two nodes reduce in one hop; three nodes: half
MESSAGE = 6 * CHUNK
CHUNKS = 5 * CHUNK + 84  # bytes: more chunks than a ring has slots, and a part of one
PIECES = 5 * CHUNK // 4 + 84  # the same, if a chunk is shared out among four ranks
REDUCED = [
    (torch.bfloat16, "sum", (7, 9)),
    (torch.int8, "avg", (0,)),
    (torch.float32, "prod", (PIECES // 4,)),
    (torch.float16, "max", ()),
    (torch.bfloat16, "avg", (CHUNKS // 2,)),
    (torch.int64, "bxor", (5,)),
    (torch.complex64, "sum", (33,)),
]
MOVED = [
    (torch.float32, (3, 5)),
    (torch.bool, (PIECES,)),
    (torch.bfloat16, (0, 4)),
    (torch.complex128, (1, 2)),
]
#: nodes of one rank and of two, in ranks' order and not; three nodes
ALL_WORLDS = {**WORLDS, "1+1+1": [0, 1, 2], "1+2+1": [0, 1, 1, 2]}


def in_worlds(*names: str) -> pytest.MarkDecorator:
    """In these by default, in all others where slow tests run."""
    slow = pytest.mark.slow
    worlds = [pytest.param(nodes, marks=() if name in names else slow) for name, nodes in ALL_WORLDS.items()]
    return pytest.mark.parametrize("nodes", worlds, ids=ALL_WORLDS)


every_world = in_worlds("1+2", "1+1+1")


def in_small_chunks(comm: epcomm.Communicator, body: Callable[..., Any], *args: Any) -> Any:
    """Interpreted kernels look the size up when they run; the regions were laid out for larger ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "ONE_SHOT_BYTES", ONE_HOP)
        patch.setattr(protocol, "CHUNK_BYTES", CHUNK)
        return body(comm, *args)


def run_reductions(comm: epcomm.Communicator) -> None:
    check_reductions(comm, REDUCED, "auto")
    check_reduce_scatter(comm, REDUCED[:4])


@every_world
def test_reductions(nodes: list[int]) -> None:
    on_nodes(nodes, in_small_chunks, run_reductions)


def run_movement(comm: epcomm.Communicator) -> None:
    """Rings are shared: bytes that all receivers read, through forwarders, and bytes for one, behind one another."""
    check_gathers(comm, MOVED)
    check_alltoall(comm, MOVED)
    check_rooted(comm, MOVED)
    size, rank = comm.size, comm.rank
    for call in range(3):
        splits = [[(source + 2 * to + call) % 4 * 20 for to in range(size)] for source in range(size)]
        rows = [payload(source, (sum(splits[source]), 3), torch.float32, call) for source in range(size)]
        wanted = torch.cat([rows[source].split(splits[source])[rank] for source in range(size)])
        check(comm, ("alltoallv", call), comm.alltoallv(rows[rank], splits[rank]), wanted)
        comm.barrier()


@in_worlds("1+2", "interleaved", "1+1+1")
def test_data_movement(nodes: list[int]) -> None:
    on_nodes(nodes, in_small_chunks, run_movement)


def run_scatters(comm: epcomm.Communicator) -> None:
    """By rails: a few bytes over the limit, and of several chunks; 16-bit sums among 4 ranks of a node."""
    large = [(torch.float32, "avg", (PIECES // 12,)), (torch.bfloat16, "sum", (PIECES // 6 + 1,))]
    check_reduce_scatter(comm, [(torch.uint8, "max", (ONE_HOP // comm.size + 1,)), *large])


def test_reduce_scatter_of_many_ranks_per_node() -> None:
    on_nodes([0, 0, 1, 0, 0], in_small_chunks, run_scatters)


def run_broadcasts(comm: epcomm.Communicator) -> None:
    """From every rank, down a tree and down a chain of nodes; with a rank behind, and others' use of the same rings."""
    size, rank = comm.size, comm.rank
    for call, num_bytes in enumerate([1, CHUNK + 1, 6 * CHUNK * size + 3]):
        for root in range(size):
            if root == (rank + call) % size:
                time.sleep(0.003)
            x, wanted = (payload(source, (num_bytes,), torch.uint8, call) for source in (rank, root))
            check(comm, (num_bytes, root), comm.broadcast(x, root), wanted)
            if root == call:
                check(comm, (num_bytes, root, "in place"), comm.broadcast(x, root, out=x), wanted)
                parts = [payload(source, (99,), torch.uint8, call) for source in range(size)]
                check(comm, ("allgather", num_bytes, root), comm.allgather(parts[rank]), torch.cat(parts))


@every_world
def test_broadcasts(nodes: list[int]) -> None:
    on_nodes(nodes, in_small_chunks, run_broadcasts)


def run_plans(comm: epcomm.Communicator) -> None:
    """With messages of several tiles, and between plans something else that uses the slots."""
    size = comm.size
    for name, kind in (("ring", "allreduce"), ("bruck", "alltoall"), ("pat", "allgather")):
        plan = ALGORITHMS[name].plan(kind, size, channels=2, fifo_depth=2)
        check_plan(comm, plan, kind, 201, torch.float32, in_place=plan.in_place)
        check(comm, kind, comm.allreduce(torch.arange(PIECES // 2)), torch.arange(PIECES // 2) * size)
    check_plan(comm, "double_binary_tree", "broadcast", 33, torch.int64, root=size - 1)
    check_plan(comm, "one_shot", "reduce", 0, torch.float32, "avg", root=1)
    wide = ALGORITHMS["ring"].plan("allreduce", size, fifo_depth=2, wide_sums=True)
    check_plan(comm, wide, "allreduce", 401, torch.bfloat16)


@in_worlds("1+2")
def test_plans(nodes: list[int]) -> None:
    on_nodes(nodes, in_small_slots, run_plans)


def in_small_slots(comm: epcomm.Communicator, body: Callable[..., Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_protocol, "MAX_SLOT_BYTES", 1024)
        return in_small_chunks(comm, body)


def send_messages(comm: epcomm.Communicator) -> list[int]:
    network, sent = comm._runtime._proxy, 0
    put = network.put

    def counted(*words: int) -> None:
        nonlocal sent
        sent += words[-1]
        put(*words)

    def sent_bytes(call: Callable[[], Any]) -> int:
        before = sent
        call()
        return sent - before

    network.put = counted
    return traffic(comm, sent_bytes, MESSAGE)


@pytest.mark.parametrize("name", ["1+1+1", "interleaved"])
def test_traffic(name: str) -> None:
    """Parts and shares of small chunks are rounded up to a larger share of them."""
    nodes = ALL_WORLDS[name]
    check_traffic(nodes, on_nodes(nodes, in_small_chunks, send_messages), MESSAGE, within=0.05)


@in_worlds("1+2", "1+1+1")
def test_rounding(nodes: list[int]) -> None:
    results = on_nodes(nodes, in_small_chunks, check_rounding, nodes, 2_001)
    assert all(result == results[0] for result in results)  # each rank's part had the same inputs


def run_in_channels(comm: epcomm.Communicator) -> None:
    """Three channels for ranks with 1, 2 and 3 programs; some channels have nothing to do."""
    for case, size in enumerate((3, 40, CHUNKS // 4)):
        inputs = [addend(rank, (size,), torch.float32, "sum", case, comm.size) for rank in range(comm.size)]
        check(comm, size, comm.allreduce(inputs[comm.rank]), reduced(inputs, "sum"))
        check(comm, size, comm.allgather(inputs[comm.rank]), torch.cat(inputs))
        check(comm, size, comm.alltoall(torch.cat([inputs[comm.rank]] * comm.size)), torch.cat(inputs))


def test_more_channels_than_programs() -> None:
    on_nodes(WORLDS["1+2"], in_small_chunks, run_in_channels, sm_budget=3)


def test_ranks_without_multiprocessors() -> None:
    """The GPU's copy engines don't reach other nodes: kernels move data there."""
    on_nodes(WORLDS["1+2"], in_small_chunks, check_rooted, MOVED[:1], target={"sm_budget": 0})


def test_whole_chunks() -> None:
    """Of the size that chunks have, two per channel."""

    def body(comm: epcomm.Communicator) -> None:
        for call in range(3):
            inputs = [addend(rank, (140_001 + call,), torch.float32, "sum", call, 2) for rank in range(2)]
            check(comm, call, comm.allreduce(inputs[comm.rank]), reduced(inputs, "sum"))
            check(comm, call, comm.allgather(inputs[comm.rank]), torch.cat(inputs))
            check(comm, call, comm.broadcast(inputs[comm.rank], call % 2), inputs[call % 2])

    on_nodes(WORLDS["1+1"], body)


@pytest.mark.parametrize("nodes", [WORLDS["1+1"], WORLDS["1+2"]], ids=["1+1", "1+2"])
def test_messages(nodes: list[int]) -> None:
    """More pieces than an inbox has slots, too."""
    on_nodes(nodes, exchange_messages)


def check_arithmetic(comm: epcomm.Communicator, cases: Sequence[tuple[torch.dtype, str]]) -> None:
    for case, (dtype, op) in enumerate(cases):
        inputs = [addend(rank, (19 * comm.size,), dtype, op, case, comm.size) for rank in range(comm.size)]
        wanted = reduced(inputs, op)
        check(comm, (dtype, op), comm.allreduce(inputs[comm.rank], op), wanted)
        check(comm, (dtype, op), comm.reduce_scatter(inputs[comm.rank], op), wanted.chunk(comm.size)[comm.rank])


@pytest.mark.slow
def test_every_dtype_and_op() -> None:
    on_nodes(WORLDS["1+2"], check_arithmetic, ALL_REDUCTIONS)


# ---- what goes wrong


def run_mismatches(comm: epcomm.Communicator) -> list[Raised]:
    tell_late(comm)
    return fail_and_recover(comm)


@pytest.mark.parametrize("nodes", [WORLDS["1+1"], WORLDS["1+2"]], ids=["1+1", "1+2"])
def test_mismatched_calls(nodes: list[int]) -> None:
    """Those, too, whose words are those of the other call: what a peer calls may come later, and is awaited."""
    texts = [("allreduce(", "barrier()"), ("op=sum", "op=max"), ("allgather(", "broadcast(")]
    by_call = zip(*on_nodes(nodes, run_mismatches), strict=True)
    for raised, wanted in zip(by_call, texts, strict=True):
        assert [type(each.error) for each in raised] == [MismatchError] * len(nodes), raised
        assert all(text in each.text for text in wanted for each in raised), raised
