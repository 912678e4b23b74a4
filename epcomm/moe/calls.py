"""From a call to a bound operation, the quick way or the careful way.

What was seen to be right before is recognised by its kind (dtypes, widths, strides, options) and not looked at again,
but for the number of rows. Anything else is validated and bound. An argument error fails the communicator, so that
peers which are in the operation learn of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epcomm.errors import CapacityError, ClosedError, ConfigError, UnsupportedError
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.protocol.arithmetic import ROW_SUM_DTYPES
from epcomm.moe.bind import Binder, Bound
from epcomm.moe.checks import (
    INDEX_DTYPES,
    as_tuple,
    check_bias,
    check_flat_combine,
    check_indices,
    check_out,
    check_quantized_combine,
    check_quantizer,
    check_row_bytes,
    check_rows,
    check_weights,
    combined_row_bytes,
)
from epcomm.moe.config import Config
from epcomm.moe.quantize import X_DTYPES, Quantizer
from epcomm.moe.routing import Routing
from epcomm.runtime import Runtime

_MOST_REMEMBERED = 1024  # kinds of call: shapes that vary without end must not grow memory without end


class Calls:
    """The calls of one handle. `generation` and `is_closed` are the handle's."""

    def __init__(self, runtime: Runtime, binder: Binder, config: Config, name: str):
        self._runtime, self._binder, self._config, self._name = runtime, binder, config, name
        self.generation, self.is_closed = runtime.generation, False
        self._device = runtime.target.device
        self._row_bytes = config.row_bytes
        self._is_flat = config.layout == "flat"
        self._fixed_shape: tuple[int, ...] = ()
        if config.layout == "padded":
            self._fixed_shape = len(config.experts_of(runtime.rank)), runtime.size * config.max_tokens
        elif config.has_fixed_rows:
            self._fixed_shape = (config.capacity,)
        self._dispatches: dict[Any, Bound] = {}
        self._combines: dict[Any, Bound] = {}

    def indices(self, topk_idx: Any) -> torch.Tensor:
        """`topk_idx` as `route` wants it, but for its values."""
        try:
            num_tokens, topk = topk_idx.shape
            if (
                num_tokens <= self._config.max_tokens
                and topk <= self._config.topk
                and topk_idx.dtype in INDEX_DTYPES
                and topk_idx.device == self._device
                and topk_idx.is_contiguous()
                and not self.is_closed
            ):
                return topk_idx
        except (AttributeError, TypeError, ValueError):
            pass  # the careful way says what is wrong
        return self.checked(self._check_indices, topk_idx)

    def weights(self, operation: str, weights: Any, routing: Any) -> torch.Tensor | None:
        """The weights as contiguous float32; None if there is no routing to fit them to, which is refused later."""
        if not isinstance(routing, Routing):
            return None
        where = f"rank {self._runtime.rank}: {operation}"
        return self.checked(check_weights, where, weights, self._device, routing.num_tokens, routing.topk)

    def dispatch(self, x: Any, routing: Any, has_weights: bool) -> tuple[Any, Bound]:
        """(tensors of x, bound operation) of a dispatch."""
        key = self._key(routing, has_weights, True, x, ())
        bound = self._dispatches.get(key)
        if bound is None or self._misfits(routing, x, (routing.num_tokens,)):
            return self.checked(self._bind_dispatch, x, routing, has_weights)
        return x, bound

    def quantized_dispatch(self, x: Any, quantize: Any, routing: Any, has_weights: bool) -> tuple[Any, Bound]:
        """(tensors of the table that are in memory, bound operation) of a dispatch of x as `quantize` makes it."""
        key = self._key(routing, has_weights, quantize, (x,), ()) if isinstance(quantize, Quantizer) else None
        bound = self._dispatches.get(key)
        if bound is None or self._misfits(routing, (x,), (routing.num_tokens,)):
            x, bound = self.checked(self._bind_quantized_dispatch, x, quantize, routing, has_weights)
        return (x,) if bound.prepare is None else bound.prepare(x), bound

    def combine(
        self, y: Any, routing: Any, has_weights: bool, bias: Any, outs: Any, reduce: bool, quantize: Any = None
    ) -> tuple[Any, Any, Bound]:
        """(tensors of y, results, bound operation) of a combine; `outs` is empty if the caller gave no results."""
        option = reduce if quantize is None else _quantized(reduce, quantize)
        bound = self._combines.get(self._key(routing, has_weights, option, y, outs))
        if (
            bound is None
            or bias is not None
            or not routing.has_places
            or self._misfits(routing, y, routing.rows_shape)  # None, which fits nothing, before it was placed
        ):
            return self.checked(self._bind_combine, y, routing, has_weights, bias, outs, reduce, quantize)
        lead = self._out_shape(routing, reduce)
        if not outs:
            return y, tuple(torch.empty((*lead, row.shape[-1]), dtype=row.dtype, device=row.device) for row in y), bound
        for result in outs:
            if result.shape[:-1] != lead:
                return self.checked(self._bind_combine, y, routing, has_weights, bias, outs, reduce, quantize)
        return y, outs, bound

    def rows_shape(self, routing: Routing) -> tuple[int, ...]:
        """The shape of this rank's received rows, without their width."""
        return self._fixed_shape or (routing.num_rows,)

    def _out_shape(self, routing: Routing, reduce: bool) -> tuple[int, ...]:
        """The shape of combine's result, without its width."""
        return (routing.num_tokens,) if reduce else (routing.num_tokens, routing.topk)

    # ---- the quick way

    def _key(self, routing: Any, has_weights: bool, option: Any, tensors: Any, outs: Any) -> Any:
        """Everything that a bound operation depends on, or None for what isn't even a tensor."""
        try:
            key = [routing.topk, routing.index_dtype, has_weights, option]
            for t in tensors:  # not in comprehensions, each of which is a call
                key += (t.dtype, t.shape[-1], t.stride(), t.device, t.is_neg())
            for t in outs:
                key += (t.dtype, t.shape[-1], t.stride(), t.device)
            return tuple(key)
        except (AttributeError, IndexError, TypeError):
            return None

    def _misfits(self, routing: Routing, tensors: Any, lead: tuple[int, ...] | None) -> bool:
        """True if a tensor of a known kind doesn't have this call's rows, or the routing can't be used here."""
        for tensor in tensors:
            if tensor.shape[:-1] != lead:
                return True
        return routing.calls is not self or routing.generation != self.generation or self.is_closed

    # ---- the careful way

    def checked(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a validation."""
        try:
            return function(*args)
        except (ConfigError, CapacityError, UnsupportedError) as error:
            raise self._runtime.reject(error) from None

    def _check_indices(self, topk_idx: Any) -> torch.Tensor:
        where = f"rank {self._runtime.rank}: route"
        self._check_open(where)
        return check_indices(where, topk_idx, self._device, self._config.max_tokens, self._config.topk)

    def _bind_dispatch(self, x: Any, routing: Any, has_weights: bool) -> tuple[Any, Bound]:
        where = f"rank {self._runtime.rank}: dispatch"
        self._check_routing(where, "routing", routing)
        x = as_tuple(where, "x", x)
        tensors = [check_rows(where, "x", tensor, self._device, (routing.num_tokens,)) for tensor in x]
        check_row_bytes(where, "x", tensors, self._row_bytes)
        bound = self._binder.dispatch(tensors, routing.topk, routing.index_dtype, has_weights)
        if _are_read_in_place(x, tensors):
            _remember(self._dispatches, self._key(routing, has_weights, True, x, ()), bound)
        return tensors, bound

    def _bind_quantized_dispatch(
        self, x: Any, quantize: Any, routing: Any, has_weights: bool
    ) -> tuple[torch.Tensor, Bound]:
        where = f"rank {self._runtime.rank}: dispatch"
        self._check_routing(where, "routing", routing)
        check_quantizer(where, quantize)
        rows = check_rows(where, "x", x, self._device, (routing.num_tokens,), X_DTYPES)
        check_row_bytes(where, "x", quantize.result_like(rows), self._row_bytes)
        bound = self._binder.quantized_dispatch(rows, quantize, routing.topk, routing.index_dtype, has_weights)
        if _are_read_in_place((x,), (rows,)):
            _remember(self._dispatches, self._key(routing, has_weights, quantize, (x,), ()), bound)
        return rows, bound

    def _bind_combine(
        self, y: Any, routing: Any, has_weights: bool, bias: Any, outs: Any, reduce: bool, quantize: Any
    ) -> tuple[Any, Any, Bound]:
        where = f"rank {self._runtime.rank}: combine"
        self._check_routing(where, "received", routing)
        if not routing.is_placed:
            raise ConfigError(
                f"{where}: argument `received`: wanted a routing that was dispatched (latency mode exchanges counts in "
                "dispatch), got one that was not dispatched yet"
            )
        if reduce and not routing.has_places:
            raise ConfigError(
                f"{where}: argument `received`: wanted a routing that was dispatched (wire='rank' sums rows where "
                "dispatch put them), got one that was not dispatched yet"
            )
        if self._is_flat:
            check_flat_combine(where, has_weights, reduce)
        lead = self.rows_shape(routing)
        y = as_tuple(where, "y", y)
        if quantize is not None:
            check_quantized_combine(where, y, quantize, bias)
        dtypes = ROW_SUM_DTYPES if quantize is None else X_DTYPES
        rows = [check_rows(where, "y", tensor, self._device, lead, dtypes) for tensor in y]
        total = None if quantize is None else combined_row_bytes(quantize, rows[0])
        check_row_bytes(where, "y", rows, self._row_bytes, total)
        shapes = [(*self._out_shape(routing, reduce), row.shape[-1]) for row in rows]
        results = check_out(where, outs or None, self._device, shapes, [row.dtype for row in rows], ROW_SUM_DTYPES)
        bound = self._binder.combine(rows, results, routing.topk, has_weights, reduce, quantize)
        if bias is not None:
            addends = check_bias(where, bias, rows, routing.num_tokens, reduce)
            bound = bound._replace(keep=addends)
            for i, addend in enumerate(addends):
                record = i * protocol.TENSOR_WORDS
                bound.table[record + protocol.T_BIAS] = addend.data_ptr()
                bound.table[record + protocol.T_BIAS_STRIDE] = addend.stride(0) * addend.element_size()
        elif _are_read_in_place(y, rows):
            option = reduce if quantize is None else _quantized(reduce, quantize)
            _remember(self._combines, self._key(routing, has_weights, option, y, outs), bound)
        return rows, results, bound

    def results_of_dispatch(self, out: Any, bound: Bound, routing: Routing) -> tuple[torch.Tensor, ...] | None:
        """The caller's tensors for a dispatch's rows, if there are any and they fit."""
        if out is None:
            return None
        where = f"rank {self._runtime.rank}: dispatch"
        shapes = [(*self.rows_shape(routing), width) for _, width, _ in bound.tensors]
        in_rows = out
        if bound.quantize is not None and isinstance(out, (tuple, list)):
            in_rows = [bound.quantize.in_rows(part) if isinstance(part, torch.Tensor) else part for part in out]
        check_out(where, in_rows, self._device, shapes, [dtype for dtype, _, _ in bound.tensors])
        return as_tuple(where, "out", out)

    def check_differentiable(self, operation: str, options: dict[str, Any], routing: Any) -> None:
        """Refuses what has no gradient."""
        where = f"rank {self._runtime.rank}: {operation}"
        self._check_routing(where, "routing", routing)
        usual = {"reduce": True, "split": False, "async_op": False}
        for name, value in options.items():
            wanted = usual.get(name)
            if value is not wanted:
                raise ConfigError(
                    f"{where}: argument `{name}`: wanted {wanted} where gradients are needed (or torch.no_grad()), got "
                    f"{type(value).__name__ if wanted is None else value!r}"
                )

    def check_traced(self, **options: Any) -> None:
        """Refuses what `ops` has no operator for."""
        for name, value in options.items():
            if value:
                where = f"rank {self._runtime.rank}: dispatch or combine"
                raise ConfigError(f"{where}: argument `{name}`: wanted none while it is traced, got {value!r}")

    def _check_open(self, where: str) -> None:
        if self.is_closed or self._runtime.closed:
            raise ClosedError(f"{where}: {self._name if self.is_closed else 'the communicator'} is closed")

    def _check_routing(self, where: str, name: str, routing: Any) -> None:
        self._check_open(where)
        if not isinstance(routing, Routing):
            wanted = "what route returned" if name == "routing" else "what dispatch or route returned"
            raise ConfigError(f"{where}: argument `{name}`: wanted {wanted}, got {type(routing).__name__}")
        if routing.calls is not self and routing.ep._calls is self:  # of this handle, as it was
            raise ClosedError(f"{where}: argument `{name}`: it is from before the handle's placement was changed")
        if routing.calls is not self:
            names = f"{self._name}, got one of another handle, {routing.ep.name}"
            raise ConfigError(f"{where}: argument `{name}`: wanted a routing of {names}")
        if routing.generation != self.generation:
            raise ClosedError(f"{where}: argument `{name}`: it is from before the communicator was reset")


def _quantized(reduce: bool, quantize: Any) -> Any:
    """An option of a combine by which it is known; what is no Quantizer is unknown, and refused then."""
    return reduce, quantize if isinstance(quantize, Quantizer) else None


def _are_read_in_place(tensors: Any, rows: Any) -> bool:
    """True if the kernel reads the caller's tensors as they are: the next of their kind needs no copy either."""
    for tensor, row in zip(tensors, rows, strict=True):
        has_gaps = row.stride(1) != 1 and row.shape[1] != 1  # of no consequence, and left so, where there are no rows
        if row.data_ptr() != tensor.data_ptr() or has_gaps or tensor.is_complex():
            return False
    return True


def _remember(bound: dict[Any, Bound], key: Any, value: Bound) -> None:
    """Keeps a bound operation for the next call of its kind."""
    if len(bound) >= _MOST_REMEMBERED:
        bound.clear()
    bound[key] = value
