"""Models of transformers with their experts on several ranks, against the same weights in one process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from epcomm.testing.ranks import run_ranks
from transformers_models import FAMILIES, tiny_model

pytest.importorskip("transformers", minversion="5.24")

# Lengths of each rank's sequences, by step. (Attention in transformers takes no empty batch; the experts do, below.)
LENGTHS = [[7, 9, 4], [3, 1, 5], [1, 12, 2]]
# Of float32 sums in another order, relative to the largest logit, or gradient of the model: a gradient that cancels (a
# bias of keys) is as wrong as what it is made of.
TOLERANCE = 1e-6


def batch(rank: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    return torch.randint(0, 96, (2, length), generator=generator)


@contextmanager
def process_group(path: str, rank: int, size: int) -> Iterator[None]:
    """gloo's, and the environment that transformers reads."""
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {name: str(number) for name, number in named.items()}):
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def expert_parallel(path: str, families: list[str]) -> list[Any]:
    """On each rank: (logits by step, gradients) of each family's model."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from epcomm.integrations import transformers
    from epcomm.rendezvous import launched_rank

    launched = launched_rank.get()
    rank, size = launched.rank, launched.size
    config = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="epcomm")
    found = []
    with process_group(path, rank, size):
        transformers.register()
        for family in families:
            model = AutoModelForCausalLM.from_pretrained(
                f"{path}/{family}", dtype=torch.float32, distributed_config=config, experts_implementation="grouped_mm"
            )
            logits = []
            for lengths in LENGTHS:
                out = model(batch(rank, lengths[rank])).logits
                out.square().sum().backward()
                logits.append(out.detach())
            gradients = {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}
            found.append((logits, gradients))
        dist.barrier()
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


def check(tmp_path: Path, families: list[str], size: int) -> None:
    for family in families:
        tiny_model(family).save_pretrained(tmp_path / family)
    by_rank = run_ranks(expert_parallel, size, str(tmp_path), families, timeout=300)
    for number, family in enumerate(families):
        logits, gradients = one_process(family, size)
        for rank in range(size):
            got_logits, got_gradients = by_rank[rank][number]
            assert_equal(dict(enumerate(got_logits)), {step: outs[rank] for step, outs in enumerate(logits)}, family)
            assert_equal(got_gradients, gradients, family)


def test_models_of_two_families_equal_one_process(tmp_path: Path) -> None:
    check(tmp_path, ["qwen3_moe", "gpt_oss"], 2)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_models_equal_one_process(tmp_path: Path, size: int) -> None:
    check(tmp_path, list(FAMILIES), size)
