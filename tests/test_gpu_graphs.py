"""Captured calls, replayed: the interpreted target's recordings stand for CUDA graphs.

A replay repeats launches with the numbers of the capture: whatever the host would have to change shows here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_combined, check_rows, on_ranks, round_trip
from failure_cases import raised_by

import epcomm
from epcomm.errors import CapacityError, ConfigError, PeerFailedError
from epcomm.testing.oracle import combined

PADDED = Case("latency", "padded", gate="holes_and_duplicates", hidden=16)


class Layer:
    """Two steps in one capture on static tensors: what is received is doubled by the experts."""

    def __init__(self, ep: Any, case: Case, in_place: bool):
        self.ep, self.case, self.in_place = ep, case, in_place
        self.index = torch.full((case.max_tokens, case.topk), -1)
        self.x = torch.zeros(case.max_tokens, case.hidden, dtype=case.dtype)
        self.weights = torch.zeros(case.max_tokens, case.topk)

    def step(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        received = self.ep.dispatch(x, self.ep.route(self.index))
        rows = received.output_buffer() if self.in_place else received.x
        return received, self.ep.combine(rows, received, self.weights)

    def load(self, step: Step) -> None:
        rank = self.ep.rank
        self.index.copy_(step.exchange.indices[rank])
        self.x.copy_(step.x()[rank])
        self.weights.copy_(step.weights[rank])


def stream_of(ep: Any) -> Any:
    return ep._target.stream


def check_layer(layer: Layer, step: Step, received: Any, out: torch.Tensor) -> None:
    rank = layer.ep.rank
    check_rows(step, rank, received.x, step.x())
    rows = [found.gather(step.x()) for found in step.exchange.rows]
    wanted = combined(step.exchange, rank, rows, step.weights[rank])
    check_combined(f"{step}", out, wanted, step.case.dtype)


def run_replays(comm: epcomm.Communicator, case: Case) -> None:
    """Replays with other data and routing; eager calls on the same handle between them."""
    ep = case.handle(comm)
    layer = Layer(ep, case, in_place=False)
    layer.load(Step(case, comm.size, 0))
    layer.step(layer.x)  # loads and binds
    with stream_of(ep).capture() as graph:
        received, out = layer.step(layer.x)
    for number in range(4):
        step = Step(case, comm.size, number)
        layer.load(step)
        graph.replay()
        check_layer(layer, step, received, out)
        if number % 2:
            round_trip(ep, Step(case, comm.size, number + 50))
            graph.replay()
            check_layer(layer, step, received, out)


@pytest.mark.parametrize("wire", ["expert", "rank"])
@pytest.mark.parametrize("world", [1, 2])
def test_replays(world: int, wire: str) -> None:
    on_ranks(world, run_replays, replace(PADDED, wire=wire), kernels="triton", longest=0)


def run_several_graphs(comm: epcomm.Communicator) -> None:
    """Two graphs and eager results share a handle: results of one graph live until any graph is replayed."""
    case = replace(PADDED, graph_blocks=3)  # the last one's result is copied by torch, which isn't recorded here
    ep = case.handle(comm)
    layers = [Layer(ep, case, in_place=True) for _ in range(2)]
    held = []
    for number, layer in enumerate(layers):
        layer.load(Step(case, comm.size, number))
        _, y = layer.step(layer.x)
        held.append(ep.dispatch(layer.x, ep.route(layer.index)))  # an eager result, alive all the time
    kept = [result.x.clone() for result in held]
    outs, graphs, written = [], [], []  # a CUDA graph keeps the memory that it writes; here the test has to
    for layer in layers:
        with stream_of(ep).capture() as graph:
            received, out = layer.step(layer.x)
            written.append(out)
            del received  # its block is free for the next capture
            outs.append(layer.step(layer.x))
            written.append(outs[-1][1])
        graphs.append(graph)
    assert len(ep._memory.receive.free) < case.blocks  # the eager results hold blocks
    for number in range(3):
        for layer, graph, (received, _) in zip(layers, graphs, outs):
            step = Step(case, comm.size, 10 + number)
            layer.load(step)
            graph.replay()
            check_rows(step, comm.rank, received.x, step.x())
            for result, copy in zip(held, kept):
                for expert, count in enumerate(result.expert_counts_list):
                    assert torch.equal(result.x[expert, :count], copy[expert, :count])


def test_several_graphs() -> None:
    on_ranks(2, run_several_graphs, kernels="triton", longest=0)


def run_refused(comm: epcomm.Communicator) -> None:
    step = Step(PADDED, comm.size, 0)
    x, index = step.x()[comm.rank], step.exchange.indices[comm.rank]
    ep = PADDED.handle(comm)
    with stream_of(ep).capture():
        raised = raised_by(lambda: ep.dispatch(x, ep.route(index)))
    assert type(raised.error) is ConfigError and "before the capture" in raised.text
    comm.reset()
    waits = Case("latency", "flat").handle(comm)
    with stream_of(ep).capture():
        raised = raised_by(waits.route, index)
    assert type(raised.error) is ConfigError and "host_sync=False during a capture" in raised.text
    comm.reset()
    routing = ep.route(index)
    ep.dispatch(x, routing)
    with stream_of(ep).capture():
        raised = raised_by(lambda: ep.dispatch(x, ep.route(index), split=True))  # its second half was never loaded
    assert type(raised.error) is ConfigError and "before the capture" in raised.text
    comm.reset()
    round_trip(ep, step)


def test_what_can_not_be_captured() -> None:
    on_ranks(1, run_refused, kernels="triton", longest=0)


# ---- what the host learns later


def run_late(comm: epcomm.Communicator, how: str) -> None:
    case = Case(gate="one_rank", host_sync=False, max_recv_rows=4 if how == "overflow" else None)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    index = step.exchange.indices[comm.rank].clone()
    if how == "index" and comm.rank == 1:
        index[2, 1] = case.num_experts

    def calls() -> None:
        routing = ep.route(index)  # goes on as if the index were -1, without the rows that don't fit
        comm.check()
        ep.dispatch(step.x()[comm.rank], routing)

    wanted = {"overflow": CapacityError, "index": ConfigError}[how]
    raised = raised_by(calls)
    if how == "overflow":
        assert type(raised.error) in (wanted, PeerFailedError) and "wanted at least" in raised.text, raised
    else:
        assert type(raised.error) is (wanted if comm.rank == 1 else PeerFailedError), raised
        assert "at [2, 1]" in raised.text, raised
    comm.reset()
    small = Case(gate="none", host_sync=False)
    handle = small.handle(comm)
    handle.dispatch(torch.zeros(0, 9, dtype=torch.bfloat16), handle.route(torch.zeros(0, 3, dtype=torch.int64)))


@pytest.mark.parametrize("how", ["overflow", "index"])
def test_reported_by_a_later_call(how: str) -> None:
    on_ranks(2, run_late, how, kernels="triton", longest=0)


def run_both(comm: epcomm.Communicator) -> None:
    """A bad index and too many rows in one replay: what was found first is told, with its own details."""
    case = Case("latency", "contiguous", gate="one_rank", host_sync=False, max_recv_rows=4, hidden=16)
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    index, x = step.exchange.indices[comm.rank].clone().fill_(-1), step.x()[comm.rank]
    ep.dispatch(x, ep.route(index))
    with stream_of(ep).capture() as graph:
        ep.dispatch(x, ep.route(index))
    index.copy_(step.exchange.indices[comm.rank])
    index[2, 1] = case.num_experts
    graph.replay()
    raised = raised_by(comm.check)
    assert type(raised.error) is ConfigError and "at [2, 1]" in raised.text, raised


def test_two_findings_of_one_replay() -> None:
    on_ranks(1, run_both, kernels="triton", longest=0)
