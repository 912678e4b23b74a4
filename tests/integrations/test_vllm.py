"""vLLM's own DeepEP classes inside its `FusedMoEKernel`, unmodified, on CPUs: against a dense layer.

`DeepEPHTPrepareAndFinalize`, `DeepEPLLPrepareAndFinalize` and `DeepEPV2PrepareAndFinalize` (its prefill; decode needs
Triton) run on `epcomm.integrations.deep_ep`. The experts are vLLM's `NaiveBatchedExperts` where rows come per expert;
else they are this test's, as vLLM's for CPUs take no map of experts. `make test-integrations` runs this in an
environment that has vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_ranks import with_process_group

from epcomm.integrations import deep_ep

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
deep_ep.install()  # vLLM imports it
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
for name in ("torchvision", "torchaudio", "torchcodec"):
    sys.modules[name] = None  # type: ignore[assignment]  # builds for CUDA, which this torch can't load

NUM_EXPERTS, TOPK, HIDDEN, WIDTH, MAX_TOKENS = 6, 2, 2048, 32, 16
# rank r of step s has this many tokens; a rank without any is among them
TOKENS = [(9, 12, 5), (5, 0, 16), (0, 7, 0), (0, 1, 0)]


def dense(x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> Any:
    """The layer on one rank, in float64."""
    out = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(TOPK)).tolist():
        number = index[token, slot]
        gate, up = (w1[number].double() @ x[token].double()).chunk(2)
        out[token] += weights[token, slot].double() * (w2[number].double() @ (F.silu(gate) * up))
    return out


def experts_of_rows(kernel: Any) -> type:
    """Experts for rows per token, in torch: one row for all of a token's experts here, weighted and summed."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class Experts(kernel.FusedMoEExpertsModular):
        @staticmethod
        def activation_format() -> Any:
            return kernel.FusedMoEActivationFormat.Standard

        @staticmethod
        def _yes(*args: Any) -> bool:
            return True

        _supports_current_device = _supports_no_act_and_mul = _supports_quant_scheme = _yes
        _supports_activation = _supports_parallel_config = _yes

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(self, rows: int, n: int, hidden: int, *args: Any) -> Any:
            return (0,), (0,), (rows, hidden)

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
                  topk_weights: torch.Tensor, topk_ids: torch.Tensor, activation: Any, global_num_experts: int,
                  expert_map: torch.Tensor, **options: Any) -> None:  # fmt: skip
            local, total = expert_map[topk_ids], torch.zeros(output.shape)
            for number in range(len(w1)):
                token, slot = (local == number).nonzero(as_tuple=True)
                gate, up = (hidden_states[token].float() @ w1[number].float().T).chunk(2, dim=-1)
                rows = (F.silu(gate) * up) @ w2[number].float().T
                total.index_add_(0, token, rows * topk_weights[token, slot, None])
            output.copy_(total)

    return Experts


def kernels(config: Any) -> dict[str, Any]:
    """vLLM's kernel with each of its DeepEP classes."""
    import vllm.model_executor.layers.fused_moe.experts.fused_batched_moe as batched
    import vllm.model_executor.layers.fused_moe.modular_kernel as kernel
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_v2 import DeepEPV2PrepareAndFinalize

    batched._is_capturing_or_compiling = lambda: False  # it asks the accelerator, and there is none
    size = dist.get_world_size()
    first = dist.get_rank() * NUM_EXPERTS // size
    buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True)
    elastic = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=TOPK)
    by_token = experts_of_rows(kernel)(config, FUSED_MOE_UNQUANTIZED_CONFIG)

    def by_expert() -> Any:
        return batched.NaiveBatchedExperts(
            config, FUSED_MOE_UNQUANTIZED_CONFIG, max_num_tokens=MAX_TOKENS, num_dispatchers=size
        )

    return {
        "high throughput": kernel.FusedMoEKernel(DeepEPHTPrepareAndFinalize(buffer, size, size, first), by_token),
        "low latency": kernel.FusedMoEKernel(DeepEPLLPrepareAndFinalize(buffer, MAX_TOKENS, size), by_expert()),
        "low latency, float8": kernel.FusedMoEKernel(
            DeepEPLLPrepareAndFinalize(buffer, MAX_TOKENS, size, use_fp8_dispatch=True), by_expert()
        ),
        "elastic": kernel.FusedMoEKernel(
            DeepEPV2PrepareAndFinalize(elastic, size, size, first, NUM_EXPERTS, TOPK), by_token
        ),
    }


