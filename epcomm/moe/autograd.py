"""Gradients of dispatch and combine: each other, along the same routing.

With rows r of token t(r), the slots s(r) of it that name r's expert, and w(r), the sum of their weights:

    dispatch   x[r] = x[t(r)]                        dx[t] = sum of dx[r] over t's rows     a combine
               weight[r] = w(r)                      dweights[s(r)] = dweight[r]            a combine, not summed
    combine    out[t] = sum of w(r) y[r] + bias[t]   dy[r] = w(r) dout[t(r)]                a dispatch
                                                     dweights[s(r)] = <y[r], dout[t(r)]>    a combine, not summed
                                                     dbias = dout

**Every rank takes part in every exchange of a backward pass**, whatever of this its own tensors need: ranks may have no
rows, or a graph that was cut where a loop over no rows never touched them. So combine depends on what dispatch returned
through an `anchor`, an output of dispatch that only it reads; and gradients that autograd has none for are zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from epcomm.kernels.protocol.arithmetic import ROW_SUM_DTYPES

if TYPE_CHECKING:
    from epcomm.moe.received import Received
    from epcomm.moe.routing import Routing

Rows = tuple[torch.Tensor, ...]


def flat(tensors: Any) -> Sequence[Any]:
    """A tensor or a tuple of them as a tuple."""
    return tensors if isinstance(tensors, (tuple, list)) else (tensors,)


def needs_grad(routing: Any, weights: Any, tensors: Sequence[Any], more: Sequence[Any] = ()) -> bool:
    """Whether an operation is part of a graph where they are made at all.

    It is if a tensor here asks for that, or a rank did when the routing was made.
    """
    try:
        if routing.requires_grad or (weights is not None and weights.requires_grad):
            return True
        for tensor in tensors:
            if tensor.requires_grad:
                return True
        for tensor in more:
            if tensor is not None and tensor.requires_grad:
                return True
    except AttributeError:
        pass  # it isn't a tensor, or no routing: refused where arguments are checked
    return False


def dispatch(run: Callable[..., Received], x: Any, routing: Routing, weights: Any) -> Received:
    """``run(x, routing, weights)``, whose rows and weights have gradients."""
    is_tuple = isinstance(x, (tuple, list))
    made: list[Received] = []
    anchor, row_weights, *rows = _Dispatch.apply(
        run, made, is_tuple, routing, _leaf(routing.ep.device), weights, *(x if is_tuple else (x,))
    )
    received = made[0]
    received.anchor = anchor
    received.__dict__.update(x=tuple(rows) if is_tuple else rows[0], row_weights=row_weights)
    return received


def combine(
    run: Callable[..., Any], y: Any, received: Any, routing: Routing, weights: torch.Tensor | None, bias: Any
) -> Any:
    """``run(y, received, weights, bias=bias)``, whose results have gradients."""
    is_tuple = isinstance(y, (tuple, list))
    rows, addends = flat(y), () if bias is None else flat(bias)
    anchor = getattr(received, "anchor", None)
    outs = _Combine.apply(
        run,
        is_tuple,
        isinstance(bias, (tuple, list)),
        received,
        routing,
        len(rows),
        _leaf(routing.ep.device) if anchor is None else anchor,
        weights,
        *rows,
        *addends,
    )
    return outs if is_tuple else outs[0]


def _leaf(device: torch.device) -> torch.Tensor:
    """Something that wants a gradient, so that a backward pass comes by."""
    return torch.zeros(0, device=device, requires_grad=True)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, made: Any, is_tuple: Any, routing: Any, anchor: Any, weights: Any, *x: Any) -> Any:
        received = run(x if is_tuple else x[0], routing, weights)
        made.append(received)
        rows = received.x if is_tuple else (received.x,)
        ctx.routing, ctx.has_weights = routing, weights is not None
        ctx.shapes = [(row.shape, row.dtype) for row in rows]
        ctx.set_materialize_grads(False)
        # the index tells which slots of a row in flat layout are its rank's
        is_flat = weights is not None and received.ep.is_flat
        ctx.slots = received.topk_idx.clone() if is_flat else None  # a copy: the block may be lent again
        # not as views, which may not be changed in place where a Function made them
        rows = [row.new_empty(0).set_(row) for row in rows]
        ctx.mark_non_differentiable(*[row for row in rows if row.dtype not in ROW_SUM_DTYPES])
        return anchor.new_zeros(0), received.row_weights, *rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, anchor: Any, row_weights: Any, *rows: Any) -> Any:
        ep, routing = ctx.routing.ep, ctx.routing
        given = [index for index, (_, dtype) in enumerate(ctx.shapes) if dtype in ROW_SUM_DTYPES]
        gradients: list[Any] = [None] * len(rows)
        if given:
            whole = [_or_zeros(rows[index], ctx.shapes[index], ep.device) for index in given]
            for index, total in zip(given, ep.combine(tuple(whole), routing)):
                gradients[index] = total
        weights = None
        if ctx.has_weights:
            weights = _weights_of_slots(ep, routing, row_weights, ctx.shapes[0][0][:-1], ctx.slots)
        return None, None, None, None, None, weights, *gradients


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, is_tuple: Any, is_bias_tuple: Any, received: Any, routing: Any, num_rows: Any,
                anchor: Any, weights: Any, *tensors: Any) -> Any:  # fmt: skip
        y, bias = tensors[:num_rows], tensors[num_rows:]
        addends = (bias if is_bias_tuple else bias[0]) if bias else None
        outs = run(y if is_tuple else y[0], received, weights, bias=addends)
        outs = outs if is_tuple else (outs,)
        ctx.routing, ctx.num_rows, ctx.num_biases = routing, num_rows, len(bias)
        # gradients travel in y's dtype: it is what the handle has room for
        ctx.shapes = [(out.shape, row.dtype) for out, row in zip(outs, y)]
        ctx.has_weights = weights is not None
        ctx.set_materialize_grads(False)
        # the anchor for checkpointing: a rank must recompute whether or not there is anything else to save
        ctx.save_for_backward(anchor, weights, *(y if weights is not None else ()))
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outs: Any) -> Any:
        ep, routing = ctx.routing.ep, ctx.routing
        _, weights, *y = ctx.saved_tensors
        gradients = tuple(_or_zeros(out, shape, ep.device) for out, shape in zip(outs, ctx.shapes))
        received = ep.dispatch(gradients, routing, weights)
        rows = received.x
        of_weights = None
        if ctx.has_weights:
            products = _only_real(received, _products(y, rows)[..., None])
            of_weights = ep.combine(products, routing, reduce=False).squeeze(-1)
            rows = tuple(_scaled(row, received.row_weights) for row in rows)
        rows = tuple(_only_real(received, row) for row in rows)
        biases = gradients[: ctx.num_biases]
        # an empty gradient is what makes the engine go on to dispatch
        anchor = torch.zeros(0, device=ep.device)
        return None, None, None, None, None, None, anchor, of_weights, *rows, *biases


def _or_zeros(gradient: torch.Tensor | None, like: tuple[Sequence[int], torch.dtype], device: Any) -> torch.Tensor:
    """The gradient in the dtype, or zeros of shape and dtype."""
    shape, dtype = like
    return torch.zeros(*shape, dtype=dtype, device=device) if gradient is None else gradient.to(dtype)


def _weights_of_slots(
    ep: Any, routing: Routing, row_weights: torch.Tensor | None, lead: Sequence[int], slots: torch.Tensor | None
) -> torch.Tensor:
    """float32 [num_tokens, topk]: each slot's gradient, from those of the rows' delivered weights."""
    if slots is not None:  # flat: a row has all slots of its token, of which those on other ranks are constants
        values = _or_zeros(row_weights, ((*lead, routing.topk), torch.float32), ep.device)
        return ep.combine(values.masked_fill(slots < 0, 0), routing)
    values = _or_zeros(row_weights, (lead, torch.float32), ep.device)
    return ep.combine(values[..., None], routing, reduce=False).squeeze(-1)


def _products(y: Sequence[torch.Tensor], rows: Rows) -> torch.Tensor:
    """[rows]: the dot products of the rows of two tuples of tensors, in float32 (float64 for float64)."""
    total: Any = 0
    for row, gradient in zip(y, rows):
        dtype = torch.float64 if row.dtype is torch.float64 else torch.float32
        total = total + (row.to(dtype) * gradient.to(dtype)).sum(dim=-1)
    return total


def _scaled(row: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    dtype = torch.float64 if row.dtype is torch.float64 else torch.float32
    return (row.to(dtype) * weights[..., None].to(dtype)).to(row.dtype)


def _only_real(received: Received, rows: torch.Tensor) -> torch.Tensor:
    """Zeros where no row is and what lies there is undefined."""
    if received.ep.has_undefined_rows:
        return torch.where(received.is_real[..., None], rows, 0)
    return rows
