"""The GPU target's kernels among ranks of several nodes, interpreted, by a network that is late and out of order."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ep_cases import KINDS, Case, Step, in_all_kinds, require, run_cases

import epcomm
from epcomm.device.gpu.remote import RemoteNetwork
from epcomm.errors import UnsupportedError
from epcomm.heap.cpu import Mapping, create_memory_file
from epcomm.moe.quantize import Float8
from epcomm.testing.adversary import delay_operations
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.oracle import combined
from epcomm.testing.ranks import run_ranks

WORLDS = {"1+1": [0, 1], "2+2": [0, 0, 1, 1], "interleaved": [0, 1, 0, 1]}
CASES = [
    Case(gate="holes_and_duplicates", tokens="uneven"),
    Case(hidden=16, tokens="none_on_even_ranks", gate="zipf", index_dtype=torch.int32, dtype=torch.float32),
]


def on_nodes(nodes: Sequence[int], body: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``body(communicator, *args)`` returns on ranks that reach those of their own node by load and store only."""

    def run() -> Any:
        with kernels_of("triton", network="remote", nodes=nodes), epcomm.init(timeout=30.0) as comm:
            delay_operations(comm, seed=comm.size, longest=0.0005)
            return body(comm, *args)

    return run_ranks(run, len(nodes), timeout=100.0)


@pytest.mark.parametrize("nodes", WORLDS.values(), ids=WORLDS)
def test_traffic(nodes: list[int]) -> None:
    """Few cases: the interpreter needs milliseconds for what a kernel does in microseconds."""
    chosen = list(in_all_kinds(CASES[:1]))
    on_nodes(nodes, run_cases, chosen + CASES[1:] if len(nodes) == 2 else chosen[int(nodes[1]) :: 3])


def run_options(comm: epcomm.Communicator, cases: Sequence[Case]) -> None:
    """Unreduced, quantised both ways, split, and of several tensors."""
    for case in cases:
        ep = case.handle(comm)
        for number in range(2):
            step = Step(case, comm.size, number)
            routing = ep.route(step.exchange.indices[comm.rank])
            x, y = step.x()[comm.rank], step.y()[comm.rank]
            received = ep.dispatch(x, routing, split=True).finish()
            again = ep.dispatch((x[:, :64], step.weights[comm.rank].double()), routing)
            defined = step.exchange.rows[comm.rank].is_real if case.layout == "padded" else slice(None)
            require(step, again.x[0][defined], received.x[defined][..., :64])
            halves = ep.combine(y, received, split=True).finish()
            require(step, halves, combined(step.exchange, comm.rank, step.y(), None).exact.to(case.dtype))
            if case.layout != "flat":
                slots = ep.combine(y, received, reduce=False)
                require(step, slots.sum(1), halves)
            codes, _ = ep.dispatch(x, routing, quantize=Float8()).x
            wanted, _ = Float8().quantized(received.x.contiguous().view(-1, case.hidden))
            real = defined.reshape(-1) if case.layout == "padded" else defined
            require(step, codes.reshape(-1, case.hidden)[real].float(), wanted[real].float())
        ep.close()


def test_options() -> None:
    case = Case(hidden=128, num_experts=5, max_tokens=5, tokens="uneven", dtype=torch.float32)
    on_nodes(WORLDS["1+1"], run_options, [replace(case, mode=mode, layout=layout) for mode, layout in KINDS[::2]])
    on_nodes(WORLDS["1+1"], run_options, [replace(case, wire="rank")])


def run_collectives(comm: epcomm.Communicator) -> None:
    for _ in range(20):
        comm.barrier()
    with pytest.raises(UnsupportedError, match="reach each other by load and store"):
        comm.allreduce(torch.ones(1))


def test_collectives_other_than_the_barrier_are_refused() -> None:
    on_nodes(WORLDS["interleaved"], run_collectives)


# ---- the network itself


class Parts:
    """This rank's view of a segment of two."""

    def __init__(self) -> None:
        self.own, peer = memory(1 << 16), memory(1 << 16)
        self.mappings, self.bases = [self.own, peer], np.array([self.own.address, peer.address])
        self.network = (0, 0, 0)


def memory(num_bytes: int) -> Mapping:
    descriptor = create_memory_file(num_bytes)
    try:
        return Mapping(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def arrivals(send: Callable[[RemoteNetwork, int], None], watched: Sequence[int]) -> list[tuple[int, ...]]:
    """The states, in order, of these words of the peer's part while `send` is done for 1 to 20."""
    parts, network = Parts(), RemoteNetwork(0, [0, 1], longest_delay=0.02)
    network.add(parts)
    assert parts.bases.tolist() == [parts.own.address, 0]
    words = parts.mappings[1].array(0, 1 << 16).view(np.int64)
    parts.own.array(0, 8 * 64).view(np.int64)[:] = np.arange(64)
    for number in range(1, 21):
        send(network, number)
    states = [tuple(words[list(watched)].tolist())]
    while network._delivered < network._count:
        states.append(tuple(words[list(watched)].tolist()))
    network.settle(1, 1.0)
    network.close()
    states.append(tuple(words[list(watched)].tolist()))
    return list(dict.fromkeys(states))


def test_network_is_late_and_out_of_order() -> None:
    places = [100 + number for number in range(1, 21)]
    states = arrivals(lambda network, number: network.raise_word(0, 1, 8 * (100 + number), number), places)
    assert not any(states[0]) and states[-1] == tuple(range(1, 21))
    assert any(0 in state[: state.index(max(state))] for state in states)  # a later one came before an earlier one


def test_network_keeps_the_order_of_one_word() -> None:
    states = arrivals(lambda network, number: network.raise_word(0, 1, 800, number), [100])
    assert states == sorted(states) and states[-1] == (20,)


@pytest.mark.parametrize("order, is_right", [("put quiet raise", True), ("raise put quiet", False), ("put raise", False)])
def test_network_tells_orders_apart(order: str, is_right: bool) -> None:
    """A kernel that raises before it puts, or without a `quiet` in between, is seen to: words run ahead of rows."""

    def send(network: RemoteNetwork, number: int) -> None:
        for step in order.split():
            if step == "put":
                network.put(0, 1, 8 * (200 + number), 8 * number, 8)
            elif step == "raise":
                network.raise_word(0, 1, 8 * (100 + number), number)
            else:
                network.quiet()

    numbers = range(1, 21)
    states = arrivals(send, [100 + number for number in numbers] + [200 + number for number in numbers])
    runs_ahead = any(word and not row for state in states for word, row in zip(state[:20], state[20:], strict=True))
    assert runs_ahead is not is_right
