"""SGLang's factory of dispatchers, with epcomm's plugin loaded by SGLang, against the definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import with_process_group

from epcomm.errors import ConfigError

pytest.importorskip("sglang", minversion="0.5.23")

NUM_EXPERTS, TOPK, HIDDEN = 6, 3, 64
TOKENS = [[5, 9, 1], [0, 3, 0], [7, 0, 2]]  # of each rank, by step


def inputs(rank: int, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, weights, experts) of a rank."""
    generator = torch.Generator().manual_seed(10 * rank + num)
    index = torch.rand(num, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK].int()
    return torch.randn(num, HIDDEN, generator=generator), torch.rand(num, TOPK, generator=generator), index


def make_dispatcher(is_extend: bool) -> Any:
    """By SGLang's own factory; what a server sets up beforehand is stated here."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_flags, get_forward

    from epcomm.integrations import sglang

    load_plugins()
    get_flags().moe.a2a_backend, get_flags().moe.deepep_mode = MoeA2ABackend.CUSTOMIZED, DeepEPMode.AUTO
    get_forward().set("is_extend_in_batch", is_extend)
    config = MoeRunnerConfig(
        num_experts=NUM_EXPERTS, top_k=TOPK, hidden_size=HIDDEN, params_dtype=torch.float32
    )
    parallel = SimpleNamespace(tp_group=SimpleNamespace(device_group=dist.group.WORLD))
    with mock.patch.object(sglang, "get_parallel", lambda: parallel):
        dispatcher = layer.create_moe_dispatcher(config, None)
    assert isinstance(dispatcher, sglang.EpcommDispatcher)
    return dispatcher


def run_dispatcher(is_extend: bool, in_halves: bool) -> Any:
    """On each rank and step: (what dispatch delivered, the output) with experts that multiply by number plus one."""
    from sglang.srt.layers.moe.token_dispatcher import DeepEPLLCombineInput, DeepEPNormalCombineInput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    rank, size = dist.get_rank(), dist.get_world_size()
    dispatcher, share, found = make_dispatcher(is_extend), NUM_EXPERTS // size, []
    with pytest.raises(ConfigError, match="wanted a dispatch before it"):
        dispatcher.combine(None)
    for nums in TOKENS:
        tokens, weights, index = inputs(rank, nums[rank])
        topk = StandardTopKOutput(weights, index, None)
        if in_halves:
            dispatcher.dispatch_a(tokens, topk)
            output = dispatcher.dispatch_b()
        else:
            output = dispatcher.dispatch(hidden_states=tokens, topk_output=topk)
        if is_extend:
            assert output.format.is_deepep_normal()
            factor = torch.where(output.topk_ids >= 0, output.topk_ids + rank * share + 1, 0)
            rows = output.hidden_states * (factor * output.topk_weights).sum(dim=1, keepdim=True)
            given: Any = DeepEPNormalCombineInput(rows, output.topk_ids, output.topk_weights)
        else:
            assert output.format.is_deepep_ll()
            rows = output.hidden_states * (torch.arange(share)[:, None, None] + rank * share + 1)
            given = DeepEPLLCombineInput(rows, output.topk_ids, output.topk_weights)
        if in_halves:
            dispatcher.combine_a(given)
            out = dispatcher.combine_b()
        else:
            out = dispatcher.combine(given)
        found.append((tuple(output), out))
    return found


@pytest.mark.parametrize("in_halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("is_extend", [True, False], ids=["prefill", "decode"])
def test_dispatcher_equals_definition(is_extend: bool, in_halves: bool) -> None:
    size = 3 if in_halves else 2
    by_rank = with_process_group(size, run_dispatcher, is_extend, in_halves, timeout=200)
    share = NUM_EXPERTS // size
    for step, nums in enumerate(TOKENS):
        sent = [inputs(rank, nums[rank]) for rank in range(size)]
        for rank in range(size):
            delivered, out = by_rank[rank][step]
            tokens, weights, index = sent[rank]
            scale = ((index + 1) * weights.double()).sum(dim=1, keepdim=True)
            torch.testing.assert_close(out.double(), tokens.double() * scale, rtol=1e-5, atol=1e-5)
            local = torch.cat([index.long() - rank * share for _, _, index in sent])
            numbers = [int((local == expert).sum()) for expert in range(share)]
            if is_extend:
                rows, scales, row_index, row_weights, counts = delivered
                here = ((local >= 0) & (local < share)).any(dim=1)
                assert torch.equal(rows, torch.cat([tokens for tokens, _, _ in sent])[here])
                mine = local[here]
                assert torch.equal(row_index, torch.where((mine >= 0) & (mine < share), mine, -1))
                assert row_index.dtype is torch.int64 and row_weights.dtype is torch.float32
                assert counts == numbers
            else:
                rows, scales, own_index, own_weights, counts, expected = delivered
                assert torch.equal(own_index, index.long()) and torch.equal(own_weights, weights)
                assert counts.dtype is torch.int32 and counts.tolist() == numbers
                assert expected == (nums[rank] * TOPK * size + NUM_EXPERTS) // NUM_EXPERTS
                everyone = torch.cat([tokens for tokens, _, _ in sent])
                for expert, number in enumerate(numbers):
                    assert torch.equal(rows[expert, :number], everyone[(local == expert).any(dim=1)])
            assert scales is None
