"""A grouped GEMM that writes into given memory, differentiably: the experts' last one, into what combine reads.

torch's grouped GEMM has no `out`. On a CPU it is a loop over the groups as well, so nothing is lost by this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def grouped_linear_into(
    out: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, offsets: Sequence[int]
) -> torch.Tensor:
    """out[r] = weight[e] @ rows[r] (+ bias[e]) for the rows offsets[e] <= r < offsets[e + 1]; others are left alone.

    Args:
        out: [n, width_out], contiguous rows; it is the result, and nothing else may write to it before the backward.
        rows: [n, width_in]. weight: [groups, width_out, width_in]. bias: [groups, width_out]. All of one dtype.
        offsets: [groups + 1], ascending.
    """
    return _GroupedLinearInto.apply(_Memory(out), rows, weight, bias, list(offsets))


class _Memory:
    """Hides a tensor from autograd: it is written to, not read."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor


class _GroupedLinearInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, memory: _Memory, rows: torch.Tensor, weight: torch.Tensor, bias: Any, offsets: Any) -> Any:
        out, rows = memory.tensor, rows.to(weight.dtype)  # under autocast it may have another
        for group, (start, end) in enumerate(zip(offsets, offsets[1:])):
            if bias is None:
                torch.mm(rows[start:end], weight[group].t(), out=out[start:end])
            else:
                torch.addmm(bias[group], rows[start:end], weight[group].t(), out=out[start:end])
        ctx.save_for_backward(rows, weight)
        ctx.offsets, ctx.has_bias = offsets, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        wants_rows, wants_weight, wants_bias = ctx.needs_input_grad[1:4]
        of_rows = torch.zeros_like(rows) if wants_rows else None
        of_weight = torch.empty_like(weight) if wants_weight else None
        of_bias = torch.empty_like(weight[:, :, 0]) if ctx.has_bias and wants_bias else None
        for group, (start, end) in enumerate(zip(ctx.offsets, ctx.offsets[1:])):
            part = gradient[start:end]
            if of_rows is not None:
                torch.mm(part, weight[group], out=of_rows[start:end])
            if of_weight is not None:
                torch.mm(part.t(), rows[start:end], out=of_weight[group])
            if of_bias is not None:
                torch.sum(part, dim=0, out=of_bias[group])
        return None, of_rows, of_weight, of_bias, None
