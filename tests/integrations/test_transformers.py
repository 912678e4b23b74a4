"""Models of transformers with their experts on several ranks, against the same weights in one process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import with_process_group
from transformers_models import FAMILIES, tiny_model

from epcomm.testing.interpreter import kernels_of

# Lengths of each rank's sequences, by step. (Attention in transformers takes no empty batch; the experts do, below.)
LENGTHS = [[7, 9, 4], [3, 1, 5], [1, 12, 2]]
# Of float32 sums in another order, relative to the largest logit, or gradient of the model: a gradient that cancels (a
# bias of keys) is as wrong as what it is made of.
TOLERANCE = 1e-6


def batch(rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    return torch.randint(0, 96, (2, length), generator=generator)


def load(path: str, family: str, **sizes: int) -> Any:
    """The saved model, with its experts on the ranks of the process group."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from epcomm.integrations import transformers

    transformers.register()
    config = DistributedConfig(**sizes, ep_implementation="epcomm")
    return AutoModelForCausalLM.from_pretrained(
        f"{path}/{family}", dtype=torch.float32, distributed_config=config, experts_implementation="grouped_mm"
    )


def whole_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Collective: the gradients of all ranks' parts."""
    return {name: weight.grad.full_tensor() for name, weight in module.named_parameters()}


def run_models(path: str, families: list[str], kernels: str) -> list[Any]:
    """On each rank: (logits by step, gradients) of each family's model."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    for family in families:
        model = load(path, family, fsdp_size=size, ep_size=size)
        logits = []
        for lengths in LENGTHS:
            with kernels_of(kernels):  # the first call makes the communicator
                out = model(batch(rank, lengths[rank])).logits
            out.square().sum().backward()
            logits.append(out.detach())
        found.append((logits, whole_gradients(model)))
    return found


def one_process(family: str, size: int) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor]]:
    """(logits by step and rank, gradients) with the eager experts."""
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    logits = []
    for lengths in LENGTHS:
        logits.append([model(batch(rank, lengths[rank])).logits for rank in range(size)])
        sum(out.square().sum() for out in logits[-1]).div(size).backward()  # FSDP averages over its ranks
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return [[out.detach() for out in outs] for outs in logits], gradients


def largest(tensors: Iterable[torch.Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


def assert_equal(got: dict[Any, torch.Tensor], wanted: dict[Any, torch.Tensor], where: Any) -> None:
    """Both by name, and as close as sums of float32 can be."""
    assert got.keys() == wanted.keys(), where
    limit = TOLERANCE * largest(wanted.values())
    errors = {name: float((got[name] - wanted[name]).abs().max()) for name in wanted}
    assert {name: error for name, error in errors.items() if not error <= limit} == {}, (where, limit)


def check(tmp_path: Path, families: list[str], size: int, kernels: str = "numba") -> None:
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    by_rank = with_process_group(size, run_models, str(tmp_path), families, kernels, timeout=300)
    for number, family in enumerate(families):
        logits, gradients = one_process(family, size)
        for rank in range(size):
            got_logits, got_gradients = by_rank[rank][number]
            assert_equal(dict(enumerate(got_logits)), {step: outs[rank] for step, outs in enumerate(logits)}, family)
            assert_equal(got_gradients, gradients, family)


def test_models_of_two_families_equal_one_process(tmp_path: Path) -> None:
    check(tmp_path, ["qwen3_moe", "gpt_oss"], 2)


@pytest.mark.slow
def test_model_on_interpreted_kernels(tmp_path: Path) -> None:
    check(tmp_path, ["qwen3_moe"], 2, kernels="triton")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_models_equal_one_process(tmp_path: Path, size: int) -> None:
    check(tmp_path, list(FAMILIES), size)


def run_shared_batch(path: str, family: str) -> Any:
    """On each rank, which hold one batch and split attention between them too: logits by length."""
    with torch.no_grad():
        model = load(path, family, tp_size=dist.get_world_size(), ep_size=dist.get_world_size())
        return [model(batch(0, length)).logits for length in (5, 1, 4)]


def test_ranks_that_share_a_batch(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "qwen3_moe")
    wanted = {step: model(batch(0, length)).logits.detach() for step, length in enumerate((5, 1, 4))}
    for got in with_process_group(2, run_shared_batch, str(tmp_path), "qwen3_moe", timeout=300):
        assert_equal(dict(enumerate(got)), wanted, "logits")


# Tokens of each rank, by step: one has none, nobody has any, all but one have none.
TOKENS = [[0, 5], [0, 0], [3, 0]]


def tokens(rank: int, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts and weights of routing for a rank."""
    generator = torch.Generator().manual_seed(50 * rank + num)
    index = torch.stack([torch.randperm(12, generator=generator)[:2] for _ in range(num)] or [torch.empty(2).long()])
    return torch.randn(num, 48, generator=generator), index[:num], torch.rand(num, 2, generator=generator)


def run_empty(path: str, family: str, kernels: str) -> Any:
    """On each rank: outputs and gradients of the inputs by step, and those of the experts."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    experts = load(path, family, fsdp_size=size, ep_size=size).model.layers[0].mlp.experts
    for nums in TOKENS:
        hidden, index, weights = tokens(rank, nums[rank])
        with kernels_of(kernels):
            out = experts(hidden.requires_grad_(), index, weights.requires_grad_())
        out.square().sum().backward()
        found.append((out.detach(), hidden.grad, weights.grad))
    return found, whole_gradients(experts)


@pytest.mark.parametrize("kernels", ["numba", "triton"])
def test_ranks_without_tokens(tmp_path: Path, kernels: str) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path / "qwen3_moe")
    model.set_experts_implementation("eager")
    experts = model.model.layers[0].mlp.experts
    by_rank = with_process_group(2, run_empty, str(tmp_path), "qwen3_moe", kernels, timeout=300)
    for rank, (found, _) in enumerate(by_rank):
        for step, got in enumerate(found):
            hidden, index, weights = tokens(rank, TOKENS[step][rank])
            out = experts(hidden.requires_grad_(), index, weights.requires_grad_())
            (out.square().sum() + 0 * (hidden.sum() + weights.sum())).backward()  # eager experts skip what is empty
            for one, wanted in zip(got, (out, hidden.grad, weights.grad)):
                assert one.shape == wanted.shape
                if wanted.numel():
                    assert_equal({step: one}, {step: wanted.detach()}, (rank, step))
    mean = {name: weight.grad / len(by_rank) for name, weight in experts.named_parameters()}  # as of any weight
    for _, gradients in by_rank:
        assert_equal(gradients, mean, "experts")
