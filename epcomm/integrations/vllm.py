"""Data- and expert-parallel serving by vLLM on CPUs, which vLLM itself has no communication for.

vLLM loads `plugin` by its entry point in every process. Where experts are spread over data-parallel ranks on CPUs,
dispatch and combine are epcomm's; everything else is left as it was. Written for vLLM 0.32.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as modular
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from epcomm.integrations.groups import Handles

# Where vLLM's factory is known by name: of layers that CPUs have experts for.
_ORACLES = [f"vllm.model_executor.layers.fused_moe.oracle.{name}" for name in ("unquantized", "fp8", "mxfp4")]


def plugin() -> None:
    """For vLLM's entry point; vLLM may call it several times in a process."""
    if not current_platform.is_cpu():
        return
    for name in _ORACLES:
        oracle: Any = importlib.import_module(name)
        oracle.maybe_make_prepare_finalize = _wrapped(oracle.maybe_make_prepare_finalize)


def _wrapped(original: Any) -> Any:
    if getattr(original, "is_epcomm", False):
        return original

    def make(moe: Any, *args: Any, **kwargs: Any) -> Any:
        if not moe.moe_parallel_config.use_all2all_kernels:
            return original(moe, *args, **kwargs)
        # not before: when a worker starts, vLLM looks into all modules, and takes offence at objects of llvmlite
        from epcomm.integrations.groups import handles_of

        return EpcommPrepareAndFinalize(handles_of(get_ep_group().cpu_group), moe)

    make.is_epcomm = True  # type: ignore[attr-defined]
    return make


class EpcommPrepareAndFinalize(modular.FusedMoEPrepareAndFinalizeModular):
    """A token travels once to each rank that has experts of it, and comes back once from each, as their sum.

    Experts for CPUs look at no map of experts: they get local numbers, and a weight of 0 for those of other ranks.
    """

    def __init__(self, handles: Handles, moe: Any):
        super().__init__()
        self._ep = handles.handle(
            num_experts=moe.num_experts,
            topk=moe.experts_per_token,
            hidden=moe.hidden_dim,
            max_tokens=moe.max_num_tokens,
            dtype=moe.in_dtype,
            layout="flat",
        )
        self._received: Any = None

    @property
    def activation_format(self) -> modular.FusedMoEActivationFormat:
        return modular.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        return None

    def num_dispatchers(self) -> int:
        return self._ep.size

    def output_is_reduced(self) -> bool:
        return True

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> modular.PrepareResultType:
        """Collective: the rows for this rank's experts. All experts for CPUs take them as they are."""
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        self._received = received = self._ep.dispatch(a1, self._ep.route(topk_ids), topk_weights.float())
        is_here = received.topk_idx >= 0
        index = received.topk_idx.clamp(min=0)
        counts = modular.ExpertTokensMetadata(received.expert_counts, None)
        return received.x, None, counts, index, received.topk_weights.masked_fill(~is_here, 0)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Collective: the sums of the ranks' results for this rank's tokens, into `output`."""
        if fused_expert_output.numel():
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weight_and_reduce_impl = TopKWeightAndReduceContiguous()
            fused_expert_output = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=fused_expert_output,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        received, self._received = self._received, None
        self._ep.combine(fused_expert_output, received, out=output)
