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
from epcomm.moe.config import Config
from epcomm.moe.memory import Memory
from epcomm.moe.quantize import Float8
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
    keep: Any = None  # owns memory that the table points to
    prepare: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None  # makes the table's tensors of the caller's


class Binder:
    """The operations of one handle."""

    def __init__(self, runtime: Runtime, memory: Memory, config: Config, name: str):
        self._runtime, self._memory, self._config, self._name = runtime, memory, config, name
        self._operations: dict[tuple[str, Any], Operation] = {}
        self._target = runtime.target
        self.route = self._operation(self._target.route(), f"route({name})")
        self.route_context = runtime.new_context(sequenced=False)  # it meets no peer
        self._sizes = config.num_experts, runtime.size
        exchange_counts = self._target.exchange_counts(*self._sizes)
        self.exchange_counts = self._operation(exchange_counts, f"exchange of counts of route({name})")

    def _operation(self, kernel: Kernel, text: str, variant: Any = None) -> Operation:
        """`variant` tells apart operations that are the same to peers."""
        operation = self._operations.get((text, variant))
        if operation is None:
            args = ParameterBlock(self._target, protocol.NUM_WORDS)
            args.words[protocol.STATE] = self._memory.state_address
            args.words[protocol.LATENCY] = self._config.mode == "latency"
            operation = self._operations[text, variant] = self._runtime.operation(kernel, args, text)
        return operation

    def _table(self, rows: Sequence[torch.Tensor], first_offset: int) -> tuple[np.ndarray, Tensors]:
        """The records of tensors like these: their rows lie in a block one after the other, each aligned to a line."""
        records = np.zeros((len(rows), protocol.TENSOR_WORDS), dtype=np.int64)
        offset, tensors = 0, []
        for record, tensor in zip(records, rows, strict=True):
            width, item = tensor.shape[1], tensor.element_size()
            record[protocol.T_STRIDE] = tensor.stride(0) * item
            record[protocol.T_ROW_BYTES], record[protocol.T_OFFSET] = width * item, first_offset + offset
            record[protocol.T_ELEMENTS] = width
            tensors.append((tensor.dtype, width, offset))
            offset = align_up(offset + self._memory.capacity * width * item, LINE)
        return records, tuple(tensors)

    def _bound(self, operation: Operation, records: np.ndarray, tensors: Tensors) -> Bound:
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
        operation = self._operation(self._target.dispatch(*self._sizes), text)
        return self._bound(operation, *self._table(x, self._memory.regions.rows))

    def quantized_dispatch(
        self, x: torch.Tensor, quantize: Float8, topk: int, index_dtype: torch.dtype, has_weights: bool
    ) -> Bound:
        """The dispatch of what `quantize` makes of a tensor like this one."""
        wire = quantize.result_like(x)
        text = self._dispatch_text(wire, topk, index_dtype, has_weights, f", quantize={quantize}")
        records, tensors = self._table(wire, self._memory.regions.rows)
        kernel = self._target.quantized_dispatch(*self._sizes, x.dtype, quantize.scales)
        if kernel is not None:
            records[0, protocol.T_STRIDE] = x.stride(0) * x.element_size()
        operation = self._operation(kernel or self._target.dispatch(*self._sizes), text, x.dtype)
        bound = self._bound(operation, records, tensors)
        fits = x.shape[1] * x.element_size() <= self._config.hidden * self._config.dtype.itemsize
        prepare = quantize.quantized if kernel is None else None
        return bound._replace(outputs=((x.dtype, x.shape[1], 0),), outputs_fit=fits, prepare=prepare)

    def _dispatch_text(
        self, wire: Sequence[torch.Tensor], topk: int, index_dtype: torch.dtype, has_weights: bool, more: str
    ) -> str:
        return (
            f"dispatch({self._name}, x=[{_describe(wire)}], topk={topk}, {index_dtype}, "
            f"topk_weights={'given' if has_weights else None}{more})"
        )

    def combine(
        self, y: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], topk: int, has_weights: bool, reduce: bool
    ) -> Bound:
        """The combine of tensors like these. What a rank does with its result is its own affair."""
        text = (
            f"combine({self._name}, y=[{_describe(y)}], topk={topk}, "
            f"topk_weights={'given' if has_weights else None}, reduce={reduce})"
        )
        records, tensors = self._table(y, 0)
        dtypes = tuple((tensor.dtype, out.dtype) for tensor, out in zip(y, outs))
        kernel = self._target.combine(records, dtypes, self._runtime.size)
        for record, out in zip(records, outs, strict=True):
            # torch's strides may be anything where the extent is 1: that of contiguous slots is not taken from it
            stride = out.stride(0) if reduce else out.shape[-1]
            record[protocol.T_OUT_STRIDE] = stride * out.element_size()
        operation = self._operation(kernel, text, dtypes)
        operation.args.words[protocol.REDUCE] = reduce
        return self._bound(operation, records, tensors)


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.dtype} x {tensor.shape[-1]}" for tensor in tensors)
