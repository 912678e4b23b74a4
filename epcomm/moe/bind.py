"""From a kind of call to a bound operation: validated once, with everything that doesn't change from call to call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from epcomm.device.control import LINE
from epcomm.device.cpu.compile import Kernel
from epcomm.heap.layout import align_up
from epcomm.kernels.cpu.combine import combine
from epcomm.kernels.cpu.counts import exchange_counts
from epcomm.kernels.cpu.dispatch import dispatch
from epcomm.kernels.cpu.route import route
from epcomm.kernels.cpu.row_sum import row_sum
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.config import Config
from epcomm.moe.memory import Memory
from epcomm.moe.received import Tensors
from epcomm.operation import Operation, parameter_block
from epcomm.runtime import Runtime


class Bound(NamedTuple):
    """An operation and the table of its tensors, in which a call sets the addresses."""

    operation: Operation
    table: memoryview  # of 64-bit words
    address: int  # of the table
    tensors: Tensors
    keep: Any = None  # owns memory that the table points to


class Binder:
    """The operations of one handle."""

    def __init__(self, runtime: Runtime, memory: Memory, config: Config, name: str):
        self._runtime, self._memory, self._config, self._name = runtime, memory, config, name
        self._operations: dict[str, Operation] = {}
        self.route = self._operation(route, f"route({name})")
        self.route_context = runtime.new_context(sequenced=False)  # it meets no peer
        self.exchange_counts = self._operation(exchange_counts, f"exchange of counts of route({name})")

    def _operation(self, kernel: Kernel, text: str) -> Operation:
        operation = self._operations.get(text)
        if operation is None:
            args = parameter_block(protocol.NUM_WORDS)
            args[protocol.STATE] = self._memory.state.ctypes.data
            args[protocol.LATENCY] = self._config.mode == "latency"
            operation = self._operations[text] = self._runtime.operation(kernel, args, text)
        return operation

    def _bind(self, operation: Operation, rows: Sequence[torch.Tensor], first_offset: int) -> tuple[Bound, np.ndarray]:
        """Lays the tensors' rows out in a block, each aligned to a line."""
        table = np.zeros(len(rows) * protocol.TENSOR_WORDS, dtype=np.int64)
        records = table.reshape(len(rows), protocol.TENSOR_WORDS)
        offset, tensors, total = 0, [], 0
        for record, tensor in zip(records, rows, strict=True):
            width, item = tensor.shape[1], tensor.element_size()
            record[protocol.T_STRIDE] = tensor.stride(0) * item
            record[protocol.T_ROW_BYTES], record[protocol.T_OFFSET] = width * item, first_offset + offset
            record[protocol.T_ELEMENTS] = width
            tensors.append((tensor.dtype, width, offset))
            offset, total = align_up(offset + self._memory.capacity * width * item, LINE), total + width * item
        operation.args[protocol.NUM_TENSORS], operation.args[protocol.ROW_BYTES_TOTAL] = len(rows), total
        return Bound(operation, table.data, table.ctypes.data, tuple(tensors)), records

    def dispatch(self, x: Sequence[torch.Tensor], topk: int, index_dtype: torch.dtype, has_weights: bool) -> Bound:
        """The dispatch of tensors like these."""
        text = (
            f"dispatch({self._name}, x=[{_describe(x)}], topk={topk}, {index_dtype}, "
            f"topk_weights={'given' if has_weights else None})"
        )
        return self._bind(self._operation(dispatch, text), x, self._memory.regions.rows)[0]

    def combine(
        self, y: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], topk: int, has_weights: bool, reduce: bool
    ) -> Bound:
        """The combine of tensors like these. What a rank does with its result is its own affair."""
        text = (
            f"combine({self._name}, y=[{_describe(y)}], topk={topk}, "
            f"topk_weights={'given' if has_weights else None}, reduce={reduce})"
        )
        operation = self._operation(combine, text)
        operation.args[protocol.REDUCE] = reduce
        bound, records = self._bind(operation, y, 0)
        for record, tensor, out in zip(records, y, outs, strict=True):
            record[protocol.T_ROW_SUM] = row_sum(tensor.dtype, out.dtype).address
            # torch's strides may be anything where the extent is 1: that of contiguous slots is not taken from it
            stride = out.stride(0) if reduce else out.shape[-1]
            record[protocol.T_OUT_STRIDE] = stride * out.element_size()
        return bound


def _describe(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tensor.dtype} x {tensor.shape[-1]}" for tensor in tensors)
