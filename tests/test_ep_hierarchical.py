"""Dispatch and combine by way of carriers, on one machine with nodes set by hand, against the same definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_raised, on_ranks
from failure_cases import raised_by
from test_ep_autograd import Gradients, experts, grad_of, scales

import epcomm
from epcomm.errors import ConfigError, MismatchError, PeerFailedError
from epcomm.testing.oracle import Exchange

CASE = Case(hidden=12, gate="holes_and_duplicates", tokens="uneven", alignment=4, dtype=torch.float32)
NODES = {2: [(0, 0), (0, 1)], 3: [(0, 0, 1), (5, 2, 5)], 4: [(0, 0, 1, 1), (0, 1, 0, 1)], 5: [(0, 0, 1, 1, 2)]}
LAYOUTS = ("contiguous", "padded", "flat")


def handle(comm: epcomm.Communicator, case: Case, nodes: Any) -> Any:
    options = {name: getattr(case, name) for name in ("num_experts", "topk", "hidden", "max_tokens", "dtype", "layout")}
    alignment = case.alignment if case.layout == "contiguous" else 1
    return comm.expert_parallel(**options, placement=case.placement, alignment=alignment, nodes=nodes)


def wanted_rows(exchange: Exchange, rank: int) -> list[tuple[int, ...]]:
    """(expert, source rank, token) of each row of a rank; flat: (source rank, token) and the local experts in slots."""
    rows = exchange.rows[rank]
    real = rows.is_real
    origin = torch.stack([rows.source_rank[real], rows.source_token[real]], dim=-1).tolist()
    if exchange.layout == "flat":
        return sorted((*pair, *slots) for pair, slots in zip(origin, rows.topk_idx.tolist()))
    return sorted((expert, *pair) for expert, pair in zip(rows.expert[real].tolist(), origin))


def found_rows(ep: Any, received: Any) -> list[tuple[int, ...]]:
    real = received.is_real
    origin = torch.stack([received.source_rank[real], received.source_token[real]], dim=-1).tolist()
    if ep.config.layout == "flat":
        return sorted((*pair, *slots) for pair, slots in zip(origin, received.topk_idx.tolist()))
    if ep.config.layout == "padded":
        local = torch.arange(len(real))[:, None].expand(real.shape)[real]
    else:
        local = received.topk_idx[real]
    return sorted((ep.local_expert_ids[number], *pair) for number, pair in zip(local.tolist(), origin))


def check_step(ep: Any, step: Step, nodes: Any) -> None:
    rank, exchange, x, case = ep.rank, step.exchange, step.x(), step.case
    index = exchange.indices[rank]
    routing = ep.route(index)
    owner = torch.tensor(exchange.owner)
    named = torch.tensor(nodes)[owner[index.clamp(min=0).long()]].masked_fill(index < 0, -9)
    crossing = [int((named == node).any(dim=1).sum()) for node in set(nodes)]
    assert sorted(routing.send_counts[routing.send_counts > 0].tolist()) == sorted(n for n in crossing if n)
    received = ep.dispatch(x[rank], routing, step.weights[rank])
    assert found_rows(ep, received) == wanted_rows(exchange, rank)
    real = received.is_real
    for row, source, token in zip(received.x[real], received.source_rank[real], received.source_token[real]):
        assert torch.equal(row, x[source][token])
    if case.layout == "contiguous":
        assert received.x[~real].eq(0).all()
        assert received.expert_counts_list == exchange.rows[rank].expert_counts.tolist()
        assert received.expert_offsets.tolist() == exchange.rows[rank].expert_offsets.tolist()
    own = scales(case.num_experts, case.hidden)[ep.local_expert_ids].to(case.dtype)
    wanted = Gradients(step, "dispatch" if case.layout == "flat" else "combine").out[rank]
    plain = received if case.layout == "flat" else ep.dispatch(x[rank], routing)
    y = experts(plain, own)
    if step.number % 2:
        y = plain.output_buffer().copy_(y)
    out = ep.combine(y, plain, None if case.layout == "flat" else step.weights[rank])
    assert torch.equal(out.double(), wanted)
    bias = torch.full_like(out, 3.0)
    weights = None if case.layout == "flat" else step.weights[rank]
    assert torch.equal(ep.combine(y, routing, weights, bias=bias), out + 3)


def run_steps(comm: epcomm.Communicator, nodes: Any, cases: list[Case]) -> None:
    for case in cases:
        ep = handle(comm, case, nodes)
        for number in range(3):
            check_step(ep, Step(case, comm.size, number), nodes)
        ep.close()


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_traffic(world: int) -> None:
    cases = [replace(CASE, layout=layout) for layout in LAYOUTS]
    cases += [replace(CASE, num_experts=7, topk=5, gate="zipf", index_dtype=torch.int32, max_tokens=11)]
    cases += [Case(hidden=1, dtype=torch.float32, gate="none"), replace(CASE, placement=(0, 0, 1, 1, 0, 1))]
    for nodes in NODES[world]:
        on_ranks(world, run_steps, nodes, cases if world < 5 else cases[:3], longest=0.0005)


def test_traffic_on_the_gpu_target() -> None:
    on_ranks(2, run_steps, (0, 1), [replace(CASE, gate="holes")], kernels="mixed", longest=0)


def run_gradients(comm: epcomm.Communicator, nodes: Any, case: Case) -> None:
    ep, rank = handle(comm, case, nodes), comm.rank
    is_flat = case.layout == "flat"
    for number in range(3):
        step = Step(case, comm.size, number)
        wanted = Gradients(step, "dispatch" if is_flat else "combine")
        x, weights = step.x()[rank].requires_grad_(), step.weights[rank].clone().requires_grad_()
        own = scales(case.num_experts, case.hidden)[ep.local_expert_ids].requires_grad_()
        routing = ep.route(step.exchange.indices[rank], requires_grad=rank == 0)
        received = ep.dispatch(x, routing, weights if is_flat else None)
        out = ep.combine(experts(received, own), received, None if is_flat else weights)
        (out * grad_of(step, rank, out.shape).float()).sum().backward()
        assert torch.equal(x.grad.double(), wanted.x[rank].grad)
        real = step.exchange.indices[rank] >= 0
        assert torch.equal(weights.grad.double(), torch.where(real, wanted.weights[rank].grad, 0))
        if own.numel():
            assert torch.equal(own.grad.double(), wanted.scale.grad[ep.local_expert_ids])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: str) -> None:
    on_ranks(4, run_gradients, (0, 1, 0, 1), replace(CASE, layout=layout), longest=0)


def run_quantized(comm: epcomm.Communicator) -> None:
    """What is quantised once at the source arrives everywhere as it was then."""
    case, nodes, quantize = replace(CASE, dtype=torch.bfloat16, hidden=200), (0, 0, 1), epcomm.Float8()
    ep = handle(comm, case, nodes)
    for number in range(3):
        step = Step(case, comm.size, number)
        x = step.x()
        received = ep.dispatch(x[comm.rank], ep.route(step.exchange.indices[comm.rank]), quantize=quantize)
        wanted = [quantize.quantized(tokens) for tokens in x]
        real = received.is_real
        for i, got in enumerate(received.x):
            for row, source, token in zip(got[real], received.source_rank[real], received.source_token[real]):
                assert torch.equal(row.view(torch.uint8), wanted[source][i][token].view(torch.uint8))
        y = received.output_buffer()
        assert y.dtype == torch.bfloat16 and y.shape == received.x[0].shape


def test_quantized() -> None:
    on_ranks(3, run_quantized, longest=0)


BAD = [
    ({"nodes": [0]}, "nodes"),
    ({"nodes": 3}, "nodes"),
    ({"nodes": [0, "a"]}, "nodes"),
    ({"mode": "latency"}, "mode"),
    ({"host_sync": False}, "host_sync"),
    ({"overflow": "drop"}, "overflow"),
    ({"track_load": True}, "track_load"),
    ({"placement": epcomm.Placement(((0, 1, 2), (2, 3)))}, "placement"),
]


def run_bad(comm: epcomm.Communicator) -> None:
    sizes = dict(num_experts=4, topk=2, hidden=8, max_tokens=4)
    for options, name in BAD:
        raised = raised_by(lambda options=options: comm.expert_parallel(**{**sizes, "nodes": [0, 1], **options}))
        assert type(raised.error) is ConfigError and f"argument `{name}`: wanted" in raised.text, raised
        comm.reset()
    ep = comm.expert_parallel(**sizes, nodes=[0, 1])
    index = torch.tensor([[0, 3], [1, 4 if comm.rank else 2]])
    raised = raised_by(ep.route, index)
    assert type(raised.error) is (ConfigError if comm.rank else PeerFailedError) and "got 4 at [1, 1]" in raised.text
    comm.reset()
    received = ep.dispatch(torch.ones(2, 8, dtype=torch.bfloat16), ep.route(index.clamp(max=3)))
    assert ep.combine(received.x, received).eq(2).all()
    assert sum(ep.memory().values()) > 0


def test_bad_arguments() -> None:
    on_ranks(2, run_bad, longest=0)


def run_other_nodes(comm: epcomm.Communicator) -> None:
    nodes = [0, 0, 1, 1] if comm.rank < 2 else [0, 1, 0, 1]
    raised = raised_by(handle, comm, CASE, nodes)
    assert type(raised.error) is MismatchError and "nodes=" in raised.text
    comm.reset()


def test_ranks_with_other_nodes() -> None:
    on_ranks(4, run_other_nodes, longest=0)


def run_columns_and_weights(comm: epcomm.Communicator) -> None:
    """Scales come as they were asked for, and weights that don't fit are refused by name."""
    case = replace(CASE, dtype=torch.bfloat16, hidden=300, tokens="full")
    ep, step = handle(comm, case, (0, 1)), Step(case, comm.size, 0)
    quantize = epcomm.Float8(scale_layout="column")
    routing = ep.route(step.exchange.indices[comm.rank])
    scales = ep.dispatch(step.x()[comm.rank], routing, quantize=quantize).x[1]
    assert scales.stride(0) == 1 and scales.stride(1) % 4 == 0
    for weights in (3, torch.ones(2, 2)):
        routing = ep.route(step.exchange.indices[comm.rank])
        if comm.rank == 1:
            check_raised(comm, lambda w=weights, r=routing: ep.dispatch(step.x()[1], r, w), ConfigError, "topk_weights")
        else:
            check_raised(comm, comm.barrier, ConfigError, "topk_weights")


def test_columns_and_weights() -> None:
    on_ranks(2, run_columns_and_weights, longest=0)
