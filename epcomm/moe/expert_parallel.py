"""The handle of expert parallelism: route, dispatch, combine.

A call is validated, matched with an operation that was bound at its first use, given its blocks, and run: one kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from epcomm.device.control import GENERATION_SHIFT
from epcomm.errors import CapacityError, ConfigError
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.bind import Binder
from epcomm.moe.calls import Calls
from epcomm.moe.config import LAYOUTS, Config
from epcomm.moe.memory import Memory
from epcomm.moe.quantize import Float8
from epcomm.moe.received import Received, Tensors, copy_block
from epcomm.moe.routing import Routing, Workspace
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo

_OUT = protocol.T_OUT - protocol.T_ADDRESS  # from a tensor's address to its result's


class ExpertParallel:
    """Dispatch and combine for one shape of MoE layer. Made by `Communicator.expert_parallel`; all ranks call alike.

    Attributes: ``rank``, ``size``, ``config``, ``local_expert_ids`` (global ids of its experts, by local number).
    """

    def __init__(self, runtime: Runtime, fifo: Fifo, config: Config, name: str, closing: Operation):
        self._closing = closing  # the barrier of close()
        self._runtime, self._fifo, self.config, self.name = runtime, fifo, config, name
        self.rank, self.size, self.generation = runtime.rank, runtime.size, runtime.generation
        self.device, self.owned_memory = runtime.target.device, runtime.target.owned_memory
        self.num_experts, self.alignment = config.num_experts, config.alignment
        self.layout_code, self._is_latency = LAYOUTS[config.layout], config.mode == "latency"
        self.local_expert_ids = config.experts_of(self.rank)
        self._memory = Memory(runtime, config)
        self.regions = self._memory.regions
        self._binder = Binder(runtime, self._memory, config, name)
        self._calls = Calls(runtime, self._binder, config, name)
        self._workspaces: list[Workspace] = []
        self._start_combines()
        runtime.on_reset(self)

    # ---- life

    @property
    def local_experts(self) -> torch.Tensor:
        """int64: global ids of this rank's experts, by local number."""
        return torch.tensor(self.local_expert_ids, dtype=torch.int64, device=self.device)

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's part of the handle's segment, by region; pages are taken when first used."""
        return {name: num_bytes for name, (_, num_bytes) in self._memory.layout.regions.items()}

    def start_generation(self, generation: int) -> None:
        """For `Communicator.reset`: routings and results from before are outdated, lent blocks stay lent."""
        self.generation = self._calls.generation = generation
        self._memory.start_generation(generation)
        self._start_combines()

    def _start_combines(self) -> None:
        """Counts combines as the kernels do; one that a later dispatch has seen read by all peers frees its block."""
        self._combined = self._read_by_all = self.generation << GENERATION_SHIFT
        self._output_last_read = [0] * self.config.blocks  # the last combine that read each output block

    def close(self) -> None:
        """Collective, unless the communicator has failed or is closed: frees the handle. Idempotent.

        Tensors that are still alive stay valid.
        """
        if self._calls.is_closed:
            return
        if self._runtime.failure is None and not self._runtime.closed:
            self._run_in_turn(self._closing)
        self._calls.is_closed = True
        self._memory.free()

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
        topk_idx = self._calls.indices(topk_idx)
        num_tokens, topk = topk_idx.shape
        workspace = self._workspaces.pop() if self._workspaces else self._new_workspace()
        header = workspace.header
        header[protocol.NUM_TOKENS], header[protocol.TOPK] = num_tokens, topk
        header[protocol.INDEX_BYTES] = topk_idx.element_size()
        workspace.memory.publish(0, Workspace.CALLER_BYTES)
        routing = Routing(self, self._calls, workspace, num_tokens, topk, topk_idx.dtype)
        context, operation = self._binder.route_context, self._binder.route
        if self._runtime.run_beside(context, operation, workspace.address, topk_idx.data_ptr()):
            workspace.memory.refresh()
            raise self._runtime.reject(self._bad_index(topk_idx, header[protocol.BAD_SLOT]))
        if not self._is_latency:
            run = self._run_in_turn if self._fifo.pending else self._runtime.run
            if run(self._binder.exchange_counts, workspace.address):
                raise self._too_many_rows("route", routing)
            routing.place()
        return routing

    def dispatch(
        self,
        x: Any,
        routing: Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        quantize: Float8 | None = None,
        out: Any = None,
        copy: bool = False,
    ) -> Received:
        """Collective: sends each token's row to the ranks of its experts.

        Args:
            x: [num_tokens, width] of any dtype, or a tuple of such tensors that share rows; rows may be strided.
            topk_weights: floats [num_tokens, topk], delivered with the rows, not applied.
            quantize: sends x, one tensor of bfloat16, float16 or float32, as float8 with a scale per 128 columns: the
                result's ``x`` is a tuple (rows float8_e4m3fn [.., hidden], scales float32 [.., ceil(hidden / 128)], or
                packed). `moe.quantize` says what the numbers are. Padding rows and their scales are zeros.
            out: tensor(s) shaped like the result's ``x`` that receive the rows; they are then the result's ``x``.
            copy: put the result into memory of its own instead of lending a receive block.

        Raises:
            ConfigError, CapacityError: an argument is wrong (before anything is sent; peers raise too).
            CapacityError: more rows than `max_recv_rows` (latency mode; on all ranks, before rows are sent).
        """
        is_tuple = isinstance(x, (tuple, list))
        weights = None if topk_weights is None else self._calls.weights("dispatch", topk_weights, routing)
        if quantize is None:
            tensors, bound = self._calls.dispatch(x if is_tuple else (x,), routing, weights is not None)
        else:
            tensors, bound = self._calls.quantized_dispatch(x, quantize, routing, weights is not None)
            is_tuple = True
        for at, tensor in zip(bound.addresses, tensors):
            bound.table[at] = tensor.data_ptr()
        bound.memory.publish()
        if out is not None and (routing.is_placed or self.layout_code == protocol.PADDED):
            self._calls.checked(self._calls.results_of_dispatch, out, bound.tensors, routing)  # before anything is sent
        pool = self._memory.receive
        lease = pool.take()  # the last one is never lent for longer than a call
        weights_address = 0 if weights is None else weights.data_ptr()
        run = self._run_in_turn if self._fifo.pending else self._runtime.run
        try:
            if run(bound.operation, routing.workspace.address, bound.memory.address, weights_address, lease.index):
                raise self._too_many_rows("dispatch", routing)
        except BaseException:
            lease.release()  # whoever keeps the exception keeps this frame, and would keep the block
            raise
        self._read_by_all = self._combined
        routing.place()
        received = Received(self, routing, bound, is_tuple, weights is not None, pool.buffer(lease))
        if out is None and not copy and pool.free:
            return received
        try:
            results = self._calls.checked(self._calls.results_of_dispatch, out, bound.tensors, routing)
            return copy_block(received, results)
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
            y: rows like the dispatch's ``received.x``, or a tuple of such tensors; bfloat16, float16, float32 or
                float64, of any widths that together fit in the handle's hidden * dtype.
                `Received.output_buffer` gives memory that is read in place.
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
        routing = received.routing if isinstance(received, Received) else received
        is_tuple = isinstance(y, (tuple, list))
        outs = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
        weights = None if topk_weights is None else self._calls.weights("combine", topk_weights, routing)
        rows, outs, bound = self._calls.combine(
            y if is_tuple else (y,), routing, weights is not None, bias, outs, reduce
        )
        for at, row, result in zip(bound.addresses, rows, outs):
            bound.table[at], bound.table[at + _OUT] = row.data_ptr(), result.data_ptr()
        bound.memory.publish()
        block, stage_after = self._output_of(rows, bound.tensors)
        weights_address = 0 if weights is None else weights.data_ptr()
        run = self._run_in_turn if self._fifo.pending else self._runtime.run
        workspace = routing.workspace.address
        run(bound.operation, workspace, bound.memory.address, weights_address, block, stage_after)
        self._combined += 1
        self._output_last_read[block] = self._combined
        return tuple(outs) if is_tuple else outs[0]

    # ---- details

    def _run_in_turn(self, operation: Operation, *values: int) -> int:
        """Runs an operation behind the asynchronous ones that are pending."""
        status = [0]

        def run() -> None:
            status[0] = self._runtime.run(operation, *values)

        self._fifo.call(run, None, False, operation.text)
        return status[0]

    def take_output(self) -> Any:
        """For `Received.output_buffer`: an output block that all peers have read, or None if there is no free one."""
        pool = self._memory.outputs
        if self._calls.is_closed:
            return None
        still_read = []  # these go back when this returns
        while pool.free:
            lease = pool.take()
            if self._output_last_read[lease.index] <= self._read_by_all:
                return pool.buffer(lease)
            still_read.append(lease)
        return None

    def _output_of(self, rows: Any, tensors: Tensors) -> tuple[int, int]:
        """(output block, STAGE_AFTER) for y: the block it lies in, or the staging block and when that is free."""
        pool = self._memory.outputs
        place = pool.locate(rows[0].data_ptr())
        if place is not None:
            start = pool.address + place[0] * pool.block_bytes
            for row, (_, _, offset) in zip(rows, tensors):
                if row.data_ptr() != start + offset or not row.is_contiguous():
                    break
            else:
                return place[0], -1
        staging = self.config.blocks - 1
        return staging, self._output_last_read[staging]

    def _new_workspace(self) -> Workspace:
        is_flat = self.layout_code == protocol.FLAT
        target, config = self._runtime.target, self.config
        return Workspace(target, config.max_tokens, config.topk, self.num_experts, self.size, is_flat)

    def _bad_index(self, topk_idx: torch.Tensor, at: int) -> ConfigError:
        token, slot = divmod(at, topk_idx.shape[1])
        return ConfigError(
            f"rank {self.rank}: route: argument `topk_idx`: wanted -1 or 0 to {self.num_experts - 1}, got "
            f"{topk_idx[token, slot].item()} at [{token}, {slot}]"
        )

    def _too_many_rows(self, operation: str, routing: Routing) -> CapacityError:
        routing.workspace.memory.refresh()
        needed = routing.workspace.header[protocol.MOST_ROWS]
        return CapacityError(
            f"rank {self.rank}: {operation}: argument `max_recv_rows`: wanted at least {needed} (rows of rank "
            f"{int(routing.workspace.rows_of.argmax())}), got {self._memory.row_limit}; nothing was sent"
        )
