"""Expert parallelism among ranks on several hosts: the cases of one host, where rows for other nodes travel packed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import KINDS, Case, Step, dispatched, in_all_kinds, require, round_trip, run_cases
from host_cases import EVERY_WORLD, WORLDS, on_hosts
from test_expert_parallel import placement_cases, shape_cases, traffic_cases

import epcomm
from epcomm.moe.quantize import Float8
from epcomm.testing.adversary import delay_operations
from epcomm.testing.oracle import combined


def run(comm: epcomm.Communicator, cases: list[Case]) -> None:
    delay_operations(comm, seed=comm.size, longest=0.0005)
    run_cases(comm, cases)


@EVERY_WORLD
def test_traffic(hosts: list[int], port: int) -> None:
    cases = list(in_all_kinds(traffic_cases()[:: 1 if len(hosts) == 2 else 3]))
    on_hosts(hosts, port, run, cases)


@pytest.mark.parametrize("hosts", [WORLDS["1+2"], WORLDS["interleaved"]], ids=str)
def test_shapes_and_placements(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, run, list(in_all_kinds(shape_cases()[::2] + placement_cases(len(hosts)))))


def run_options(comm: epcomm.Communicator) -> None:
    """Unreduced, quantised, split, biased, of several tensors, and dropped rows."""
    for mode, layout in KINDS:
        case = Case(mode, layout, hidden=128, num_experts=5, max_tokens=9, tokens="uneven")
        ep = replace(case, hidden=256).handle(comm)
        for number in range(3):
            step = Step(case, comm.size, number)
            routing = ep.route(step.exchange.indices[comm.rank])
            x, y = step.x(), step.y()[comm.rank]
            split = ep.dispatch(x[comm.rank], routing, split=True)
            received = split.finish()
            again = ep.dispatch((x[comm.rank], step.weights[comm.rank].double()), routing)
            defined = step.exchange.rows[comm.rank].is_real if layout == "padded" else slice(None)
            require(step, again.x[0][defined], received.x[defined])
            bias = torch.ones(len(x[comm.rank]), case.hidden, dtype=case.dtype)
            plain = ep.combine(y, received, bias=torch.zeros_like(bias))
            require(step, plain, combined(step.exchange, comm.rank, step.y(), None).exact.to(case.dtype))
            halves = ep.combine(y, received, split=True).finish()
            require(step, halves, plain)
            if layout != "flat":
                slots = ep.combine(y.float(), received, reduce=False)
                require(step, slots.sum(1).to(case.dtype), plain)
            codes, scales = ep.dispatch(x[comm.rank], routing, quantize=Float8()).x
            wanted, wanted_scales = Float8().quantized(received.x.contiguous().view(-1, case.hidden))
            real = defined.reshape(-1) if layout == "padded" else defined
            require(step, codes.reshape(-1, case.hidden)[real].float(), wanted[real].float())
        ep.close()


@pytest.mark.parametrize("hosts", [WORLDS["1+1"], WORLDS["interleaved"]], ids=str)
def test_options(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, run_options)


def run_dropping(comm: epcomm.Communicator, cases: list[Case]) -> None:
    """What is dropped is the same as on one host: a result is what the kept rows give."""
    for case in cases:
        ep = case.handle(comm)
        for number in range(3):
            step = Step(case, comm.size, number)
            x = step.x()[comm.rank]
            received = ep.dispatch(x, ep.route(step.exchange.indices[comm.rank]))
            kept = min(len(received.x), case.max_recv_rows or 0)
            assert len(received.x) == kept == len(step.exchange.rows[comm.rank].gather(step.x())[:kept])
            out = ep.combine(torch.ones_like(received.x), received)
            sent = comm.allreduce(torch.tensor(int(out[:, 0].sum().item())))
            total = comm.allreduce(torch.tensor(int((received.source_token >= 0).sum())))
            assert sent == total
        ep.close()


@pytest.mark.parametrize("layout, wire", [("contiguous", "expert"), ("contiguous", "rank"), ("flat", "rank")])
def test_dropped_rows(layout: str, wire: str, port: int) -> None:
    case = Case(layout=layout, wire=wire, max_recv_rows=5, overflow="drop", dtype=torch.float32)
    on_hosts(WORLDS["interleaved"], port, run_dropping, [case, replace(case, gate="one_rank")])


def run_after_reset(comm: epcomm.Communicator, case: Case) -> None:
    """A failure in the middle of traffic, then the same handle in the next generation."""
    ep = case.handle(comm)
    for _ in range(3):
        error: Any = None
        try:
            for number in range(3):
                round_trip(ep, Step(case, comm.size, number))
            if comm.rank == comm.size - 1:  # its failure may overtake the last words of its last step
                comm.abort("on purpose")
            dispatched(ep, Step(case, comm.size, 0))
        except epcomm.errors.EpcommError as raised:
            error = raised
        assert "on purpose" in str(error)
        comm.reset()
    ep.close()


@EVERY_WORLD
def test_reset(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, run_after_reset, Case(max_tokens=64, hidden=512))


@pytest.mark.parametrize("hosts", [WORLDS["1+2"], WORLDS["2+2"]], ids=str)
def test_two_handles_and_collectives(hosts: list[int], port: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        cases = Case(), Case("latency", "padded", hidden=40)
        handles = [case.handle(comm) for case in cases]
        for number in range(6):
            for ep, case in zip(handles, cases):
                round_trip(ep, Step(case, comm.size, number))
            assert comm.allreduce(torch.tensor([comm.rank + 1])).item() == comm.size * (comm.size + 1) // 2

    on_hosts(hosts, port, body)


def run_by_node(comm: epcomm.Communicator) -> None:
    """A row once per (token, node): sums of small integers, each token's as often as it has experts."""
    ep = comm.expert_parallel(num_experts=6, topk=3, hidden=40, max_tokens=7, dtype=torch.float32, nodes=comm.nodes)
    for number in range(3):
        step = Step(Case(hidden=40, dtype=torch.float32, tokens="uneven"), comm.size, number)
        x, index = step.x()[comm.rank], step.exchange.indices[comm.rank]
        received = ep.dispatch(x, ep.route(index))
        out = ep.combine(received.x, received)
        require(step, out, x * (index >= 0).sum(1, keepdim=True))
    ep.close()


@EVERY_WORLD
def test_by_node(hosts: list[int], port: int) -> None:
    on_hosts(hosts, port, run_by_node)
