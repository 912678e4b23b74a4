"""Route, dispatch and combine as operators of torch, for whoever traces: `torch.compile`, `torch.export`, checkpoints.

Each is one node in a graph, ``torch.ops.epcomm.{route,dispatch,combine}``, with gradients, and with fake kernels that
know the shapes: how many rows are received is an unbacked size, unless the handle has a fixed shape. A handle is an
integer here, a routing a tensor that keeps it alive; results are copies. The methods of `ExpertParallel` come here by
themselves while they are traced.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.heap.cpu import LentArray

if TYPE_CHECKING:
    from epcomm.moe.expert_parallel import ExpertParallel
    from epcomm.moe.routing import Routing

_handles: weakref.WeakValueDictionary[int, ExpertParallel] = weakref.WeakValueDictionary()
_routings: weakref.WeakValueDictionary[int, Routing] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register_handle(ep: ExpertParallel) -> int:
    """The number by which operators know a handle."""
    number = next(_numbers)
    _handles[number] = ep
    return number


@dataclass
class TracedRouting:
    """A routing in a graph."""

    handle: int
    layout: str
    number: Tensor  # int64 [1], on the CPU: its number
    topk_idx: Tensor

    @property
    def num_tokens(self) -> Any:
        return self.topk_idx.shape[0]


@dataclass
class TracedReceived:
    """What a dispatch in a graph delivers: the fields of `Received` that are tensors. All of them are copies."""

    routing: TracedRouting
    anchor: Tensor
    x: Tensor
    topk_weights: Tensor | None
    expert_counts: Tensor
    expert_offsets: Tensor | None
    topk_idx: Tensor | None
    source_token: Tensor

    @property
    def grouped_mm_offs(self) -> Tensor | None:
        return None if self.expert_offsets is None else self.expert_offsets[1:]


def route(handle: int, layout: str, topk_idx: Tensor) -> Any:
    """`ExpertParallel.route` while tracing, of a handle with this number and layout."""
    return TracedRouting(handle, layout, _route(handle, topk_idx), topk_idx)


def dispatch(x: Any, routing: Any, topk_weights: Tensor | None) -> TracedReceived:
    """`ExpertParallel.dispatch` while tracing, of one tensor."""
    _require_one("x", x)
    anchor, rows, weights, counts, offsets, index, tokens = _dispatch(
        routing.handle, x, routing.number, routing.topk_idx, topk_weights
    )
    is_flat, is_padded = routing.layout == "flat", routing.layout == "padded"
    return TracedReceived(
        routing,
        anchor,
        rows,
        None if topk_weights is None or is_padded else weights,
        counts,
        offsets if not (is_flat or is_padded) else None,
        None if is_padded else index,
        tokens,
    )


def combine(y: Any, received: Any, topk_weights: Tensor | None, reduce: bool) -> Tensor:
    """`ExpertParallel.combine` while tracing, of one tensor."""
    _require_one("y", y)
    routing, anchor = received, None
    if isinstance(received, TracedReceived):
        routing, anchor = received.routing, received.anchor
    return _combine(routing.handle, y, routing.number, routing.topk_idx, topk_weights, anchor, reduce)


def _require_one(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ConfigError(f"argument `{name}`: wanted one tensor while it is traced, got {type(value).__name__}")


def _handle(number: int) -> ExpertParallel:
    ep = _handles.get(number)
    if ep is None:
        raise ConfigError(f"epcomm operator: handle {number} of the graph is gone; graphs don't outlive their handles")
    return ep


def _routing(number: Tensor) -> Routing:
    routing = _routings.get(int(number))
    if routing is None:
        raise ConfigError("epcomm operator: the routing's tensor was copied; pass on the one that route returned")
    return routing


# ---- the operators


@torch.library.custom_op("epcomm::route", mutates_args=())
def _route(handle: int, topk_idx: Tensor) -> Tensor:
    routing = _handle(handle).route(topk_idx)
    number = next(_numbers)
    _routings[number] = routing
    memory = np.full(1, number).view(LentArray)
    memory.lease = routing  # lives as long as the tensor's storage
    return torch.from_numpy(memory)


@_route.register_fake
def _(handle: int, topk_idx: Tensor) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("epcomm::dispatch", mutates_args=())
def _dispatch(
    handle: int, x: Tensor, routing: Tensor, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(anchor, rows, weights of rows, expert counts, expert offsets, local experts of rows, source tokens)."""
    received = _handle(handle).dispatch(x, _routing(routing), topk_weights, copy=True)
    nothing = x.new_empty(0, dtype=torch.int32)
    return (
        x.new_zeros(0, dtype=torch.float32),
        received.x,
        x.new_empty(0, dtype=torch.float32) if received.row_weights is None else received.row_weights,
        received.expert_counts.clone(),
        nothing if received.expert_offsets is None else received.expert_offsets.clone(),
        nothing.clone() if received.topk_idx is None else received.topk_idx,
        received.source_token,
    )


