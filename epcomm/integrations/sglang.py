"""SGLang's token dispatcher on epcomm, for ``--moe-a2a-backend customized``.

SGLang loads `plugin` by its entry point. What the dispatcher delivers are SGLang's own tuples of DeepEP's two modes, so
whichever of its runners computes the experts needs no change. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers import deep_gemm_wrapper
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher import (
    BaseDispatcher,
    DeepEPLLDispatchOutput,
    DeepEPNormalDispatchOutput,
)
from sglang.srt.layers.moe.utils import get_deepep_mode, get_moe_a2a_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from epcomm.errors import ConfigError
from epcomm.integrations.groups import handles_of

_FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"


def plugin() -> None:
    """For SGLang's entry point: takes part where dispatchers are made."""
    HookRegistry.register(_FACTORY, _create_moe_dispatcher, HookType.AROUND)


def _create_moe_dispatcher(original: Callable[..., BaseDispatcher], config: Any, quant_method: Any) -> BaseDispatcher:
    if not get_moe_a2a_backend().is_customized():
        return original(config, quant_method)
    return EpcommDispatcher(
        get_parallel().tp_group.device_group,
        num_experts=config.num_experts,
        topk=config.top_k,
        hidden=config.hidden_size,
        dtype=config.params_dtype,
    )


class EpcommDispatcher(BaseDispatcher):
    """Prefill in throughput mode, one row per token and rank; decode in latency mode, rows by expert.

    `dispatch` and `combine` come in halves as well (`_a` sends, `_b` receives), for models that compute in between.
    Rows travel as they are: experts that compute in float8 quantise what they get.

    Args:
        group: a `torch.distributed.ProcessGroup` of the ranks that experts are spread over.
        num_experts, topk, hidden, dtype: of all ranks, per token, elements per token, and of tokens.
    """

    def __init__(self, group: Any, *, num_experts: int, topk: int, hidden: int, dtype: torch.dtype):
        super().__init__()
        self._handles = handles_of(group)
        self._num_experts = num_experts
        self._shape: dict[str, Any] = dict(num_experts=num_experts, topk=topk, hidden=hidden, dtype=dtype)
        self._pending: Any = None  # the half of an operation that has sent
        self._routing: Any = None
        self._weights: torch.Tensor | None = None  # that combine applies; None: the experts have

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Collective. [num_tokens, hidden] and SGLang's standard top-k output; returns one of its dispatch outputs."""
        self.dispatch_a(hidden_states, topk_output)
        return self.dispatch_b()

    def dispatch_a(self, hidden_states: torch.Tensor, topk_output: Any) -> None:
        self._topk_ids, self._topk_weights = topk_output.topk_ids.to(torch.int64), topk_output.topk_weights
        is_normal = get_deepep_mode().resolve(get_is_extend_in_batch()).is_normal()
        if is_normal:
            ep = self._handles.for_batch(len(hidden_states), layout="flat", **self._shape)
        else:
            limit = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
            ep = self._handles.handle(max_tokens=limit, mode="latency", **self._shape)
        self._routing = ep.route(self._topk_ids)
        self._weights = None if is_normal else self._topk_weights
        self._begin(ep.dispatch(hidden_states, self._routing, self._topk_weights if is_normal else None, split=True))

    def dispatch_b(self) -> Any:
        received = self._finish()
        if self._weights is None:
            counts = received.expert_counts
            if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
                counts = (counts + 127) // 128 * 128
            return DeepEPNormalDispatchOutput(
                received.x, None, received.topk_idx, received.topk_weights, counts.tolist()
            )
        num_slots = self._topk_ids.numel() * received.ep.size
        return DeepEPLLDispatchOutput(
            hidden_states=received.x,
            hidden_states_scale=None,
            topk_ids=self._topk_ids,
            topk_weights=self._topk_weights,
            masked_m=received.expert_counts,
            expected_m=(num_slots + self._num_experts) // self._num_experts,  # rows per expert, a hint for schedulers
        )

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Collective. The experts' outputs, as rows came; returns [num_tokens, hidden]."""
        self.combine_a(combine_input)
        return self.combine_b()

    def combine_a(self, combine_input: Any) -> None:
        routing, self._routing = self._routing, None
        if routing is None:
            raise ConfigError("EpcommDispatcher.combine: wanted a dispatch before it, got none since the last combine")
        self._begin(routing.ep.combine(combine_input.hidden_states, routing, self._weights, split=True))

    def combine_b(self) -> torch.Tensor:
        return self._finish()

    def _begin(self, half: Any) -> None:
        self._pending = half

    def _finish(self) -> Any:
        half, self._pending = self._pending, None
        if half is None:
            raise ConfigError("EpcommDispatcher: wanted the first half of an operation before the second, got none")
        return half.finish()
