"""Tiny random models with experts, of six families, for any number of ranks that divides their 12 experts."""

from __future__ import annotations

from typing import Any

SHARED: dict[str, Any] = dict(
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    vocab_size=96,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(
        num_experts=12, moe_intermediate_size=20, intermediate_size=64, head_dim=12, norm_topk_prob=True
    ),
    "mixtral": dict(num_local_experts=12, intermediate_size=20, head_dim=12),
    "olmoe": dict(num_experts=12, intermediate_size=20, norm_topk_prob=False),
    "deepseek_v3": dict(
        n_routed_experts=12,
        moe_intermediate_size=20,
        intermediate_size=64,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    ),
    "gpt_oss": dict(
        num_local_experts=12, intermediate_size=20, head_dim=12, layer_types=["full_attention", "full_attention"]
    ),
    "glm4_moe": dict(
        n_routed_experts=12,
        moe_intermediate_size=20,
        intermediate_size=64,
        first_k_dense_replace=1,
        head_dim=12,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
    ),
}


def tiny_model(family: str, **changes: int) -> Any:
    """A causal language model with random weights in float32, the same in every process; changes are to its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SHARED, **FAMILIES[family], **changes})
    return AutoModelForCausalLM.from_config(config).float()
