"""The handle of expert parallelism: route, dispatch, combine.

A call is validated, matched with an operation that was bound at its first use, given its blocks, and run: one kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from epcomm.device import control
from epcomm.errors import CapacityError, ClosedError, ConfigError
from epcomm.kernels.cpu.row_sum import ROW_SUM_DTYPES
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.bind import Binder, CombineKey, DispatchKey
from epcomm.moe.blocks import Lease
from epcomm.moe.checks import as_tuple, check_indices, check_out, check_row_bytes, check_rows, check_weights
from epcomm.moe.config import LAYOUTS, Config
from epcomm.moe.memory import Memory
from epcomm.moe.received import Received, copy_block
from epcomm.moe.routing import Routing, Workspace
from epcomm.runtime import Operation, Runtime
from epcomm.work import Fifo


class ExpertParallel:
    """Dispatch and combine for one shape of MoE layer. Made by `Communicator.expert_parallel`; all ranks call alike.

    Attributes: ``rank``, ``size``, ``config`` and ``local_expert_ids`` (global ids of this rank's experts, in local order).
    """

    def __init__(self, runtime: Runtime, fifo: Fifo, config: Config, name: str, closing: Operation):
        self._closing = closing  # the barrier of close()
        self._runtime, self._fifo, self.config, self.name = runtime, fifo, config, name
        self.rank, self.size, self.generation = runtime.rank, runtime.size, runtime.generation
        self.num_experts, self.alignment = config.num_experts, config.alignment
        self.layout_code, self._is_latency = LAYOUTS[config.layout], config.mode == "latency"
        self.local_expert_ids = config.experts_of(self.rank)
        self.rows_per_expert = self.size * config.max_tokens
        self._row_bytes = config.hidden * config.dtype.itemsize
        self._memory = Memory(runtime, config)
        self.regions = self._memory.regions
        self._state = self._memory.state
        self._binder = Binder(runtime, self._memory, config, name)
        self._workspaces: list[Workspace] = []
        self._output_last_read = [0] * config.blocks  # the last combine that read each output block
        self._closed = False
        runtime.on_reset(self)

    # ---- life

    @property
    def local_experts(self) -> torch.Tensor:
        """int64: global ids of this rank's experts, by local number."""
        return torch.tensor(self.local_expert_ids, dtype=torch.int64)

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's part of the handle's segment, by region; pages are taken when first used."""
        return {name: num_bytes for name, (_, num_bytes) in self._memory.layout.regions.items()}

    def start_generation(self, generation: int) -> None:
        """For `Communicator.reset`: routings and results from before are outdated, lent blocks stay lent."""
        self.generation = generation
        self._memory.start_generation(generation)
        self._output_last_read = [0] * self.config.blocks

    def close(self) -> None:
        """Collective: frees the handle. Tensors that are still alive stay valid."""
        if not self._closed:
            self._run(self._closing)
            self._closed = True

    def return_workspace(self, workspace: Workspace) -> None:
        """For a `Routing` that ends."""
        self._workspaces.append(workspace)

    # ---- operations

    def route(self, topk_idx: torch.Tensor) -> Routing:
        """Collective: decides which rows go where.

        Args:
            topk_idx: int32 or int64 [num_tokens <= max_tokens, any width <= topk]: experts of each token, -1 for none.

        Raises:
            ConfigError, CapacityError: the indices are wrong (before anything is sent; peers raise too).
            CapacityError: some rank would receive more than `max_recv_rows` (throughput mode; raised on all ranks,
            and the communicator stays usable).
        """
        where = f"rank {self.rank}: route"
        try:
            self._check_usable(where)
            topk_idx = check_indices(where, topk_idx, self.config.max_tokens, self.config.topk)
            workspace = self._workspaces.pop() if self._workspaces else self._new_workspace()
            num_tokens, topk = topk_idx.shape
            workspace.header[: protocol.INDEX_BYTES + 1] = num_tokens, topk, topk_idx.element_size()
            routing = Routing(self, workspace, num_tokens, topk, topk_idx.dtype)
            if self._run(self._binder.route, workspace.address, topk_idx.data_ptr(), local=True):
                self._bad_index(where, topk_idx, int(workspace.header[protocol.BAD_SLOT]))
        except (ConfigError, CapacityError) as error:
            raise self._runtime.reject(error) from None
        if not self._is_latency:
            if self._run(self._binder.exchange_counts, workspace.address):
                raise self._too_many_rows(where, routing)
            routing.is_placed = True
        return routing

    def dispatch(
        self,
        x: Any,
        routing: Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        out: Any = None,
        copy: bool = False,
    ) -> Received:
        """Collective: sends each token's row to the ranks of its experts.

        Args:
            x: [num_tokens, width] of any dtype, or a tuple of such tensors that share rows; rows may be strided.
            topk_weights: floats [num_tokens, topk], delivered with the rows, not applied.
            out: tensor(s) shaped like the result's ``x`` that receive the rows; they are then the result's ``x``.
            copy: put the result into memory of its own instead of lending a receive block.

        Raises:
            ConfigError, CapacityError: an argument is wrong (before anything is sent; peers raise too).
            CapacityError: more rows than `max_recv_rows` (latency mode; on all ranks, before rows are sent).
        """
        where = f"rank {self.rank}: dispatch"
        try:
            self._check_routing(where, routing)
            is_tuple = isinstance(x, (tuple, list))
            tensors = [check_rows(where, "x", t, (routing.num_tokens,)) for t in as_tuple(where, "x", x)]
            check_row_bytes(where, "x", sum(t.shape[1] * t.element_size() for t in tensors), self._row_bytes)
            if topk_weights is not None:
                topk_weights = check_weights(where, topk_weights, routing.num_tokens, routing.topk)
            if routing.is_placed or self.layout_code == protocol.PADDED:  # else its shape shows when the rows are here
                self._check_dispatch_out(where, out, tensors, routing)
        except (ConfigError, CapacityError) as error:
            raise self._runtime.reject(error) from None
        shapes = tuple((t.dtype, t.shape[1]) for t in tensors)
        bound = self._binder.dispatch(DispatchKey(shapes, routing.topk, routing.index_dtype, topk_weights is not None))
        for record, tensor in zip(bound.table, tensors, strict=True):
            record[protocol.T_ADDRESS] = tensor.data_ptr()
            record[protocol.T_STRIDE] = tensor.stride(0) * tensor.element_size()
        lease = self._memory.receive.take()
        assert lease is not None  # the last one is never lent for longer than a call
        weights = 0 if topk_weights is None else topk_weights.data_ptr()
        values = (routing.workspace.address, bound.table_address, weights, lease.index)
        try:
            status = self._run(bound.operation, *values)
        except BaseException:
            lease.release()  # whoever keeps the exception keeps this frame, and would keep the block
            raise
        if status != control.OK:
            lease.release()
            raise self._too_many_rows(where, routing)
        routing.is_placed = True
        buffer = self._memory.receive.buffer(lease)
        received = Received(self, routing, bound.tensors, is_tuple, topk_weights is not None, buffer)
        if out is None and not copy and self._memory.receive.free:
            return received
        try:
            return copy_block(received, self._check_dispatch_out(where, out, tensors, routing))
        except ConfigError as error:
            raise self._runtime.reject(error) from None
        finally:
            lease.release()

    def combine(
        self,
        y: Any,
        received: Received | Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        bias: Any = None,
        out: Any = None,
        reduce: bool = True,
    ) -> Any:
        """Collective: brings the experts' outputs back to their tokens and sums them.

        Args:
            y: rows like the dispatch's ``received.x`` with any width, or a tuple of such tensors; bfloat16, float16,
                float32 or float64. `Received.output_buffer` gives memory that is read in place.
            received: what dispatch returned, or its routing.
            topk_weights: floats [num_tokens, topk] that multiply the rows, in float32. None: a plain sum. Not in the
                flat layout, where the experts' outputs are already summed per rank.
            bias: [num_tokens, width] of y's dtype, added to the sum (a tuple if y is one).
            out: result tensor(s); their dtype is the result's (default: y's).
            reduce: False returns every slot's row instead of their sum, [num_tokens, topk, width]; zeros where the
                index was -1.

        Returns: [num_tokens, width], or a tuple if y is one. The sum is in float32 (float64: in float64), in slot order
        (flat: in rank order), and rounded once.
        """
        where = f"rank {self.rank}: combine"
        routing = received.routing if isinstance(received, Received) else received
        try:
            self._check_routing(where, routing)
            if not routing.is_placed:
                raise ConfigError(f"{where}: argument `received`: this routing was not dispatched yet")
            is_tuple = isinstance(y, (tuple, list))
            rows = [check_rows(where, "y", t, self._rows_shape(routing), ROW_SUM_DTYPES) for t in as_tuple(where, "y", y)]
            check_row_bytes(where, "y", sum(t.shape[1] * t.element_size() for t in rows), self._row_bytes)
            topk_weights = self._check_combine_weights(where, routing, topk_weights, reduce)
            lead = (routing.num_tokens,) if reduce else (routing.num_tokens, routing.topk)
            biases = self._check_bias(where, bias, rows, routing, reduce)
            outs = check_out(where, out, [(*lead, t.shape[1]) for t in rows], [t.dtype for t in rows], ROW_SUM_DTYPES)
        except (ConfigError, CapacityError) as error:
            raise self._runtime.reject(error) from None
        shapes = tuple((t.dtype, t.shape[1], o.dtype) for t, o in zip(rows, outs, strict=True))
        bound = self._binder.combine(CombineKey(shapes, routing.topk, topk_weights is not None, reduce))
        for record, row, result in zip(bound.table, rows, outs, strict=True):
            record[protocol.T_ADDRESS] = row.data_ptr()
            record[protocol.T_STRIDE] = row.stride(0) * row.element_size()
            record[protocol.T_OUT] = result.data_ptr()
            record[protocol.T_OUT_STRIDE] = result.stride(-2) * result.element_size()
            record[protocol.T_BIAS] = 0
        for record, addend in zip(bound.table, biases, strict=False):
            record[protocol.T_BIAS] = addend.data_ptr()
            record[protocol.T_BIAS_STRIDE] = addend.stride(0) * addend.element_size()
        block, stage_after = self._output_of(rows, bound.tensors)
        weights = 0 if topk_weights is None else topk_weights.data_ptr()
        self._run(bound.operation, routing.workspace.address, bound.table_address, weights, block, stage_after)
        self._output_last_read[block] = int(self._state[protocol.COMBINE_EPOCH])
        return tuple(outs) if is_tuple else outs[0]

    # ---- details

    def take_output(self) -> np.ndarray | None:
        """For `Received.output_buffer`: an output block that all peers have read, or None if there is no free one."""
        pool, seen = self._memory.outputs, int(self._state[protocol.DONE_SEEN])
        usable = [index for index in pool.free if self._output_last_read[index] <= seen]
        if not usable:
            return None
        pool.free.remove(min(usable))
        return pool.buffer(Lease(pool, min(usable)))

    def _output_of(self, rows: list[torch.Tensor], tensors: Any) -> tuple[int, int]:
        """(output block, STAGE_AFTER) for y: the block it lies in, or the staging block and when that is free."""
        pool = self._memory.outputs
        place = pool.locate(rows[0].data_ptr())
        if place is not None and all(
            row.is_contiguous() and row.data_ptr() == pool.address + place[0] * pool.block_bytes + offset
            for row, (_, _, offset) in zip(rows, tensors, strict=True)
        ):
            return place[0], -1
        staging = self.config.blocks - 1
        return staging, self._output_last_read[staging]

    def _run(self, operation: Operation, *values: int, local: bool = False) -> int:
        """Runs an operation in its turn; `local` ones meet no peer and have no place in the sequence."""
        context = self._binder.local_context if local else None
        if not self._fifo.busy:
            return self._runtime.run(operation, *values, context=context)
        status = [0]

        def run() -> None:
            status[0] = self._runtime.run(operation, *values, context=context)

        self._fifo.call(run, None, False)
        return status[0]

    def _rows_shape(self, routing: Routing) -> tuple[int, ...]:
        """The shape of this rank's received rows, without their width."""
        if self.layout_code == protocol.PADDED:
            return len(self.local_expert_ids), self.rows_per_expert
        return (routing.num_rows,)

    def _new_workspace(self) -> Workspace:
        is_flat = self.layout_code == protocol.FLAT
        return Workspace(self.config.max_tokens, self.config.topk, self.num_experts, self.size, is_flat)

    def _check_usable(self, where: str) -> None:
        if self._closed:
            raise ClosedError(f"{where}: the handle {self.name} is closed")

    def _check_routing(self, where: str, routing: Any) -> None:
        self._check_usable(where)
        if not isinstance(routing, Routing):
            raise ConfigError(f"{where}: argument `routing`: wanted what route returned, got {type(routing).__name__}")
        if routing.ep is not self:
            raise ConfigError(f"{where}: argument `routing`: it was made by another handle, {routing.ep.name}")
        if routing.generation != self.generation:
            raise ClosedError(f"{where}: argument `routing`: it is from before the communicator was reset")

    def _check_dispatch_out(
        self, where: str, out: Any, tensors: list[torch.Tensor], routing: Routing
    ) -> tuple[torch.Tensor, ...] | None:
        if out is None:
            return None
        shapes = [(*self._rows_shape(routing), t.shape[1]) for t in tensors]
        return check_out(where, out, shapes, [t.dtype for t in tensors])

    def _check_combine_weights(self, where: str, routing: Routing, weights: Any, reduce: bool) -> torch.Tensor | None:
        if self.layout_code == protocol.FLAT:
            if weights is not None:
                raise ConfigError(
                    f"{where}: argument `topk_weights`: wanted None in the flat layout, whose rows are already sums of "
                    "weighted expert outputs"
                )
            if not reduce:
                raise ConfigError(f"{where}: argument `reduce`: the flat layout has no row per slot to return")
        return None if weights is None else check_weights(where, weights, routing.num_tokens, routing.topk)

    def _check_bias(
        self, where: str, bias: Any, rows: list[torch.Tensor], routing: Routing, reduce: bool
    ) -> list[torch.Tensor]:
        if bias is None:
            return []
        if not reduce:
            raise ConfigError(f"{where}: argument `bias`: there is no sum to add it to with reduce=False")
        biases = as_tuple(where, "bias", bias)
        if len(biases) != len(rows):
            raise ConfigError(f"{where}: argument `bias`: wanted {len(rows)} tensors like y, got {len(biases)}")
        checked = []
        for addend, row in zip(biases, rows, strict=True):
            checked.append(check_rows(where, "bias", addend, (routing.num_tokens,), (row.dtype,)))
            if addend.shape[1] != row.shape[1]:
                raise ConfigError(f"{where}: argument `bias`: wanted width {row.shape[1]}, got {addend.shape[1]}")
        return checked

    def _bad_index(self, where: str, topk_idx: torch.Tensor, at: int) -> None:
        token, slot = divmod(at, topk_idx.shape[1])
        raise ConfigError(
            f"{where}: argument `topk_idx`: wanted -1 or 0 to {self.num_experts - 1}, got "
            f"{topk_idx[token, slot].item()} at [{token}, {slot}]"
        )

    def _too_many_rows(self, where: str, routing: Routing) -> CapacityError:
        needed = int(routing.workspace.header[protocol.MOST_ROWS])
        return CapacityError(
            f"{where}: argument `max_recv_rows`: wanted at least {needed} (rows of rank "
            f"{int(routing.workspace.rows_of.argmax())}), got {self._memory.row_limit}; nothing was sent"
        )
