"""From a validated call to a bound operation: kernel, parameter block and tensors table, made once per kind of call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from epcomm.device.control import LINE
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
from epcomm.runtime import Operation, Runtime, parameter_block


class DispatchKey(NamedTuple):
    """What tells one kind of dispatch from another: (dtype, width) per tensor, and the rest."""

    shapes: tuple[tuple[torch.dtype, int], ...]
    topk: int
    index_dtype: torch.dtype
    has_weights: bool


class CombineKey(NamedTuple):
    """What tells one kind of combine from another: (dtype, width, result dtype) per tensor, and the rest."""

    shapes: tuple[tuple[torch.dtype, int, torch.dtype], ...]
    topk: int
    has_weights: bool
    reduce: bool


class Bound(NamedTuple):
    """An operation, and the table in which each call sets its tensors' addresses and strides."""

    operation: Operation
    table: np.ndarray
    table_address: int
    tensors: Tensors


class Binder:
    """The operations of one handle."""

    def __init__(self, runtime: Runtime, memory: Memory, config: Config, name: str):
        self._runtime, self._memory, self._config, self._name = runtime, memory, config, name
        self._dispatches: dict[DispatchKey, Bound] = {}
        self._combines: dict[CombineKey, Bound] = {}
        self.route = runtime.operation(route.address, self._block(), f"route({name})")
        self.local_context = runtime.new_context(sequenced=False)
        self.exchange_counts = runtime.operation(exchange_counts.address, self._block(), f"route({name})")

    def _block(self) -> np.ndarray:
        args = parameter_block(protocol.NUM_WORDS)
        args[protocol.STATE] = self._memory.state.ctypes.data
        args[protocol.LATENCY] = self._config.mode == "latency"
        return args

    def _bind(
        self, kernel: int, text: str, tensors: list[tuple[torch.dtype, int]], first_offset: int, reduce: bool
    ) -> Bound:
        """Lays the tensors' rows out in a block, each aligned to a line."""
        args, table = self._block(), np.zeros((len(tensors), protocol.TENSOR_WORDS), dtype=np.int64)
        offset, described, total = 0, [], 0
        for record, (dtype, width) in zip(table, tensors, strict=True):
            row_bytes = width * dtype.itemsize
            record[protocol.T_ROW_BYTES], record[protocol.T_OFFSET] = row_bytes, first_offset + offset
            record[protocol.T_ELEMENTS] = width
            described.append((dtype, width, offset))
            offset, total = align_up(offset + self._memory.capacity * row_bytes, LINE), total + row_bytes
        args[protocol.NUM_TENSORS], args[protocol.ROW_BYTES_TOTAL] = len(tensors), total
        args[protocol.REDUCE] = reduce
        operation = self._runtime.operation(kernel, args, text, keep=table)
        return Bound(operation, table, table.ctypes.data, tuple(described))

    def dispatch(self, key: DispatchKey) -> Bound:
        """The dispatch of tensors of these dtypes and widths."""
        bound = self._dispatches.get(key)
        if bound is None:
            tensors = ", ".join(f"{dtype} x {width}" for dtype, width in key.shapes)
            text = (
                f"dispatch({self._name}, x=[{tensors}], topk={key.topk}, {key.index_dtype}, "
                f"topk_weights={'given' if key.has_weights else None})"
            )
            bound = self._bind(dispatch.address, text, list(key.shapes), self._memory.regions.rows, False)
            self._dispatches[key] = bound
        return bound

    def combine(self, key: CombineKey) -> Bound:
        """The combine of tensors of these dtypes and widths. What a rank does with its result is its own affair."""
        bound = self._combines.get(key)
        if bound is None:
            tensors = ", ".join(f"{dtype} x {width}" for dtype, width, _ in key.shapes)
            text = (
                f"combine({self._name}, y=[{tensors}], topk={key.topk}, "
                f"topk_weights={'given' if key.has_weights else None}, reduce={key.reduce})"
            )
            shapes = [(dtype, width) for dtype, width, _ in key.shapes]
            bound = self._bind(combine.address, text, shapes, 0, key.reduce)
            for record, (dtype, _, result_dtype) in zip(bound.table, key.shapes, strict=True):
                record[protocol.T_ROW_SUM] = row_sum(dtype, result_dtype).address
            self._combines[key] = bound
        return bound
