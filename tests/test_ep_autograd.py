"""Gradients of dispatch and combine against those of the dense computation in float64, which every rank does alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_raised, in_all_kinds, on_ranks
from failure_cases import raised_by

import epcomm
from epcomm.errors import ConfigError, PeerFailedError
from epcomm.testing.routing import payload

CASE = Case(hidden=6, gate="holes_and_duplicates", tokens="uneven", alignment=4, dtype=torch.float32)


def scales(num_experts: int, hidden: int) -> torch.Tensor:
    """What each expert multiplies its rows by: different ones for each column, small whole numbers."""
    return torch.arange(1.0, num_experts * hidden + 1).reshape(num_experts, hidden) % 7 + 1


def experts(received: Any, own: torch.Tensor) -> torch.Tensor:
    """Each row times its local expert's scales; nothing is done to what is no row."""
    x = received.x
    if x.dim() == 3:
        return torch.where(received.is_real[..., None], x * own[:, None], 0)
    if received.topk_idx.dim() == 2:  # flat: of all experts that the token has here, weighted
        factors = torch.cat([own, own.new_zeros(1, own.shape[1])])[received.topk_idx.long()]
        weights = 1 if received.topk_weights is None else received.topk_weights[..., None]
        return x * (factors * weights).sum(dim=1)
    factors = torch.cat([own, own.new_zeros(1, own.shape[1])])[received.topk_idx.long()]
    weights = 1 if received.topk_weights is None else received.topk_weights[:, None]
    return torch.where(received.is_real[:, None], x * factors * weights, 0)


