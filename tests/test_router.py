"""Routers against the models' definitions, one token at a time in Python's own floats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from epcomm.errors import ConfigError
from epcomm.moe.router import MODELS, Router

HIDDEN, NUM_EXPERTS, TOPK, TOKENS = 12, 16, 4, 33

Floats = Sequence[float]
Chosen = dict[int, float]  # expert -> weight


def softmax(values: Floats) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / math.fsum(powers) for power in powers]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def best(values: Floats, count: int, among: Sequence[int] | None = None) -> list[int]:
    return sorted(range(len(values)) if among is None else among, key=lambda number: -values[number])[:count]


def normalized(chosen: Chosen) -> Chosen:
    return {expert: weight / math.fsum(chosen.values()) for expert, weight in chosen.items()}


def scaled(chosen: Chosen, scale: float) -> Chosen:
    return {expert: weight * scale for expert, weight in chosen.items()}


def experts_of(groups: Sequence[int], num_groups: int) -> list[int]:
    size = NUM_EXPERTS // num_groups
    return [expert for group in groups for expert in range(group * size, (group + 1) * size)]


def mixtral(logits: Floats, bias: Floats, topk: int) -> Chosen:
    return normalized(qwen2_moe(logits, bias, topk))


def qwen2_moe(logits: Floats, bias: Floats, topk: int) -> Chosen:
    probabilities = softmax(logits)
    return {expert: probabilities[expert] for expert in best(probabilities, topk)}


def gpt_oss(logits: Floats, bias: Floats, topk: int) -> Chosen:
    chosen = best(logits, topk)
    return dict(zip(chosen, softmax([logits[expert] for expert in chosen])))


def llama4(logits: Floats, bias: Floats, topk: int) -> Chosen:
    return {expert: sigmoid(logits[expert]) for expert in best(logits, topk)}


def deepseek_v2(logits: Floats, bias: Floats, topk: int) -> Chosen:
    probabilities = softmax(logits)
    group_scores = [max(probabilities[e] for e in experts_of([group], 8)) for group in range(8)]
    allowed = experts_of(best(group_scores, 3), 8)
    return {expert: 16.0 * probabilities[expert] for expert in best(probabilities, topk, allowed)}


def deepseek_v3(logits: Floats, bias: Floats, topk: int) -> Chosen:
    scores = [sigmoid(logit) for logit in logits]
    biased = [score + add for score, add in zip(scores, bias)]
    group_scores = [sum(sorted(biased[e] for e in experts_of([group], 8))[-2:]) for group in range(8)]
    allowed = experts_of(best(group_scores, 4), 8)
    return scaled(normalized({expert: scores[expert] for expert in best(biased, topk, allowed)}), 2.5)


def sigmoid_without_groups(scale: float) -> Callable[[Floats, Floats, int], Chosen]:
    def chosen(logits: Floats, bias: Floats, topk: int) -> Chosen:
        scores = [sigmoid(logit) for logit in logits]
        picked = best([score + add for score, add in zip(scores, bias)], topk)
        return scaled(normalized({expert: scores[expert] for expert in picked}), scale)

    return chosen


def deepseek_v4(logits: Floats, bias: Floats, topk: int) -> Chosen:
    scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    picked = best([score + add for score, add in zip(scores, bias)], topk)
    return scaled(normalized({expert: scores[expert] for expert in picked}), 1.5)


ORACLES: dict[str, Callable[[Floats, Floats, int], Chosen]] = {
    "mixtral": mixtral,
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": mixtral,
    "qwen3_next": mixtral,
    "qwen3_5_moe": mixtral,
    "olmoe": qwen2_moe,
    "gpt_oss": gpt_oss,
    "llama4": llama4,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "kimi_k2": sigmoid_without_groups(2.827),
    "glm4_moe": sigmoid_without_groups(2.5),
    "glm4_moe_air": sigmoid_without_groups(1.0),
    "glm5": sigmoid_without_groups(2.5),
    "minimax_m2": sigmoid_without_groups(1.0),
}


def router_of(model: str, seed: int = 0, **changes: Any) -> Router:
    """With weights that tell experts apart, and biases that change the choice."""
    generator = torch.Generator().manual_seed(seed)
    changes = {"dtype": torch.float64, "topk": 1 if model == "llama4" else TOPK, **changes}
    router = Router.for_model(model, HIDDEN, NUM_EXPERTS, **changes)
    with torch.no_grad():
        router.weight.copy_(torch.randn(NUM_EXPERTS, HIDDEN, generator=generator))
        for bias in (router.bias, router.correction_bias):
            if bias is not None:
                bias.copy_(torch.randn(NUM_EXPERTS, generator=generator) / 4)
    return router


def tokens(seed: int = 1, num_tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def oracle(router: Router, model: str, x: torch.Tensor, weight: torch.Tensor | None = None) -> list[Chosen]:
    """What each token gets."""
    rows = (router.weight if weight is None else weight).tolist()
    logits_bias = [0.0] * NUM_EXPERTS if router.bias is None else router.bias.tolist()
    bias = [0.0] * NUM_EXPERTS if router.correction_bias is None else router.correction_bias.tolist()
    chosen = []
    for token in x.tolist():
        logits = [math.fsum(a * b for a, b in zip(row, token)) + add for row, add in zip(rows, logits_bias)]
        chosen.append(ORACLES[model](logits, bias, router.topk))
    return chosen


def check(routed: tuple[torch.Tensor, torch.Tensor], wanted: list[Chosen], tolerance: float = 1e-6) -> None:
    topk_idx, weights = routed
    assert topk_idx.dtype == torch.int64 and weights.dtype == torch.float32
    assert topk_idx.shape == weights.shape
    got = [dict(zip(experts, row)) for experts, row in zip(topk_idx.tolist(), weights.tolist())]
    assert len(got) == len(wanted)
    for token, (mine, exact) in enumerate(zip(got, wanted)):
        assert set(mine) == set(exact), f"token {token}: got {mine}, wanted {exact}"
        for expert, weight in exact.items():
            assert mine[expert] == pytest.approx(weight, rel=tolerance), f"token {token}, expert {expert}"


def test_every_model_has_an_oracle():
    assert set(ORACLES) == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_model(model: str):
    router, x = router_of(model), tokens()
    check(router(x), oracle(router, model, x))


@pytest.mark.parametrize("model", ["mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_float32(model: str):
    router, x = router_of(model, dtype=torch.float32), tokens().float()
    check(router(x), oracle(router, model, x), 1e-5)


@pytest.mark.parametrize("topk", [1, NUM_EXPERTS])
@pytest.mark.parametrize("model", ["mixtral", "glm4_moe", "gpt_oss"])
def test_extreme_topk(model: str, topk: int):
    router, x = router_of(model, topk=topk), tokens()
    check(router(x), oracle(router, model, x))


@pytest.mark.parametrize("model", ["qwen2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4", "gpt_oss", "llama4"])
def test_gradients(model: str):
    """Against differences of the oracle, along a random direction of all tokens and weights."""
    router, x = router_of(model), tokens().requires_grad_()
    factors = torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    topk_idx, weights = router(x)
    (weights * factors[topk_idx]).sum().backward()
    assert x.grad is not None and router.weight.grad is not None
    along_x, along_weight = tokens(3), tokens(4, NUM_EXPERTS)

    def loss(step: float) -> float:
        chosen = oracle(router, model, x + step * along_x, router.weight + step * along_weight)
        return math.fsum(weight * factors[expert].item() for each in chosen for expert, weight in each.items())

    step = 1e-6
    wanted = (loss(step) - loss(-step)) / (2 * step)
    got = (x.grad * along_x).sum() + (router.weight.grad * along_weight).sum()
    assert got.item() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_no_tokens(model: str):
    router, x = router_of(model), tokens(num_tokens=0).requires_grad_()
    topk_idx, weights = router(x)
    assert topk_idx.shape == weights.shape == (0, router.topk)
    weights.sum().backward()
    assert router.weight.grad is not None and not router.weight.grad.any()
    assert x.grad is not None


def test_correction_bias_chooses_but_does_not_weigh():
    router, x = router_of("glm4_moe"), tokens()
    assert router.correction_bias is not None
    router.correction_bias.zero_()[5] = 10.0
    topk_idx, _ = router(x)
    assert (topk_idx == 5).any(dim=1).all()
    check(router(x), oracle(router, "glm4_moe", x))
    assert "correction_bias" in router.state_dict() and "correction_bias" not in dict(router.named_parameters())


def test_experts_outside_the_best_groups_are_never_chosen():
    """Not even where all scores inside are negative: other groups count as -inf, not as 0."""
    router, x = router_of("deepseek_v3"), tokens()
    assert router.correction_bias is not None
    router.correction_bias.sub_(3.0)
    check(router(x), oracle(router, "deepseek_v3", x))


def test_saturated_scores_are_told_apart():
    router = router_of("llama4", dtype=torch.float32)
    with torch.no_grad():
        router.weight.zero_()[:, 0] = torch.arange(NUM_EXPERTS) + 50.0  # all sigmoids are 1
        x = torch.zeros(1, HIDDEN)
        x[0, 0] = 1.0
    assert router(x)[0].tolist() == [[NUM_EXPERTS - 1]]


def test_underflown_scores():
    router = router_of("glm4_moe", dtype=torch.float32)
    with torch.no_grad():
        router.weight.fill_(-1000.0)
    _, weights = router(torch.ones(2, HIDDEN))
    assert not weights.any()


def test_precision_of_logits():
    x = tokens().bfloat16()
    router = router_of("deepseek_v3", dtype=torch.bfloat16)
    exact = x.double() @ router.weight.double().t()
    assert router.logits(x).dtype == torch.float32
    assert (router.logits(x) - exact).abs().max() < 1e-5
    coarse = router_of("deepseek_v3", dtype=torch.bfloat16, float32_logits=False).logits(x)
    assert coarse.dtype == torch.float32 and torch.equal(coarse, coarse.bfloat16().float())


def test_new_router():
    first, second = (Router.for_model("deepseek_v3", 256, NUM_EXPERTS, TOPK) for _ in range(2))
    assert not torch.equal(first.weight, second.weight) and first.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.correction_bias is not None and not first.correction_bias.any()
    assert "best 4 of 8 groups" in repr(first)


@pytest.mark.parametrize(
    "changes, texts",
    [
        ({"hidden": 0}, ["`hidden`", "got 0"]),
        ({"num_experts": True}, ["`num_experts`", "got True"]),
        ({"topk": 17}, ["`topk`", "at most 16", "got 17"]),
        ({"topk": 2.0}, ["`topk`", "got 2.0"]),
        ({"score": "tanh"}, ["`score`", "softmax", "got 'tanh'"]),
        ({"group_score": "mean"}, ["`group_score`", "top2", "got 'mean'"]),
        ({"num_groups": 5}, ["`num_groups`", "divisor of 16", "got 5"]),
        ({"num_groups": 4, "topk_groups": 5}, ["`topk_groups`", "num_groups=4", "got 5"]),
        ({"num_groups": 8, "topk_groups": 1}, ["`topk`", "at most 2", "got 4"]),
        ({"num_groups": 16, "topk_groups": 16}, ["`num_groups`", "2 experts", "got 1"]),
    ],
    ids=str,
)
def test_wrong_settings(changes: dict[str, Any], texts: list[str]):
    with pytest.raises(ConfigError) as raised:
        Router(**{"hidden": HIDDEN, "num_experts": NUM_EXPERTS, "topk": TOPK, **changes})
    assert all(text in str(raised.value) for text in ["wanted", *texts]), raised.value


def test_wrong_model():
    with pytest.raises(ConfigError, match=r"`model`: wanted one of .*'mixtral'.*got 'gpt2'"):
        Router.for_model("gpt2", HIDDEN, NUM_EXPERTS, TOPK)


def test_unknown_setting():
    with pytest.raises(ConfigError, match=r"wanted some of .*'score'.*got sharpness"):
        Router.for_model("mixtral", HIDDEN, NUM_EXPERTS, TOPK, sharpness=3)


@pytest.mark.parametrize("x", [torch.zeros(3, HIDDEN + 1), torch.zeros(HIDDEN), torch.zeros(3, HIDDEN).long()])
def test_wrong_tokens(x: torch.Tensor):
    with pytest.raises(ConfigError, match=rf"`x`: wanted floats \[tokens, {HIDDEN}\], got torch"):
        router_of("mixtral")(x)
