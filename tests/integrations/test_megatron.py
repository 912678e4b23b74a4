"""Megatron-core's `MoEFlexTokenDispatcher`, unmodified, on CPUs: forward and backward against a dense layer.

Its deepep and hybridep back ends run on `epcomm.integrations.deep_ep`. `make test-integrations` runs this in an
environment that has megatron-core.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_ranks import with_process_group

from epcomm.integrations import deep_ep

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)
deep_ep.install()  # Megatron looks for DeepEP when it is imported

NUM_EXPERTS, TOPK, HIDDEN, WIDTH = 12, 3, 32, 16
# rank r of step s has this many tokens; a rank without any is among them
TOKENS = [(5, 9, 2, 7), (4, 0, 11, 3), (0, 6, 0, 8), (0, 0, 0, 1)]


def expert(rows: torch.Tensor, probs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """A gated MLP that applies the routing probabilities to its activations, as Megatron's experts do."""
    gate, up = (rows @ w1).chunk(2, dim=-1)
    return (F.silu(gate) * up * probs[:, None]) @ w2


def routed(x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(probabilities, map) [tokens, experts] of a softmax router."""
    probs = torch.softmax(x.reshape(-1, HIDDEN) @ gate.T, dim=-1)
    best, index = probs.topk(TOPK, dim=-1)
    chosen = torch.zeros_like(probs)
    return chosen.scatter(1, index, best), chosen.scatter(1, index, 1.0).bool()


def dense(x: torch.Tensor, gate: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The layer, on one rank."""
    probs, chosen = routed(x, gate)
    rows = x.reshape(-1, HIDDEN)
    out = torch.zeros_like(rows)
    for number in range(NUM_EXPERTS):
        tokens = chosen[:, number].nonzero()[:, 0]
        out = out.index_add(0, tokens, expert(rows[tokens], probs[tokens, number], w1[number], w2[number]))
    return out.reshape(x.shape)


def dispatcher(backend: str) -> Any:
    from megatron.core.transformer.moe.fused_a2a import reset_hybrid_ep_buffer
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    reset_hybrid_ep_buffer()  # Megatron keeps one; this process may have been a rank of another group
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([member]) for member in range(size)][rank]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOPK,
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend=backend,
        expert_model_parallel_size=size,
        use_cpu_initialization=True,
        moe_router_dtype="fp32",
        add_bias_linear=False,
    )
    groups = SimpleNamespace(ep=dist.group.WORLD, expt_tp=alone, tp_ep=dist.group.WORLD)
    local = NUM_EXPERTS // size
    return MoEFlexTokenDispatcher(local, list(range(rank * local, (rank + 1) * local)), config, pg_collection=groups)


def layer(dispatcher: Any, x: torch.Tensor, gate: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """The layer by Megatron's dispatcher, in its six steps."""
    probs, chosen = routed(x, gate)
    rows, probs = dispatcher.dispatch_preprocess(x, chosen, probs)
    rows, probs = dispatcher.token_dispatch(rows, probs)
    rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
    first = dist.get_rank() * len(counts)
    parts = zip(rows.split(counts.tolist()), probs.split(counts.tolist()))
    outputs = [expert(*part, w1[first + number], w2[first + number]) for number, part in enumerate(parts)]
    rows = dispatcher.token_combine(dispatcher.combine_preprocess(torch.cat(outputs)))
    return dispatcher.combine_postprocess(rows)


def error_of(what: str, got: torch.Tensor | None, wanted: torch.Tensor | None) -> float:
    """The largest error, relative to the largest number."""
    assert got is not None and wanted is not None and got.shape == wanted.shape, what
    if not wanted.any():
        assert not got.any(), what
        return 0.0
    error = ((got.double() - wanted).abs().amax() / wanted.abs().amax()).item()
    assert error <= 1e-5, (what, error)
    return error


def run(backend: str) -> float:
    """The largest of all errors."""
    torch._dynamo.config.disable = True  # Megatron compiles parts of itself, which needs a compiler for C++
    rank, moe = dist.get_rank(), dispatcher(backend)
    generator = torch.Generator().manual_seed(0)
    shapes = (NUM_EXPERTS, HIDDEN), (NUM_EXPERTS, HIDDEN, 2 * WIDTH), (NUM_EXPERTS, WIDTH, HIDDEN)
    weights = [torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, (0.1, 0.2, 0.2))]
    errors = []
    for step, counts in enumerate(TOKENS):
        x = torch.randn(counts[rank], 1, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))
        given = [tensor.clone().requires_grad_() for tensor in (x, *weights)]
        y = layer(moe, *given)
        y.square().sum().backward()

        exact = [tensor.double().requires_grad_() for tensor in (x, *weights)]
        wanted = dense(*exact)
        wanted.square().sum().backward()
        errors.append(error_of(f"y of step {step}", y, wanted))
        for name, got, reference in zip(("x", "gate"), given, exact):
            errors.append(error_of(f"gradient of {name} of step {step}", got.grad, reference.grad))
        for name, got, reference in zip(("w1", "w2"), given[2:], exact[2:]):
            assert got.grad is not None and reference.grad is not None
            dist.all_reduce(reference.grad)  # an expert's weights get gradients from all ranks' tokens
            num_local = moe.num_local_experts
            local = slice(rank * num_local, (rank + 1) * num_local)
            errors.append(error_of(f"gradient of {name} of step {step}", got.grad[local], reference.grad[local]))
    return max(errors)


@pytest.mark.timeout(300)  # Megatron takes a while to load
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_flex_dispatcher(backend: str, world: int, record_property: Callable[[str, object], None]) -> None:
    errors = with_process_group(world, run, backend, timeout=240.0)
    record_property("largest error, relative", max(errors))