@_dispatch.register_fake
def _(
    handle: int, x: Tensor, routing: Tensor, topk_idx: Tensor, topk_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ep = _handle(handle)
    config, num_local = ep.config, len(ep.local_expert_ids)
    is_flat, is_padded = config.layout == "flat", config.layout == "padded"
    lead: Sequence[Any]
    if is_padded:
        lead = (num_local, config.size * config.max_tokens)
    else:
        lead = (config.capacity,) if config.has_fixed_rows else (torch.library.get_ctx().new_dynamic_size(),)
    per_row = (*lead, topk_idx.shape[1]) if is_flat else lead
    return (
        x.new_empty(0, dtype=torch.float32),
        x.new_empty((*lead, x.shape[1])),
        x.new_empty(0 if topk_weights is None else per_row, dtype=torch.float32),
        x.new_empty(num_local, dtype=torch.int32),
        x.new_empty(0 if is_flat or is_padded else num_local + 1, dtype=torch.int32),
        x.new_empty(0, dtype=torch.int32) if is_padded else topk_idx.new_empty(per_row),
        x.new_empty(lead, dtype=torch.int32),
    )


@torch.library.custom_op("epcomm::combine", mutates_args=())
def _combine(
    handle: int,
    y: Tensor,
    routing: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    anchor: Tensor | None,
    reduce: bool,
) -> Tensor:
    return _handle(handle).combine(y, _routing(routing), topk_weights, reduce=reduce)


@_combine.register_fake
def _(
    handle: int,
    y: Tensor,
    routing: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    anchor: Tensor | None,
    reduce: bool,
) -> Tensor:
    lead = topk_idx.shape[:1] if reduce else topk_idx.shape
    return y.new_empty((*lead, y.shape[-1]))


# ---- their gradients: see autograd.py


def _save_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.handle, _, routing, topk_idx, topk_weights = inputs
    ctx.has_weights = topk_weights is not None
    ctx.is_flat = _handle(ctx.handle).config.layout == "flat"
    ctx.save_for_backward(routing, topk_idx, output[5] if ctx.is_flat else None)


def _dispatch_backward(ctx: Any, anchor: Any, rows: Tensor, weights: Any, *others: Any) -> Any:
    routing, topk_idx, slots = ctx.saved_tensors
    x = _combine(ctx.handle, rows.contiguous(), routing, topk_idx, None, None, True)
    of_weights = None
    if ctx.has_weights and ctx.is_flat:
        of_weights = _combine(ctx.handle, weights.masked_fill(slots < 0, 0), routing, topk_idx, None, None, True)
    elif ctx.has_weights:
        values = weights.unsqueeze(-1).contiguous()
        of_weights = _combine(ctx.handle, values, routing, topk_idx, None, None, False).squeeze(-1)
    return None, x, None, None, of_weights


_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)


def _save_combine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.handle, y, routing, topk_idx, topk_weights, anchor, reduce = inputs
    if not reduce:
        raise ConfigError("combine: argument `reduce`: wanted True where gradients are needed, got False")
    ctx.has_weights, ctx.has_anchor, ctx.dtype = topk_weights is not None, anchor is not None, y.dtype
    ctx.save_for_backward(routing, topk_idx, topk_weights, y if ctx.has_weights else None)


def _combine_backward(ctx: Any, out: Tensor) -> Any:
    routing, topk_idx, topk_weights, y = ctx.saved_tensors
    gradient = out.to(ctx.dtype).contiguous()
    _, rows, weights, counts, _, _, tokens = _dispatch(ctx.handle, gradient, routing, topk_idx, topk_weights)
    of_weights = None
    is_real = _is_real(ctx.handle, counts, tokens)
    if ctx.has_weights:
        dtype = torch.float64 if ctx.dtype is torch.float64 else torch.float32
        products = (y.to(dtype) * rows.to(dtype)).sum(dim=-1, keepdim=True)
        products = torch.where(is_real, products, 0)
        of_weights = _combine(ctx.handle, products, routing, topk_idx, None, None, False).squeeze(-1)
        of_weights = of_weights.to(topk_weights.dtype)
        rows = (rows.to(dtype) * weights.unsqueeze(-1).to(dtype)).to(ctx.dtype)
    rows = torch.where(is_real, rows, 0)
    anchor = out.new_zeros(0, dtype=torch.float32) if ctx.has_anchor else None
    return None, rows, None, None, of_weights, anchor, None


def _is_real(handle: int, counts: Tensor, tokens: Tensor) -> Tensor:
    """bool [..., 1]: where there is a row."""
    if _handle(handle).config.layout == "padded":
        return (torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]).unsqueeze(-1)
    return (tokens >= 0).unsqueeze(-1)


_combine.register_autograd(_combine_backward, setup_context=_save_combine)
