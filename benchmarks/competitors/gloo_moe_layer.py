"""The MoE layer as it is written on gloo: `torch.distributed.all_to_all_single`, forward and backward.

Router and experts are epcomm's modules, so that the layers differ in nothing but how rows travel: selections sorted by
expert, counts exchanged, rows sent with exact splits and grouped by local expert; and back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from epcomm.moe.experts import Experts
from epcomm.moe.router import Router


class _AllToAll(torch.autograd.Function):
    """Rows with exact splits; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        ctx.splits = received, sent
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        received, sent = ctx.splits
        result = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(result, gradient.contiguous(), sent, received)
        return result, None, None


class GlooMoELayer(torch.nn.Module):
    """For an even placement."""

    def __init__(self, router: Router, experts: Experts, num_experts: int, size: int):
        super().__init__()
        self.router, self.experts = router, experts
        self._num_experts, self._size, self._local = num_experts, size, num_experts // size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk_idx, weights = self.router(x)
        num_tokens, topk = topk_idx.shape
        order = torch.argsort(topk_idx.flatten(), stable=True)
        token = torch.div(order, topk, rounding_mode="floor")
        counts = torch.bincount(topk_idx.flatten(), minlength=self._num_experts).view(self._size, self._local)
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts)
        sent, received = counts.sum(1).tolist(), others.sum(1).tolist()
        rows = _AllToAll.apply(x[token], received, sent)
        local = torch.repeat_interleave(torch.arange(self._local).repeat(self._size), others.flatten())
        by_expert = torch.argsort(local, stable=True)
        offsets = torch.nn.functional.pad(others.sum(0).cumsum(0), (1, 0)).int()
        y = self.experts(rows[by_expert], offsets)
        back = torch.empty_like(by_expert)
        back[by_expert] = torch.arange(len(by_expert))
        y = _AllToAll.apply(y[back], sent, received)
        y = y.float() * weights.flatten()[order, None]
        return torch.zeros(num_tokens, x.shape[1]).index_add(0, token, y).to(x.dtype)
