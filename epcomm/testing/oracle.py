"""What route, dispatch and combine mean, in plain torch, from the inputs of all ranks; none of the code under test.

Integers and copies are exact; sums are float64, with a bound of what the number formats allow a correct implementation
to differ by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

_UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24, torch.float64: 2.0**-53}
_SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149, torch.float64: 2.0**-1074}


def even_placement(num_experts: int, size: int) -> tuple[int, ...]:
    """The rank of each expert by default: contiguous blocks whose sizes differ by at most 1."""
    blocks = torch.arange(num_experts).tensor_split(size)
    return tuple(rank for rank, block in enumerate(blocks) for _ in block)


@dataclass(frozen=True)
class Exchange:
    """One routing, seen from everywhere: `indices[r]` is the topk_idx of rank r, `owner[e]` the rank of expert e."""

    layout: str
    owner: tuple[int, ...]
    max_tokens: int
    alignment: int
    indices: tuple[torch.Tensor, ...]
    wire: str = "expert"  # "rank": combine sums a token's rows on each rank first, and rounds

    @property
    def size(self) -> int:
        return len(self.indices)

    def experts_of(self, rank: int) -> list[int]:
        """Global ids of a rank's experts; their position is their local number."""
        return [expert for expert, owner in enumerate(self.owner) if owner == rank]

    @cached_property
    def rows(self) -> list[Rows]:
        """What each rank receives."""
        make = {"contiguous": _contiguous_rows, "padded": _padded_rows, "flat": _flat_rows}[self.layout]
        return [make(self, rank) for rank in range(self.size)]

    def tokens_for(self, source: int, expert: int) -> torch.Tensor:
        """Tokens of rank `source` that name the expert in any slot, in order."""
        return (self.indices[source] == expert).any(dim=1).nonzero()[:, 0]


