"""torchtitan's MoE layer with its experts on several ranks: its own dispatcher and one process are the references."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import with_process_group

pytest.importorskip("torchtitan", minversion="0.3")

NUM_EXPERTS, TOPK, DIM, HIDDEN = 12, 3, 40, 24
LENGTHS = [[6, 6, 6], [3, 1, 8], [0, 5, 2]]  # of each rank's sequence, by step; the last one isn't for torchtitan's own
OVERRIDE = "epcomm.integrations.torchtitan.token_dispatcher"


def layer(imports: list[str]) -> Any:
    """An MoE layer, all of whose weights are the same in every process, after overrides."""
    from torchtitan.config import Configurable, OverrideConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.config_utils import make_moe_config, make_router_config, make_token_dispatcher_config
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts

    @dataclass(kw_only=True, slots=True)
    class Model(Configurable.Config):
        moe: MoE.Config

    set_spmd_backend("none")  # its types check whole models
    experts = GroupedExperts.Config(dim=DIM, hidden_dim=HIDDEN, num_experts=NUM_EXPERTS)
    dispatcher = make_token_dispatcher_config(num_experts=NUM_EXPERTS, top_k=TOPK, comm_backend="standard")
    model = Model(
        moe=make_moe_config(
            num_experts=NUM_EXPERTS,
            router=make_router_config(dim=DIM, num_experts=NUM_EXPERTS, gate_param_init={}, top_k=TOPK),
            routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
        )
    )
    replaced = apply_overrides(OverrideConfig(imports=imports), model)
    assert len(replaced) == len(imports)
    moe = model.moe.build()
    torch.manual_seed(3)
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    moe._init_self_buffers()
    return moe


def spread(moe: Any, rank: int, mesh: Any) -> Any:
    """Leaves a rank its share of the experts."""
    share = NUM_EXPERTS // mesh.size()
    for name, weight in list(moe.routed_experts.inner_experts.named_parameters()):
        mine = torch.nn.Parameter(weight.detach()[rank * share : (rank + 1) * share].clone())
        setattr(moe.routed_experts.inner_experts, name, mine)
    moe.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return moe


def tokens(rank: int, length: int) -> torch.Tensor:
    return torch.randn(1, length, DIM, generator=torch.Generator().manual_seed(100 * rank + length))


def run(moe: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, gradient of x); those of the weights add up."""
    out = moe(x.requires_grad_())
    out.square().sum().backward()
    return out.detach(), x.grad


def gradients(moe: Any) -> dict[str, torch.Tensor]:
    return {name: weight.grad for name, weight in moe.named_parameters()}


def run_layers() -> Any:
    """On each rank, for torchtitan's dispatcher and for epcomm's: (results by step, gradients of the weights)."""
    from torch.distributed.device_mesh import init_device_mesh

    rank, found = dist.get_rank(), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for imports in ([], [OVERRIDE]):
        moe = spread(layer(imports), rank, mesh)
        steps = [run(moe, tokens(rank, lengths[rank])) for lengths in (LENGTHS if imports else LENGTHS[:-1])]
        found.append((steps, gradients(moe)))
    return found


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """As close as experts that compute in bfloat16, on other numbers of rows, are to each other."""
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=0, atol=0.02 * float(wanted.abs().max()))


@pytest.mark.parametrize("size", [2, 3])
def test_layer_equals_one_process(size: int) -> None:
    by_rank = with_process_group(size, run_layers, timeout=300)
    moe = layer([])
    for rank, ((own_steps, _), (steps, _)) in enumerate(by_rank):
        for (out, _), (own, _) in zip(steps, own_steps):
            assert close(out, own)
        for lengths, (out, gradient) in zip(LENGTHS, steps):
            wanted, wanted_gradient = run(moe, tokens(rank, lengths[rank]))
            assert out.shape == wanted.shape
            if wanted.numel():
                assert close(out, wanted) and close(gradient, wanted_gradient), (rank, lengths)
    wanted_of = gradients(moe)
    for name, wanted in wanted_of.items():
        parts = [of[name] for _, (_, of) in by_rank]
        got = torch.cat(parts) if "experts" in name else sum(parts)
        assert close(got, wanted), name