def layer_config() -> Any:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType

    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = FusedMoEParallelConfig(
        tp_size=1, pcp_size=1, dp_size=size, ep_size=size, tp_rank=0, pcp_rank=0, dp_rank=rank, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend="allgather_reducescatter", enable_eplb=False,
    )  # fmt: skip
    return FusedMoEConfig(
        num_experts=NUM_EXPERTS, experts_per_token=TOPK, hidden_dim=HIDDEN, intermediate_size=WIDTH,
        num_local_experts=NUM_EXPERTS // size, num_logical_experts=NUM_EXPERTS, activation=MoEActivation.SILU,
        device="cpu", routing_method=RoutingMethodType.Renormalize, moe_parallel_config=parallel,
        in_dtype=torch.bfloat16, max_num_tokens=MAX_TOKENS,
    )  # fmt: skip


def run() -> dict[str, float]:
    """The largest error of each class, relative to the largest number of the result."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    rank, num_local = dist.get_rank(), NUM_EXPERTS // dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    w1 = (torch.randn(NUM_EXPERTS, 2 * WIDTH, HIDDEN, generator=generator) * 0.02).bfloat16()
    w2 = (torch.randn(NUM_EXPERTS, HIDDEN, WIDTH, generator=generator) * 0.1).bfloat16()
    local = slice(rank * num_local, (rank + 1) * num_local)
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
    expert_map[local] = torch.arange(num_local, dtype=torch.int32)
    errors: dict[str, float] = {}
    with set_current_vllm_config(VllmConfig()):
        of_kind = kernels(layer_config())
        for step, counts in enumerate(TOKENS):
            torch.manual_seed(10 * step + rank)
            x = torch.randn(counts[rank], HIDDEN).bfloat16()
            weights, index = torch.softmax(torch.randn(counts[rank], NUM_EXPERTS), dim=-1).topk(TOPK, dim=-1)
            wanted = dense(x, weights, index, w1, w2)
            for kind, kernel in of_kind.items():
                got = kernel.apply(
                    x, w1[local], w2[local], topk_weights=weights, topk_ids=index, activation=MoEActivation.SILU,
                    global_num_experts=NUM_EXPERTS, expert_map=expert_map, apply_router_weight_on_input=False,
                )  # fmt: skip
                assert got.shape == wanted.shape
                if len(x):
                    error = ((got.double() - wanted).abs().amax() / wanted.abs().amax()).item()
                    errors[kind] = max(error, errors.get(kind, 0.0))
    return errors


@pytest.mark.timeout(300)  # vLLM takes a while to load
@pytest.mark.parametrize("world", [2, 3])
def test_fused_moe_kernel(world: int, record_property: Callable[[str, object], None]) -> None:
    by_rank = with_process_group(world, run, timeout=240.0)
    for kind in by_rank[0]:
        record_property(f"largest error, relative: {kind}", max(errors.get(kind, 0.0) for errors in by_rank))
    for errors in by_rank:
        # bfloat16 has 8 bits, and is rounded to between the layer's steps; float8_e4m3fn has 4
        bounds = {"high throughput": 2**-6, "low latency": 2**-6, "low latency, float8": 2**-3, "elastic": 2**-6}
        assert set(errors) == set(bounds) and all(errors[kind] < bound for kind, bound in bounds.items()), errors