@dataclass(frozen=True)
class Rows:
    """The rows that one rank receives, in their order and shape; all fields are -1 where there is no real row.

    ``expert`` is global (flat: -1 everywhere); ``topk_idx`` local, per row (flat: per slot; padded: None).
    """

    source_rank: torch.Tensor
    source_token: torch.Tensor
    expert: torch.Tensor
    topk_idx: torch.Tensor | None
    expert_counts: torch.Tensor
    expert_offsets: torch.Tensor | None

    @property
    def is_real(self) -> torch.Tensor:
        return self.source_token >= 0

    def gather(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Each row's entry of ``values[source rank][source token]``; zeros where there is no row."""
        as_bytes = [value.contiguous().view(torch.uint8) for value in values]  # some dtypes can't be indexed
        result = torch.zeros(*self.source_token.shape, as_bytes[0].shape[-1], dtype=torch.uint8)
        for source, value in enumerate(as_bytes):
            mine = self.source_rank == source
            result[mine] = value[self.source_token[mine].long()]
        return result.view(values[0].dtype)


def _expert_rows(exchange: Exchange, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(source rank, token) of an expert's rows: by source rank, then token."""
    tokens = [exchange.tokens_for(source, expert) for source in range(exchange.size)]
    ranks = [torch.full_like(tokens[source], source) for source in range(exchange.size)]
    return torch.cat(ranks).int(), torch.cat(tokens).int()


def _contiguous_rows(exchange: Exchange, rank: int) -> Rows:
    experts = exchange.experts_of(rank)
    groups = [_expert_rows(exchange, expert) for expert in experts]
    counts = torch.tensor([len(tokens) for _, tokens in groups], dtype=torch.int32)
    offsets = torch.zeros(len(experts) + 1, dtype=torch.int32)
    for number, (_, tokens) in enumerate(groups):
        filled = offsets[number] + len(tokens)
        offsets[number + 1] = filled + (-filled) % exchange.alignment
    num_rows = int(offsets[-1])
    ranks, tokens = torch.full((2, num_rows), -1, dtype=torch.int32)
    expert_of, number_of = torch.full((2, num_rows), -1, dtype=torch.int64)
    for number, (group_ranks, group_tokens) in enumerate(groups):
        span = slice(int(offsets[number]), int(offsets[number]) + len(group_tokens))
        ranks[span], tokens[span], expert_of[span], number_of[span] = group_ranks, group_tokens, experts[number], number
    return Rows(ranks, tokens, expert_of, number_of.to(exchange.indices[0].dtype), counts, offsets)


def _padded_rows(exchange: Exchange, rank: int) -> Rows:
    experts = exchange.experts_of(rank)
    shape = (len(experts), exchange.size * exchange.max_tokens)
    ranks, tokens = torch.full(shape, -1, dtype=torch.int32), torch.full(shape, -1, dtype=torch.int32)
    expert_of = torch.full(shape, -1, dtype=torch.int64)
    counts = torch.zeros(len(experts), dtype=torch.int32)
    for number, expert in enumerate(experts):
        group_ranks, group_tokens = _expert_rows(exchange, expert)
        count = counts[number] = len(group_tokens)
        ranks[number, :count], tokens[number, :count], expert_of[number, :count] = group_ranks, group_tokens, expert
    return Rows(ranks, tokens, expert_of, None, counts, None)


def _flat_rows(exchange: Exchange, rank: int) -> Rows:
    experts = exchange.experts_of(rank)
    # one more entry than experts: index -1 finds it
    local = torch.full((len(exchange.owner) + 1,), -1, dtype=exchange.indices[0].dtype)
    local[experts] = torch.arange(len(experts), dtype=local.dtype)
    numbers = [local[index.long()] for index in exchange.indices]
    tokens = [(number >= 0).any(dim=1).nonzero()[:, 0] for number in numbers]
    ranks = [torch.full_like(tokens[source], source) for source in range(exchange.size)]
    topk_idx = torch.cat([number[mine] for number, mine in zip(numbers, tokens)])
    counts = torch.bincount(topk_idx[topk_idx >= 0], minlength=len(experts)).int()
    expert_of = torch.full((len(topk_idx),), -1, dtype=torch.int64)
    return Rows(torch.cat(ranks).int(), torch.cat(tokens).int(), expert_of, topk_idx, counts, None)


def received_weights(exchange: Exchange, rank: int, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """float32 weights that dispatch delivers with the rows: those of all slots that name the row's expert, added."""
    rows = exchange.rows[rank]
    if exchange.layout == "padded":
        return None
    slots = rows.gather([weight.float() for weight in weights])
    if exchange.layout == "flat":
        assert rows.topk_idx is not None
        return torch.where(rows.topk_idx >= 0, slots, 0.0)
    named = rows.gather(exchange.indices) == rows.expert[:, None]
    return torch.where(named & rows.is_real[:, None], slots, 0.0).sum(dim=1)


def _growth(num_roundings: int, unit_roundoff: float) -> float:
    """The largest relative error after so many roundings."""
    return num_roundings * unit_roundoff / (1 - num_roundings * unit_roundoff)


class Combined(NamedTuple):
    """An exact result, and what bounds the error of a computed one."""

    exact: torch.Tensor
    magnitude: torch.Tensor  # the sum of the terms' absolute values
    repeated: torch.Tensor  # that of the terms whose weight is itself a sum
    num_terms: int

    def bound(self, input_dtype: torch.dtype, output_dtype: torch.dtype) -> torch.Tensor:
        """How far a sum in float32 (float64 inputs: in float64), rounded once to `output_dtype`, may be off."""
        accumulator = _UNIT_ROUNDOFF[torch.float64 if input_dtype is torch.float64 else torch.float32]
        num_roundings = self.num_terms + 1  # of a term: its product, and the additions
        summed = _growth(num_roundings, accumulator) * self.magnitude
        summed = summed + _growth(self.num_terms, _UNIT_ROUNDOFF[torch.float32]) * self.repeated  # weights are float32
        summed = summed + _growth(num_roundings, _UNIT_ROUNDOFF[torch.float64]) * self.magnitude  # of `exact` itself
        return summed + _UNIT_ROUNDOFF[output_dtype] * (self.exact.abs() + summed) + _SMALLEST[output_dtype]


def combined(
    exchange: Exchange,
    rank: int,
    outputs: Sequence[torch.Tensor],
    weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    reduce: bool = True,
) -> Combined:
    """What `combine` returns on `rank` when rank r's rows are `outputs[r]`. Rows that aren't real are not read."""
    index = exchange.indices[rank]
    num_tokens, topk = index.shape
    width = outputs[0].shape[-1]
    # the weights multiply in float32; a slot's term is its weight times the row of its expert
    factors = torch.ones(num_tokens, topk, dtype=torch.float64) if weights is None else weights.float().double()
    shape = (num_tokens, width) if reduce else (num_tokens, topk, width)
    exact, magnitude, repeated = torch.zeros(3, *shape, dtype=torch.float64)
    for rows, output in zip(exchange.rows, outputs):
        mine = rows.source_rank == rank
        tokens, experts, values = rows.source_token[mine].long(), rows.expert[mine], output[mine].double()
        named = index[tokens] == experts[:, None]
        if not reduce:
            at, slot = named.nonzero(as_tuple=True)
            exact[tokens[at], slot] = factors[tokens[at], slot, None] * values[at]
            magnitude[tokens[at], slot] = exact[tokens[at], slot].abs()
            continue
        if exchange.layout == "flat" or weights is None:
            total = absolute = torch.ones(len(tokens), dtype=torch.float64)
        else:
            chosen = torch.where(named, factors[tokens], 0.0)
            total, absolute = chosen.sum(dim=1), chosen.abs().sum(dim=1)
        partial = torch.zeros_like(exact).index_add_(0, tokens, total[:, None] * values)
        exact += partial.to(output.dtype).double() if exchange.wire == "rank" else partial
        magnitude.index_add_(0, tokens, absolute[:, None] * values.abs())
        again = torch.where(named.sum(dim=1) > 1, absolute, 0.0)
        repeated.index_add_(0, tokens, again[:, None] * values.abs())
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    return Combined(exact, magnitude, repeated, topk + 1)