def dense(index: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the layer computes for a rank's tokens."""
    slots = torch.where(index[..., None] >= 0, scale[index.clamp(min=0).long()], 0)
    return x * (slots * weights[..., None]).sum(dim=1)


def once(index: torch.Tensor) -> torch.Tensor:
    """Weights of a plain sum: an expert that a token names again is no other row."""
    is_again = (index[:, :, None] == index[:, None, :]).tril(-1).any(dim=2)
    return (~is_again).float()


class Gradients:
    """Of a step: what autograd finds in the dense computation of all ranks."""

    def __init__(self, step: Step, use: str):
        self.scale = scales(step.case.num_experts, step.case.hidden).double().requires_grad_()
        self.x = [x.double().requires_grad_() for x in step.x()]
        weights = step.weights
        if use == "none":  # in flat layout it is the caller who sums, here over all slots
            is_flat = step.case.layout == "flat"
            weights = [torch.ones(index.shape) if is_flat else once(index) for index in step.exchange.indices]
        self.weights = [weight.double().requires_grad_() for weight in weights]
        self.out = []
        for rank, index in enumerate(step.exchange.indices):
            out = dense(index, self.x[rank], self.weights[rank], self.scale)
            (out * grad_of(step, rank, out.shape)).sum().backward()
            self.out.append(out.detach())


def grad_of(step: Step, rank: int, shape: Any) -> torch.Tensor:
    """The gradient of a rank's result."""
    return payload(shape, torch.float64, step.number, rank, 7)


def check_step(ep: Any, step: Step, use: str, agreed: bool) -> None:
    """`use`: weights are delivered ("dispatch"), applied ("combine") or there are "none"."""
    rank, case = ep.rank, step.case
    wanted = Gradients(step, use)
    x = step.x()[rank].clone().requires_grad_()
    weights = step.weights[rank].clone().requires_grad_() if use != "none" else None
    own = scales(case.num_experts, case.hidden)[ep.local_expert_ids].to(case.dtype).requires_grad_()
    routing = ep.route(step.exchange.indices[rank], requires_grad=agreed and rank == 0)
    assert routing.requires_grad == (agreed and (ep.config.mode == "throughput" or rank == 0))
    received = ep.dispatch(x, routing, weights if use == "dispatch" else None)
    if use == "dispatch" and received.ep.config.layout == "padded":
        return  # there the caller doesn't get them
    y = experts(received, own)
    y.retain_grad()
    out = ep.combine(y, received, weights if use == "combine" else None)
    assert torch.equal(out.double(), wanted.out[rank]), f"{step}: out"
    (out.double() * grad_of(step, rank, out.shape)).sum().backward()
    assert torch.equal(x.grad.double(), wanted.x[rank].grad), f"{step}: x\n{x.grad}\n{wanted.x[rank].grad}"
    assert y.grad[~received.is_real].eq(0).all(), f"{step}: padding"
    if own.numel():
        assert torch.equal(own.grad.double(), wanted.scale.grad[ep.local_expert_ids]), f"{step}: experts"
    if weights is not None:
        assert weights.grad.dtype == torch.float32
        real = step.exchange.indices[rank] >= 0
        assert torch.equal(weights.grad.double(), torch.where(real, wanted.weights[rank].grad, 0)), f"{step}: weights"


def uses(case: Case) -> list[str]:
    if case.layout == "flat":
        return ["none", "dispatch"]
    return ["none", "combine"] if case.layout == "padded" else ["none", "dispatch", "combine"]


def run_steps(comm: epcomm.Communicator, cases: list[Case]) -> None:
    for case in cases:
        ep = case.handle(comm)
        for number, use in enumerate(uses(case) * 2):
            check_step(ep, Step(case, comm.size, number), use, agreed=number % 2 == 1)
        ep.close()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gradients(world: int) -> None:
    cases = [CASE, replace(CASE, gate="none"), replace(CASE, dtype=torch.float64, tokens="none_on_even_ranks")]
    on_ranks(world, run_steps, list(in_all_kinds(cases if world < 4 else cases[:1])), longest=0)


def test_gradients_without_host_sync() -> None:
    cases = [case for case in in_all_kinds([replace(CASE, host_sync=False)]) if case.layout != "padded"]
    on_ranks(2, run_steps, cases, longest=0)


def test_gradients_on_the_gpu_target() -> None:
    cases = [Case(hidden=6, dtype=torch.float32, gate="holes_and_duplicates"), replace(CASE, layout="flat")]
    on_ranks(2, run_steps, cases, kernels="mixed", longest=0)


# ---- ranks whose tensors ask for different things


def run_frozen(comm: epcomm.Communicator) -> None:
    """Frozen tokens on one rank, experts that never touch their (no) rows on another; all have a backward pass."""
    case = Case(dtype=torch.float32, gate="one_rank", num_experts=6)
    ep = case.handle(comm)
    for number in range(3):
        step = Step(case, comm.size, number)
        wanted = Gradients(step, "combine")
        x = step.x()[comm.rank].clone().requires_grad_(comm.rank != 0)
        weights = step.weights[comm.rank].clone().requires_grad_(comm.rank == 2)
        own = scales(6, case.hidden)[ep.local_expert_ids].requires_grad_()
        received = ep.dispatch(x, ep.route(step.exchange.indices[comm.rank], requires_grad=comm.rank == 1))
        if len(received.x):
            y = experts(received, own)
        else:
            y = torch.zeros(0, case.hidden)  # the graph is cut here
        out = ep.combine(y, received, weights)
        assert out.requires_grad
        (out * grad_of(step, comm.rank, out.shape).float()).sum().backward()
        if comm.rank != 0:
            assert torch.equal(x.grad.double(), wanted.x[comm.rank].grad)
        if comm.rank == 2:
            assert torch.equal(weights.grad.double(), wanted.weights[comm.rank].grad.masked_fill(
                step.exchange.indices[comm.rank] < 0, 0))  # fmt: skip
        if len(received.x):
            assert torch.equal(own.grad.double(), wanted.scale.grad[ep.local_expert_ids])
        comm.barrier()


def test_ranks_that_need_different_gradients() -> None:
    on_ranks(3, run_frozen)


def run_tuples(comm: epcomm.Communicator) -> None:
    """Tensors of several dtypes along one routing: gradients go to those that can have them; biases, too."""
    case = Case(dtype=torch.float64, hidden=8, gate="holes")
    ep, rank = case.handle(comm), comm.rank
    for number in range(3):
        step = Step(case, comm.size, number)
        wide, narrow = step.x(torch.float32, 5)[rank].requires_grad_(), step.x(torch.bfloat16, 3)[rank].requires_grad_()
        ids = torch.arange(len(wide), dtype=torch.int32)[:, None] + 1000 * rank
        received = ep.dispatch((wide, ids, narrow), ep.route(step.exchange.indices[rank]))
        rows, row_ids, small = received.x
        assert rows.requires_grad and small.requires_grad and not row_ids.requires_grad
        tokens = received.source_token + 1000 * received.source_rank
        assert torch.equal(row_ids[:, 0], tokens)
        bias = payload((len(wide), 5), torch.float32, 3).requires_grad_()
        out, other = ep.combine((2 * rows, small), received, bias=(bias, torch.zeros_like(narrow)))
        gradient, other_gradient = (payload(each.shape, each.dtype, number) for each in (out, other))
        torch.autograd.backward([out, other], [gradient, other_gradient])
        index = step.exchange.indices[rank]
        times = torch.tensor([len(set(token.tolist()) - {-1}) for token in index]).reshape(-1, 1)
        assert torch.equal(wide.grad, 2 * times * gradient) and torch.equal(bias.grad, gradient)
        assert torch.equal(narrow.grad, (times * other_gradient).to(torch.bfloat16))


def test_several_tensors() -> None:
    on_ranks(2, run_tuples, longest=0)


def run_gradcheck(comm: epcomm.Communicator, case: Case) -> None:
    """Numerical derivatives in float64; weights act in float32, in which these steps are exact."""
    ep, rank = case.handle(comm), comm.rank
    step = Step(case, 1, 0)
    index = step.exchange.indices[rank]
    own = scales(case.num_experts, case.hidden).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 8, (len(index), case.hidden), generator=generator).double().requires_grad_()
    weights = (torch.randint(1, 8, index.shape, generator=generator) / 8).double().requires_grad_()

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        received = ep.dispatch(x, ep.route(index), weights if case.layout == "flat" else None)
        return ep.combine(experts(received, own), received, None if case.layout == "flat" else weights)

    assert torch.autograd.gradcheck(layer, (x, weights), eps=2.0**-10, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "flat"])
