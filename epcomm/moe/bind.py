"""From a kind of call to a bound operation: validated once, with everything that doesn't change from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from epcomm.device.control import LINE
from epcomm.heap.layout import align_up
from epcomm.heap.private import PrivateMemory
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.target import Kernel
from epcomm.moe.checks import combined_row_bytes
from epcomm.moe.config import Config
from epcomm.moe.memory import Memory
from epcomm.moe.quantize import Quantizer
from epcomm.moe.received import Tensors
from epcomm.operation import Operation, ParameterBlock
from epcomm.runtime import Runtime


class Bound(NamedTuple):
    """An operation and the table of its tensors, in which a call sets the addresses."""

    operation: Operation
    table: memoryview  # of 64-bit words
    addresses: range  # where in it each tensor's address is
    memory: PrivateMemory  # of the table
    tensors: Tensors
    outputs: Tensors  # what `Received.output_buffer` gives for rows like these
    outputs_fit: bool = True  # in an output block
    is_staged: bool = False  # combine: what peers read is made of the rows, wherever these lie
    keep: Any = None  # owns memory that the table points to
    prepare: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None  # makes the table's tensors of the caller's
    quantize: Quantizer | None = None  # dispatch: the format of the tensors


class Binder:
    """The operations of one handle."""

    def __init__(self, runtime: Runtime, memory: Memory, config: Config, name: str):
        self._runtime, self._memory, self._config, self._name = runtime, memory, config, name
        self._operations: dict[tuple[str, Any], Operation] = {}
        self._halves: dict[ParameterBlock, Operation] = {}
        self._target, self._waited_for = runtime.target, runtime.target.waited_for
        # what the host has to wait for: bad indices, and how many rows there are
        self.route = self._operation(self._waited_for(self._target.route(), config.host_sync), f"route({name})")
        self._is_waited_for = config.host_sync and config.mode == "latency"  # dispatch: else route has exchanged counts
        self.route_context = runtime.new_context(sequenced=False)  # it meets no peer
        self._sizes = config.most_physical, runtime.size
        exchange_counts = self._waited_for(self._target.exchange_counts(*self._sizes), config.host_sync)
        self.exchange_counts = self._operation(exchange_counts, f"exchange of counts of route({name})")

    def _operation(self, kernel: Kernel, text: str, has_weights: bool = False, variant: Any = None) -> Operation:
        """`variant` tells apart operations that are the same to peers."""
        operation = self._operations.get((text, variant))
        if operation is None:
            args = ParameterBlock(self._target, protocol.NUM_WORDS)
            args.words[protocol.STATE] = self._memory.state_address
            args.words[protocol.HAS_WEIGHTS] = has_weights
            args.words[protocol.LATENCY] = self._config.mode == "latency"
            operation = self._operations[text, variant] = self._runtime.operation(kernel, args, text)
        return operation

    def second_half(self, operation: Operation, kernel_of: Callable[[Any], Kernel]) -> Operation:
        """What receives after an operation that only sent: outside of the sequence, which the first half is in."""
        half = self._halves.get(operation.args)
        if half is None:
            kernel = kernel_of(operation.code)
            half = self._halves[operation.args] = self._runtime.half_of(operation, kernel)
        return half

    def _table(self, rows: Sequence[torch.Tensor]) -> tuple[np.ndarray, Tensors]:
        """The records of tensors like these, with no place in a block yet."""
        records = np.zeros((len(rows), protocol.TENSOR_WORDS), dtype=np.int64)
        for record, tensor in zip(records, rows, strict=True):
            width, item = tensor.shape[1], tensor.element_size()
            record[protocol.T_STRIDE] = tensor.stride(0) * item
            record[protocol.T_ROW_BYTES], record[protocol.T_ELEMENTS] = width * item, width
        offsets = _offsets(records, self._memory.capacity)
        return records, tuple((row.dtype, row.shape[1], int(at)) for row, at in zip(rows, offsets))

    def _dispatch_table(self, rows: Sequence[torch.Tensor]) -> tuple[np.ndarray, Tensors]:
        records, tensors = self._table(rows)
        in_block = self._memory.regions.rows + _offsets(records, self._memory.capacity)
        records[:, protocol.T_OFFSET] = in_block
        if self._config.is_expanded:
            in_arrivals = self._memory.arrivals.rows + _offsets(records, self._config.most_arrivals)
            records[:, protocol.T_OFFSET], records[:, protocol.T_EXPANDED] = in_arrivals, in_block
        departing = self._memory.departing.rows + _offsets(records, self._memory.departure_rows)
        records[:, protocol.T_DEPARTURE] = departing
        return records, tensors

    def _bound(self, operation: Operation, by_rank: bool, records: np.ndarray, tensors: Tensors) -> Bound:
        operation.args.words[protocol.BY_RANK] = by_rank
        operation.args.words[protocol.NUM_TENSORS] = len(records)
        operation.args.words[protocol.ROW_BYTES_TOTAL] = records[:, protocol.T_ROW_BYTES].sum()
        memory = self._target.private(records.nbytes)
        table = memory.array.view(np.int64)
        table[:] = records.reshape(-1)
        addresses = range(protocol.T_ADDRESS, table.size, protocol.TENSOR_WORDS)
        return Bound(operation, table.data, addresses, memory, tensors, tensors)

    def dispatch(self, x: Sequence[torch.Tensor], topk: int, index_dtype: torch.dtype, has_weights: bool) -> Bound:
        """The dispatch of tensors like these."""
        text = self._dispatch_text(x, topk, index_dtype, has_weights, "")
        kernel = self._target.dispatch(*self._sizes, self._config.is_expanded)
        operation = self._operation(self._waited_for(kernel, self._is_waited_for), text, has_weights)
        return self._bound(operation, self._config.is_by_rank, *self._dispatch_table(x))

    def quantized_dispatch(
        self, x: torch.Tensor, quantize: Quantizer, topk: int, index_dtype: torch.dtype, has_weights: bool
    ) -> Bound:
        """The dispatch of what `quantize` makes of a tensor like this one."""
        wire = quantize.result_like(x)
        text = self._dispatch_text(wire, topk, index_dtype, has_weights, f", quantize={quantize}")
        records, tensors = self._dispatch_table(wire)
        sizes, form = (*self._sizes, self._config.is_expanded), (quantize.form, quantize.kernel_argument)
        kernel = self._target.quantized_dispatch(records, *sizes, x.dtype, *form)
        if kernel is not None:
            records[0, protocol.T_STRIDE] = x.stride(0) * x.element_size()
            records[0, protocol.T_ELEMENTS] = x.shape[1]
        used = self._waited_for(kernel or self._target.dispatch(*sizes), self._is_waited_for)
        operation = self._operation(used, text, has_weights, x.dtype)
        bound = self._bound(operation, self._config.is_by_rank, records, tensors)
        fits = x.shape[1] * x.element_size() <= self._config.hidden * self._config.dtype.itemsize
        prepare = quantize.quantized if kernel is None else None
        outputs = ((x.dtype, x.shape[1], 0),)
        return bound._replace(outputs=outputs, outputs_fit=fits, prepare=prepare, quantize=quantize)

    def _dispatch_text(
        self, wire: Sequence[torch.Tensor], topk: int, index_dtype: torch.dtype, has_weights: bool, more: str
    ) -> str:
        return (
            f"dispatch({self._name}, x=[{_describe(wire)}], topk={topk}, {index_dtype}, "
            f"topk_weights={'given' if has_weights else None}{more})"
        )

    def combine(
        self, y: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], topk: int, has_weights: bool, reduce: bool,
        quantize: Quantizer | None,
    ) -> Bound:  # fmt: skip
        """The combine of tensors like these. What a rank does with its result is its own affair."""
        text = (
            f"combine({self._name}, y=[{_describe(y)}], topk={topk}, "
            f"topk_weights={'given' if has_weights else None}, reduce={reduce}"
            f"{'' if quantize is None else f', quantize={quantize}'})"
        )
        records, tensors = self._table(y)
        if quantize is not None:
            records[0, protocol.T_ROW_BYTES] = combined_row_bytes(quantize, y[0])
        by_rank = self._config.is_by_rank and reduce
        is_summed_here = by_rank and self._config.is_expanded
        # what travels back are rows like these, or their sums per token
        records[:, protocol.T_OFFSET] = _offsets(
            records, self._config.most_arrivals if is_summed_here else self._memory.capacity
        )
        records[:, protocol.T_RETURN] = _offsets(records, self._memory.return_rows)
        dtypes = tuple((tensor.dtype, out.dtype) for tensor, out in zip(y, outs))
        form = None if quantize is None else quantize.form
        kernel = self._target.combine(records, dtypes, self._runtime.size, is_summed_here, form)
        for record, out in zip(records, outs, strict=True):
            # torch's strides may be anything where the extent is 1: that of contiguous slots is not taken from it
            stride = out.stride(0) if reduce else out.shape[-1]
            record[protocol.T_OUT_STRIDE] = stride * out.element_size()
        operation = self._operation(kernel, text, has_weights, dtypes)
        operation.args.words[protocol.REDUCE] = reduce
        is_staged = is_summed_here or quantize is not None
        return self._bound(operation, by_rank, records, tensors)._replace(is_staged=is_staged)


def _offsets(records: np.ndarray, capacity: int) -> np.ndarray:
    """Where the rows of each tensor start: one tensor after the other, `capacity` rows each, aligned to a line."""
    sizes = [align_up(capacity * int(row_bytes), LINE) for row_bytes in records[:, protocol.T_ROW_BYTES]]
    return np.cumsum([0, *sizes[:-1]])


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.dtype} x {tensor.shape[-1]}" for tensor in tensors)
