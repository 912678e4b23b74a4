"""The router of an MoE layer: which experts a token goes to, and with what weights.

For a token x, with ``weight`` [num_experts, hidden] and in float32 (float64 for a float64 token):

    logits = weight @ x (+ bias)
    scores = softmax(logits), sigmoid(logits), sqrt(softplus(logits)) or logits
    choice = scores + correction_bias
    experts: the topk largest of `choice`, among the experts of the topk_groups best groups
    w = scores[experts]                             the correction bias chooses, it does not weigh
    w = w / (sum(w) + 1e-20)                        normalize
    w = w * scale

Experts come in num_groups equal groups of neighbours; a group is as good as its best `choice` ("max", DeepSeek-V2,
https://arxiv.org/abs/2405.04434 section 2.2.2) or its two best ones together ("top2", DeepSeek-V3,
https://arxiv.org/abs/2412.19437 and the model code published with it). The correction bias is that of
https://arxiv.org/abs/2408.15664; training moves it by other means than gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from epcomm.errors import ConfigError
from epcomm.moe.checks import describe

#: Of logits [tokens, num_experts]; all of them grow with the logits. "topk_softmax": see `Router`.
SCORES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "topk_softmax": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: F.softplus(logits).sqrt(),
}
GROUP_SCORES = ("top2", "max")

# Models that have a correction bias compute their logits in float32, as does DeepSeek-V2; MiniMax-M2 does not.
_SIGMOID: dict[str, Any] = dict(score="sigmoid", correction_bias=True, normalize=True, float32_logits=True)
_SOFTMAX: dict[str, Any] = dict(score="softmax", normalize=True)

#: Settings of `Router` by model, named like transformers' model types where there is one. Sizes are the caller's.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": dict(score="softmax", num_groups=8, topk_groups=3, group_score="max", scale=16.0,
                        float32_logits=True),
    "deepseek_v3": dict(_SIGMOID, num_groups=8, topk_groups=4, scale=2.5),  # R1 and V3.2 too
    "deepseek_v4": dict(_SIGMOID, score="sqrtsoftplus", scale=1.5),  # but not its layers that route by token id
    "kimi_k2": dict(_SIGMOID, scale=2.827),
    "glm4_moe": dict(_SIGMOID, scale=2.5),  # GLM-4.5
    "glm4_moe_air": dict(_SIGMOID, scale=1.0),  # GLM-4.5-Air
    "glm5": dict(_SIGMOID, scale=2.5),
    "minimax_m2": dict(_SIGMOID, float32_logits=False),
    "mixtral": _SOFTMAX,
    "qwen2_moe": dict(_SOFTMAX, normalize=False),
    "qwen3_moe": _SOFTMAX,  # as released; transformers' default doesn't normalize
    "qwen3_next": _SOFTMAX,
    "qwen3_5_moe": _SOFTMAX,
    "olmoe": dict(_SOFTMAX, normalize=False),
    "gpt_oss": dict(score="topk_softmax", logits_bias=True),
    "llama4": dict(score="sigmoid"),  # its weights multiply the experts' input: `MoELayer(weights_on_input=True)`
}  # fmt: skip


def check_sizes(where: str, **sizes: int) -> None:
    """`ConfigError` unless all are integers >= 1."""
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: argument `{name}`: wanted an integer >= 1, got {value!r}")


class Router(nn.Module):
    """Chooses `topk` experts per token. What it computes stands at the top of this file.

    Args:
        hidden, num_experts, topk: sizes.
        score: one of `SCORES`. "topk_softmax": the largest logits are chosen, and the weights are their softmax.
        correction_bias: there is one; zeros at first. A buffer, so that no optimizer moves it.
        logits_bias: there is a bias of the logits, a parameter.
        num_groups, topk_groups, group_score: the limit to the best groups; none with num_groups=1.
        normalize: weights are divided by their sum.
        scale: of the weights, at last.
        float32_logits: logits are computed in float32, whatever the dtype of tokens and weight. Otherwise in the
            weight's dtype. (Scores and weights are always computed in float32, at least.)
        dtype, device: of weight and logits bias. The correction bias is float32.

    Raises:
        ConfigError: an argument is wrong.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    correction_bias: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        *,
        score: str = "softmax",
        correction_bias: bool = False,
        logits_bias: bool = False,
        num_groups: int = 1,
        topk_groups: int = 1,
        group_score: str = "top2",
        normalize: bool = False,
        scale: float = 1.0,
        float32_logits: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ):
        super().__init__()
        where = "Router"
        check_sizes(where, hidden=hidden, num_experts=num_experts, topk=topk)
        check_sizes(where, num_groups=num_groups, topk_groups=topk_groups)
        for name, value, allowed in (("score", score, tuple(SCORES)), ("group_score", group_score, GROUP_SCORES)):
            if value not in allowed:
                raise ConfigError(f"{where}: argument `{name}`: wanted one of {allowed}, got {value!r}")
        _check_groups(num_experts, topk, num_groups, topk_groups, group_score)
        self.hidden, self.num_experts, self.topk = hidden, num_experts, topk
        self.score, self.normalize, self.scale, self.float32_logits = score, normalize, float(scale), float32_logits
        self.num_groups, self.topk_groups, self.group_score = num_groups, topk_groups, group_score
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(num_experts, dtype=dtype, device=device)) if logits_bias else None
        correction = torch.empty(num_experts, dtype=torch.float32, device=device) if correction_bias else None
        self.register_buffer("correction_bias", correction)
        self.reset_parameters()

    @classmethod
    def for_model(cls, model: str, hidden: int, num_experts: int, topk: int, **changes: Any) -> Router:
        """The router of one of `MODELS`; `changes` are settings that differ, such as a smaller model's num_groups."""
        return cls(hidden, num_experts, topk, **settings_of({**settings_of(model), **changes}))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights of a new model: normal with a deviation of 0.02, as the models' configurations have it; no biases."""
        self.weight.normal_(std=0.02)
        for bias in (self.bias, self.correction_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes tokens.

        Args:
            x: floats [tokens, hidden]; any number of tokens, 0 too.

        Returns: int64 [tokens, topk], different experts of each token by falling `choice`, and float32 [tokens, topk],
        their weights, differentiable with respect to x, weight and bias.

        Raises:
            ConfigError: x is of another shape, or no floats.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden or not x.is_floating_point():
            raise ConfigError(f"Router: argument `x`: wanted floats [tokens, {self.hidden}], got {describe(x)}")
        logits = self.logits(x)
        scores = SCORES[self.score](logits)
        with torch.no_grad():
            topk_idx = self._choice(logits, scores).topk(self.topk, dim=-1).indices
        weights = scores.gather(1, topk_idx)
        if self.score == "topk_softmax":
            weights = weights.softmax(dim=-1)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # all sigmoids may have underflowed
        if self.scale != 1.0:
            weights = weights * self.scale
        return topk_idx, weights.float()

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 (of float64 tokens: float64) [tokens, num_experts], such as losses for balance are made of."""
        wide = torch.promote_types(x.dtype, torch.float32)
        dtype = wide if self.float32_logits else self.weight.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(wide)

    def _choice(self, logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """By what experts are chosen: -inf outside of the best groups."""
        adds_scores = self.correction_bias is not None or (self.num_groups > 1 and self.group_score == "top2")
        # scores saturate, logits don't: where only their order counts they tell more experts apart
        choice = scores if adds_scores else logits
        if self.correction_bias is not None:
            choice = choice + self.correction_bias
        if self.num_groups == 1:
            return choice
        groups = choice.view(len(choice), self.num_groups, self.num_experts // self.num_groups)
        if self.group_score == "top2":
            group_scores = groups.topk(2, dim=-1).values.sum(dim=-1)
        else:
            group_scores = groups.amax(dim=-1)
        best = group_scores.topk(self.topk_groups, dim=-1).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(is_out[:, :, None], -torch.inf).view_as(choice)

    def extra_repr(self) -> str:
        text = f"hidden={self.hidden}, num_experts={self.num_experts}, topk={self.topk}, score={self.score}"
        if self.num_groups > 1:
            text += f", best {self.topk_groups} of {self.num_groups} groups by {self.group_score}"
        return f"{text}, normalize={self.normalize}, scale={self.scale:g}, float32_logits={self.float32_logits}"


def settings_of(router: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The keyword arguments for `Router`: those of one of `MODELS`, or the given ones; `ConfigError` if unknown."""
    if isinstance(router, str):
        if router not in MODELS:
            raise ConfigError(f"Router: argument `model`: wanted one of {tuple(MODELS)}, got {router!r}")
        return MODELS[router]
    known = tuple(Router.__init__.__kwdefaults__ or ())
    unknown = [name for name in router if name not in known]
    if unknown:
        raise ConfigError(f"Router: argument `router`: wanted some of {known}, got {', '.join(unknown)}")
    return router


def _check_groups(num_experts: int, topk: int, num_groups: int, topk_groups: int, group_score: str) -> None:
    if num_experts % num_groups:
        raise ConfigError(f"Router: argument `num_groups`: wanted a divisor of {num_experts} experts, got {num_groups}")
    if topk_groups > num_groups:
        raise ConfigError(f"Router: argument `topk_groups`: wanted at most num_groups={num_groups}, got {topk_groups}")
    group_size = num_experts // num_groups
    if num_groups > 1 and group_score == "top2" and group_size < 2:
        raise ConfigError(
            f"Router: argument `num_groups`: wanted 2 experts or more per group for top2, got {group_size}"
        )
    if topk > topk_groups * group_size:
        raise ConfigError(
            f"Router: argument `topk`: wanted at most {topk_groups * group_size} (num_experts={num_experts}, "
            f"{topk_groups} of {num_groups} groups), got {topk}"
        )