def test_gradcheck(layout: str) -> None:
    case = Case(layout=layout, dtype=torch.float64, hidden=3, max_tokens=4, gate="holes_and_duplicates")
    on_ranks(1, run_gradcheck, case, longest=0)


def run_refused(comm: epcomm.Communicator) -> None:
    """What has no gradient is refused where one is needed, and works without."""
    case = replace(CASE, tokens="full")
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    x, y = step.x()[comm.rank].requires_grad_(), step.y()[comm.rank].nan_to_num().requires_grad_()
    routing = ep.route(step.exchange.indices[comm.rank])
    out = torch.zeros_like(x).detach()
    calls = [
        (lambda: ep.dispatch(x, routing, split=True), "split"),
        (lambda: ep.dispatch(x, routing, async_op=True), "async_op"),
        (lambda: ep.dispatch(x, routing, quantize=epcomm.Float8()), "quantize"),
        (lambda: ep.combine(y, routing, out=out), "out"),
        (lambda: ep.combine(y, routing, reduce=False), "reduce"),
    ]
    for call, name in calls:
        routing = ep.route(step.exchange.indices[comm.rank])
        if comm.rank == 1:
            check_raised(comm, call, ConfigError, f"argument `{name}`", "gradients are needed")
        else:
            check_raised(comm, comm.barrier, ConfigError, f"argument `{name}`")
    routing = ep.route(step.exchange.indices[comm.rank])
    with torch.no_grad():
        ep.dispatch(x, routing, split=True).finish()
        assert ep.combine(y, routing, out=out) is out
    raised = raised_by(lambda: ep.dispatch(x, None))
    assert type(raised.error) is ConfigError
    comm.reset()


def test_refusals() -> None:
    on_ranks(2, run_refused, longest=0)


def run_many_layers(comm: epcomm.Communicator) -> None:
    """More results alive than there are blocks, all of them part of one graph."""
    case = Case(dtype=torch.float32, blocks=2, gate="uniform")
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    index = step.exchange.indices[comm.rank]
    for _ in range(3):
        x = step.x()[comm.rank].clone().requires_grad_()
        values = x
        for _ in range(5):
            received = ep.dispatch(values, ep.route(index))
            values = ep.combine(received.x, received, torch.full(index.shape, 1 / 4))
        values.sum().backward()
        assert torch.equal(values, x * 0.75**5) and torch.equal(x.grad, torch.full_like(x, 0.75**5))


def test_many_layers() -> None:
    on_ranks(2, run_many_layers, longest=0)


def run_details(comm: epcomm.Communicator) -> None:
    """What is received may be changed in place; a bias per tensor of y and no other."""
    case = Case(dtype=torch.float32)
    ep, step, rank = case.handle(comm), Step(case, comm.size, 0), comm.rank
    x = step.x()[rank].requires_grad_()
    received = ep.dispatch(x, ep.route(step.exchange.indices[rank]))
    received.x.mul_(2)
    ep.combine(received.x, received).sum().backward()
    times = (step.exchange.indices[rank] >= 0).sum(dim=1, keepdim=True)
    assert torch.equal(x.grad, 2.0 * times.expand_as(x))
    received = ep.dispatch(x, ep.route(step.exchange.indices[rank]))
    biases = [torch.zeros_like(x), torch.zeros_like(x)]
    raised = raised_by(lambda: ep.combine(received.x, received, bias=biases))
    assert isinstance(raised.error, (ConfigError, PeerFailedError)) and "argument `bias`" in raised.text
    comm.reset()


def test_details() -> None:
    on_ranks(2, run_details, longest=0)
