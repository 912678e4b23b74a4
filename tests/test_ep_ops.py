"""The operators that tracers see: `torch.compile`, `torch.export`, fake tensors, checkpointing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, on_ranks
from test_ep_autograd import CASE, Gradients, grad_of, scales
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import epcomm
from epcomm.errors import ConfigError
from epcomm.testing.ranks import run_ranks


class Layer(torch.nn.Module):
    """Each row times its expert's scales."""

    def __init__(self, ep: Any, case: Case):
        super().__init__()
        self.ep, self.layout = ep, case.layout
        own = scales(case.num_experts, case.hidden)[ep.local_expert_ids].to(case.dtype)
        self.scale = torch.nn.Parameter(own)

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ep, is_flat = self.ep, self.layout == "flat"
        received = ep.dispatch(x, ep.route(index), weights if is_flat else None)
        padded = torch.cat([self.scale, self.scale.new_zeros(1, self.scale.shape[1])])
        if self.layout == "padded":
            is_real = torch.arange(received.x.shape[1]) < received.expert_counts[:, None]
            # what is undefined may be NaN, which is NaN times a gradient of 0 too
            y = torch.where(is_real[..., None], received.x, 0) * self.scale[:, None]
        elif is_flat:
            y = received.x * (padded[received.topk_idx.long()] * received.topk_weights[..., None]).sum(dim=1)
        else:
            y = received.x * padded[received.topk_idx.long()]
        return ep.combine(y, received, None if is_flat else weights)


def check(layer: Any, module: Layer, case: Case, comm: epcomm.Communicator, number: int) -> None:
    """One step forward and backward against the dense computation."""
    step, rank = Step(case, comm.size, number), comm.rank
    wanted = Gradients(step, "dispatch" if case.layout == "flat" else "combine")
    x = step.x()[rank].clone().requires_grad_()
    weights = step.weights[rank].clone().requires_grad_()
    module.zero_grad()
    out = layer(x, step.exchange.indices[rank], weights)
    assert torch.equal(out.double(), wanted.out[rank]), step
    (out.double() * grad_of(step, rank, out.shape)).sum().backward()
    assert torch.equal(x.grad.double(), wanted.x[rank].grad), step
    real = step.exchange.indices[rank] >= 0
    assert torch.equal(weights.grad.double(), torch.where(real, wanted.weights[rank].grad, 0)), step
    if len(module.ep.local_expert_ids):
        assert torch.equal(module.scale.grad.double(), wanted.scale.grad[module.ep.local_expert_ids]), step


def run_compiled(comm: epcomm.Communicator, case: Case, backend: str) -> None:
    torch._dynamo.reset()
    ep = case.handle(comm)
    module = Layer(ep, case)
    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=True)
    for number in range(3):
        check(compiled, module, case, comm, number)
    check(module, module, case, comm, 3)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "flat"])
@pytest.mark.parametrize("world", [1, 2])
def test_compile(world: int, layout: str) -> None:
    case = Case(layout=layout, hidden=6, dtype=torch.float32, gate="holes", max_tokens=5, alignment=1)
    on_ranks(world, run_compiled, case, "aot_eager", longest=0, timeout=110)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_compile_with_inductor(layout: str) -> None:
    case = Case(layout=layout, hidden=6, dtype=torch.float32, gate="holes", max_tokens=5)
    on_ranks(2, run_compiled, case, "inductor", longest=0, timeout=170)


def run_export(comm: epcomm.Communicator) -> None:
    """The exported program has three nodes of epcomm, and computes the same."""
    case = Case(hidden=6, dtype=torch.float32, gate="holes")
    ep = case.handle(comm)
    module, step, rank = Layer(ep, case), Step(case, comm.size, 0), comm.rank
    inputs = step.x()[rank], step.exchange.indices[rank], step.weights[rank]
    with torch.no_grad():
        program = torch.export.export(module, inputs, strict=False)
        names = [str(node.target) for node in program.graph.nodes if "epcomm" in str(node.target)]
        assert names == ["epcomm.route.default", "epcomm.dispatch.default", "epcomm.combine.default"]
        for number in range(3):
            step = Step(case, comm.size, number)
            inputs = step.x()[rank], step.exchange.indices[rank], step.weights[rank]
            assert torch.equal(program.module()(*inputs), module(*inputs))


