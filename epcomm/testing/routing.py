"""Gates and payload for tests of expert parallelism: who goes where, and rows that tell where they come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Gate = Callable[[int, int, Sequence[int], torch.Generator], torch.Tensor]


def _distinct(log_likelihood: torch.Tensor, num_tokens: int, topk: int, generator: torch.Generator) -> torch.Tensor:
    """`topk` different experts per token, drawn without replacement (Gumbel noise on the log likelihood)."""
    noise = torch.rand(num_tokens, len(log_likelihood), generator=generator).clamp_(1e-6, 1 - 1e-6)
    return (log_likelihood - (-noise.log()).log()).topk(topk, dim=1).indices


def _uniform(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return _distinct(torch.zeros(len(owner)), num_tokens, topk, generator)


def _zipf(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    popularity = torch.arange(1, len(owner) + 1).float().pow(-1.1)
    return _distinct(popularity.log()[torch.randperm(len(owner), generator=generator)], num_tokens, topk, generator)


def _one_expert(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    index = torch.full((num_tokens, topk), -1)
    index[:, topk // 2] = len(owner) // 2
    return index


def _one_rank(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    there = [expert for expert, rank in enumerate(owner) if rank == owner[-1]]
    index = torch.full((num_tokens, topk), -1)
    used = min(topk, len(there))
    index[:, :used] = torch.tensor(there)[_uniform(num_tokens, used, there, generator)]
    return index


def _none(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.full((num_tokens, topk), -1)


def _duplicates(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Any expert in any slot, most often one of the first three."""
    index = torch.randint(len(owner), (num_tokens, topk), generator=generator)
    return torch.where(torch.rand(num_tokens, topk, generator=generator) < 0.7, index % 3, index)


def _holes(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Slots without an expert anywhere, and tokens without any."""
    index = _uniform(num_tokens, topk, owner, generator)
    chance = torch.rand(num_tokens, 1, generator=generator)
    return index.masked_fill_(torch.rand(num_tokens, topk, generator=generator) < 1.2 * chance, -1)


def _holes_and_duplicates(num_tokens: int, topk: int, owner: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    index = _duplicates(num_tokens, topk, owner, generator)
    return index.masked_fill_(torch.rand(num_tokens, topk, generator=generator) < 0.3, -1)


GATES: dict[str, Gate] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "one_rank": _one_rank,
    "none": _none,
    "duplicates": _duplicates,
    "holes": _holes,
    "holes_and_duplicates": _holes_and_duplicates,
}

#: How many of its max_tokens each rank has.
TOKENS: dict[str, Callable[[int, int], int]] = {
    "full": lambda rank, max_tokens: max_tokens,
    "uneven": lambda rank, max_tokens: max_tokens * (2 * rank % 5) // 4,
    "none_on_even_ranks": lambda rank, max_tokens: max_tokens if rank % 2 else 0,
    "none_on_odd_ranks": lambda rank, max_tokens: 0 if rank % 2 else max_tokens,
    "one": lambda rank, max_tokens: min(1, max_tokens),
    "none": lambda rank, max_tokens: 0,
}


def choose_experts(gate: str, num_tokens: int, topk: int, owner: Sequence[int], seed: int) -> torch.Tensor:
    """int64 [num_tokens, topk] by one of `GATES`; `owner[e]` is the rank of expert e."""
    return GATES[gate](num_tokens, topk, owner, torch.Generator().manual_seed(seed))


def _mixed(num_items: int, identity: Sequence[int]) -> torch.Tensor:
    """Pseudo-random int64 from 0 to 2**31, different for each item and identity."""
    seed = 0
    for number in identity:
        seed = (seed * 1000003 + number + 1) & 0x7FFFFFFF
    value = torch.arange(num_items, dtype=torch.int64) * 2654435761 + seed * 40503
    value = ((value & 0xFFFFFFFF) * 1103515245 + 12345) & 0x7FFFFFFFFFFF
    return (value ^ value >> 15) >> 4 & 0x7FFFFFFF


def payload(shape: Sequence[int], dtype: torch.dtype, *identity: int) -> torch.Tensor:
    """Rows whose values tell `identity` (a rank, a step, ...) and position, exact in any format.

    Float formats that can be summed get integers of at most 100, of which 40000 have an exact sum in float32.
    """
    num_items = torch.Size(shape).numel()
    if dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        return (_mixed(num_items, identity) % 201 - 100).to(dtype).reshape(tuple(shape))
    if dtype is torch.bool:
        return (_mixed(num_items, identity) % 2 == 1).reshape(tuple(shape))
    raw = (_mixed(num_items * dtype.itemsize, identity) & 0xFF).to(torch.uint8)
    return raw.view(dtype).reshape(tuple(shape))


def weights(shape: Sequence[int], *identity: int) -> torch.Tensor:
    """Weights from 1/8 to 2 in eighths, for which sums of weighted `payload` are exact in float32."""
    return ((_mixed(torch.Size(shape).numel(), identity) % 16 + 1) / 8).reshape(tuple(shape))
