"""torch's TokenSwitch on epcomm's ranks, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import with_process_group

from epcomm.errors import CapacityError, ConfigError, UnsupportedError
from epcomm.integrations import token_switch

has_switch = pytest.mark.skipif(token_switch.Routing is None, reason="TokenSwitch came with torch 2.14")
NUM_EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 6, 3, 17, 9
TOKENS = [[5, 9, 1], [0, 3, 0], [7, 0, 2]]  # of each rank, by step


@pytest.mark.skipif(token_switch.Routing is not None, reason="this torch has TokenSwitch")
def test_older_torch_is_told() -> None:
    with pytest.raises(UnsupportedError, match="wanted torch >= 2.14"):
        token_switch.TokenSwitchEpcomm(None, NUM_EXPERTS, MAX_TOKENS, MAX_TOKENS, 2)


def inputs(rank: int, num: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens, weights, experts) of a rank; a few slots have no expert."""
    generator = torch.Generator().manual_seed(10 * rank + num)
    index = torch.rand(num, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOPK]
    index[torch.rand(num, TOPK, generator=generator) < 0.2] = -1
    return torch.randn(num, HIDDEN, generator=generator), torch.rand(num, TOPK, generator=generator), index


def make(size: int, **changes: int) -> Any:
    sizes = {
        "num_experts": NUM_EXPERTS,
        "max_dispatch_tokens_per_rank": MAX_TOKENS,
        "max_recv_tokens_per_rank": size * MAX_TOKENS,
        "max_token_bytes": 4 * HIDDEN,
    }
    return token_switch.TokenSwitchEpcomm(dist.group.WORLD, **{**sizes, **changes})


def experts(rows: torch.Tensor, weights: torch.Tensor, index: torch.Tensor, first: int) -> torch.Tensor:
    """Each expert multiplies by its number plus one; a row gets the weighted sum of those it goes to."""
    scales = torch.where(index >= 0, (index + first + 1) * weights, 0).sum(dim=1, keepdim=True)
    return rows * scales


def run_switch() -> Any:
    """On each rank and step: what dispatch delivered, the counts, outputs and gradients of the tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    switch, share, found = make(size), NUM_EXPERTS // size, []
    for nums in TOKENS:
        tokens, weights, index = inputs(rank, nums[rank])
        counts = torch.full((share + 2,), -7, dtype=torch.int32)
        routing = switch.create_routing(index, counts)
        delivered = switch.dispatch(routing, tokens.requires_grad_(), weights, size * MAX_TOKENS)
        out = switch.combine(routing, experts(*delivered, rank * share))
        out.square().sum().backward()
        found.append((*(part.detach() for part in delivered), counts, out.detach(), tokens.grad))
    return found


@has_switch
@pytest.mark.parametrize("size", [2, 3])
def test_switch_equals_definition(size: int) -> None:
    by_rank, share = with_process_group(size, run_switch), NUM_EXPERTS // size
    for step, nums in enumerate(TOKENS):
        sent = [inputs(rank, nums[rank]) for rank in range(size)]
        for rank in range(size):
            rows, row_weights, row_index, counts, out, gradient = by_rank[rank][step]
            # rows by source rank and token; slots of other ranks' experts are -1
            wanted = [
                (tokens[token], torch.where(local, weights[token], 0), torch.where(local, index[token] % share, -1))
                for tokens, weights, index in sent
                for token in range(len(tokens))
                if (local := index[token].div(share, rounding_mode="floor") == rank).any()
            ]
            assert len(rows) == size * MAX_TOKENS and bool((row_index[len(wanted) :] == -1).all())
            for number, (row, weights, index) in enumerate(wanted):
                assert torch.equal(rows[number], row) and torch.equal(row_index[number], index)
                assert torch.equal(torch.where(index >= 0, row_weights[number], 0), weights)
            numbers = torch.stack([index for _, _, index in wanted] or [torch.full((TOPK,), -1)])
            assert counts.tolist() == [*(int((numbers == expert).sum()) for expert in range(share)), -7, -7]
            tokens, weights, index = (part.double() for part in sent[rank])
            scale = torch.where(index >= 0, (index + 1) * weights, 0).sum(dim=1, keepdim=True)
            torch.testing.assert_close(out.double(), tokens * scale, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(gradient.double(), 2 * tokens * scale**2, rtol=1e-5, atol=1e-5)


def run_errors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tokens, weights, index = inputs(rank, 5)
    with pytest.raises(CapacityError):
        make(size, max_recv_tokens_per_rank=2).create_routing(index)
    switch = make(size)
    with pytest.raises(ConfigError, match="wanted room for"):
        switch.dispatch(switch.create_routing(index), tokens, weights, 1)


@has_switch
def test_too_little_room() -> None:
    with_process_group(2, run_errors)
