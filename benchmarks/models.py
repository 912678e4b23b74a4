"""Expert-parallel shapes of published mixture-of-experts models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Hidden size, routed experts and experts per token of a model's MoE layers."""

    hidden: int
    experts: int
    topk: int


MODELS = {
    "DeepSeek-V3": ModelShape(7168, 256, 8),
    "Kimi-K2": ModelShape(7168, 384, 8),
    "GLM-5": ModelShape(6144, 256, 8),
    "Qwen3-235B-A22B": ModelShape(4096, 128, 8),
    "Mixtral-8x7B": ModelShape(4096, 8, 2),
    "MiniMax-M2": ModelShape(3072, 256, 8),
    "GPT-OSS-120B": ModelShape(2880, 128, 4),
    "Qwen3-30B-A3B": ModelShape(2048, 128, 8),
    "Qwen3-Next-80B-A3B": ModelShape(2048, 512, 10),
    "OLMoE-1B-7B": ModelShape(2048, 64, 8),
}