def test_export() -> None:
    on_ranks(2, run_export, longest=0, timeout=110)


def run_checkpointed(comm: epcomm.Communicator) -> None:
    """Selective checkpointing keeps what operators returned and recomputes the experts; plain, all is recomputed."""
    case = Case(hidden=6, dtype=torch.float32, gate="holes_and_duplicates")
    ep = case.handle(comm)
    module = Layer(ep, case)
    counted = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if "epcomm" in str(op):
            counted.append(str(op))
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    operators = functools.partial(through_operators, module)
    for number in range(3):
        check(lambda *args: checkpoint(operators, *args, use_reentrant=False, context_fn=context), module, case, comm,
              number)  # fmt: skip
        check(lambda *args: checkpoint(module, *args, use_reentrant=False), module, case, comm, number)
    assert {name.split(".")[1] for name in counted} == {"route", "dispatch", "combine"}


def through_operators(module: Layer, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The layer by its operators, as tracing makes it."""
    from epcomm.moe import ops

    routing = ops.route(module.ep.number, module.layout, index)
    received = ops.dispatch(x, routing, None)
    padded = torch.cat([module.scale, module.scale.new_zeros(1, module.scale.shape[1])])
    return ops.combine(received.x * padded[received.topk_idx.long()], received, weights, True)


def test_checkpointing() -> None:
    on_ranks(2, run_checkpointed, longest=0)


def run_opcheck() -> None:
    """torch's own checks of schema, fake kernels and gradients."""
    with epcomm.init() as comm:
        ep = Case(hidden=4, dtype=torch.float32, gate="holes").handle(comm)
        step = Step(Case(hidden=4, dtype=torch.float32, gate="holes"), 1, 0)
        index, x, weights = step.exchange.indices[0], step.x()[0], step.weights[0]
        routing = torch.ops.epcomm.route(ep.number, index)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(torch.ops.epcomm.dispatch, (ep.number, x, routing, index, weights), test_utils=checks)
        rows = ep.dispatch(x, ep.route(index)).x.clone()
        arguments = (ep.number, rows, routing, index, weights, None, True)
        torch.library.opcheck(torch.ops.epcomm.combine, arguments, test_utils=checks)


def test_opcheck() -> None:
    run_ranks(run_opcheck, 1)


def run_lifetimes(comm: epcomm.Communicator) -> None:
    """A routing lives as long as its tensor, and its memory is used again afterwards."""
    ep, step = CASE.handle(comm), Step(CASE, comm.size, 1)
    index, x = step.exchange.indices[comm.rank], step.x()[comm.rank]
    routing = torch.ops.epcomm.route(ep.number, index)
    alias = routing.view(1)
    del routing
    torch.ops.epcomm.dispatch(ep.number, x, alias, index, None)
    with pytest.raises(ConfigError, match="the routing's tensor was copied"):
        number = alias.clone()
        del alias
        torch.ops.epcomm.dispatch(ep.number, x, number, index, None)
    assert len(ep._turns._pools.workspaces) == 1


def test_lifetimes() -> None:
    on_ranks(1, run_lifetimes, longest=0)


def run_recomputed(comm: epcomm.Communicator) -> None:
    """A plain sum, and a rank without rows: every rank recomputes, whatever it has to save."""
    case = Case(hidden=6, dtype=torch.float32, gate="one_rank")
    ep, rank = case.handle(comm), comm.rank
    scale = torch.tensor(2.0, requires_grad=True)

    def layer(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        received = ep.dispatch(x, ep.route(index, requires_grad=True))
        y = received.x * scale if len(received.x) else received.x
        return ep.combine(y, received)

    for number in range(3):
        step = Step(case, comm.size, number)
        x = step.x()[rank].requires_grad_()
        checkpoint(layer, x, step.exchange.indices[rank], use_reentrant=False).sum().backward()
        times = (step.exchange.indices[rank] >= 0).sum(dim=1, keepdim=True)
        assert torch.equal(x.grad, 2.0 * times.expand_as(x))
        comm.barrier()


def test_recomputed_by_ranks_without_rows() -> None:
    on_ranks(3, run_recomputed, longest=0)
