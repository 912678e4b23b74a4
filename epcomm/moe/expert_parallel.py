"""The handle of expert parallelism: route, dispatch, combine.

A call is validated, matched with an operation that was bound at its first use, given its blocks, and run: one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from epcomm.errors import CapacityError, ClosedError, ConfigError
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.bind import Binder, Bound
from epcomm.moe.blocks import BlockPool, Lease
from epcomm.moe.calls import Calls
from epcomm.moe.config import LAYOUTS, Config
from epcomm.moe.memory import Memory
from epcomm.moe.outputs import Outputs
from epcomm.moe.quantize import Float8
from epcomm.moe.received import Received, copy_block
from epcomm.moe.routing import Routing, Workspace
from epcomm.moe.split import Split
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo

_OUT = protocol.T_OUT - protocol.T_ADDRESS  # from a tensor's address to its result's


class ExpertParallel:
    """Dispatch and combine for one shape of MoE layer. Made by `Communicator.expert_parallel`; all ranks call alike.

    Attributes: ``rank``, ``size``, ``config``, ``local_experts`` (int64 tensor: global ids of its experts, by local
    number), ``local_expert_ids`` (the same as a list).
    """

    def __init__(self, runtime: Runtime, fifo: Fifo, config: Config, name: str, closing: Operation):
        self._closing = closing  # the barrier of close()
        self._runtime, self._fifo, self.config, self.name = runtime, fifo, config, name
        self.rank, self.size, self.generation = runtime.rank, runtime.size, runtime.generation
        self._target = runtime.target
        self.device, self.owned_memory = self._target.device, self._target.owned_memory
        self.num_experts, self.alignment = config.num_experts, config.alignment
        self.layout_code, self._is_latency = LAYOUTS[config.layout], config.mode == "latency"
        self.local_expert_ids = config.experts_of(self.rank)
        #: int64: global ids of this rank's experts, by local number
        self.local_experts = torch.tensor(self.local_expert_ids, dtype=torch.int64, device=self.device)
        self._memory = Memory(runtime, config)
        self.regions, self.row_limit = self._memory.regions, self._memory.row_limit
        self.drops = self._memory.drops
        self._binder = Binder(runtime, self._memory, config, name)
        self._calls = Calls(runtime, self._binder, config, name)
        # of routings that ended; those of captured ones are written by replays
        self._workspaces: list[Workspace] = []
        self._graph_workspaces: list[Workspace] = []
        memory = self._memory
        self._outputs = Outputs(memory.outputs, memory.staging, runtime.generation)
        self._graph_outputs = Outputs(memory.graph_outputs, memory.staging, runtime.generation)
        self._unfinished: Split | None = None
        runtime.on_reset(self)

    # ---- life

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's part of the handle's segment, by region; pages are taken when first used."""
        return {name: num_bytes for name, (_, num_bytes) in self._memory.layout.regions.items()}

    def start_generation(self, generation: int) -> None:
        """For `Communicator.reset`: routings and results from before are outdated, lent blocks stay lent."""
        self.generation = self._calls.generation = generation
        self._memory.start_generation(generation)
        self._outputs.start_generation(generation)
        self._graph_outputs.start_generation(generation)
        self._unfinished = None

    def close(self) -> None:
        """Collective, unless the communicator has failed or is closed: frees the handle. Idempotent.

        Tensors that are still alive stay valid.
        """
        if self._calls.is_closed:
            return
        if self._runtime.failure is None and not self._runtime.closed:
            self._fifo.call(lambda: self._runtime.run(self._closing), False, self._closing.text)
        self._calls.is_closed = True
        self._memory.free()

    def return_workspace(self, workspace: Workspace) -> None:
        """For a `Routing` that ends."""
        (self._graph_workspaces if workspace.is_captured else self._workspaces).append(workspace)

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
        is_captured = self._is_capturing("route")
        workspaces = self._graph_workspaces if is_captured else self._workspaces
        workspace = workspaces.pop() if workspaces else Workspace(self._target, self.config, is_captured)
        header = workspace.header
        header[protocol.NUM_TOKENS], header[protocol.TOPK] = num_tokens, topk
        header[protocol.INDEX_BYTES] = topk_idx.element_size()
        workspace.memory.publish(0, Workspace.HEADER_BYTES)
        routing = Routing(self, self._calls, workspace, num_tokens, topk, topk_idx.dtype)
        context, operation = self._binder.route_context, self._binder.route
        if self._runtime.run_beside(context, operation, workspace.address, topk_idx.data_ptr()):
            workspace.memory.refresh()
            raise self._runtime.reject(self._bad_index(topk_idx, header[protocol.BAD_SLOT]))
        if not self._is_latency:
            exchange = self._binder.exchange_counts
            if self._fifo.call(lambda: self._runtime.run(exchange, workspace.address), False, exchange.text):
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
        split: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Collective: sends each token's row to the ranks of its experts.

        Args:
            x: [num_tokens, width] of any dtype, or a tuple of such tensors that share rows; rows may be strided.
            topk_weights: floats [num_tokens, topk], delivered with the rows, not applied.
            quantize: sends x, one tensor of bfloat16, float16 or float32, as float8 with a scale per 128 columns: the
                result's ``x`` is a tuple (rows float8_e4m3fn [.., hidden], scales float32 [.., ceil(hidden / 128)], or
                packed). `moe.quantize` says what the numbers are. Padding rows and their scales are zeros.
            out: tensor(s) shaped like the result's ``x`` that receive the rows; they are then the result's ``x``.
            copy: put the result into memory of its own instead of lending a receive block.
            split: return a `Split` once this rank's rows are sent; its ``finish()`` receives.
            async_op: return a `Work` whose ``result()`` is what would have been returned.

        Returns: a `Received`.

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
        if out is not None and (routing.is_placed or self.layout_code == protocol.PADDED):
            self._calls.checked(self._calls.results_of_dispatch, out, bound.tensors, routing)  # before anything is sent
        if async_op or self._fifo.pending:
            call = functools.partial(self._dispatch, tensors, bound, is_tuple, routing, weights, out, copy, split)
            return self._fifo.call(call, async_op, bound.operation.text)
        return self._dispatch(tensors, bound, is_tuple, routing, weights, out, copy, split)

    def combine(
        self,
        y: Any,
        received: Received | Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        bias: Any = None,
        out: Any = None,
        reduce: bool = True,
        split: bool = False,
        async_op: bool = False,
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
            split: return a `Split` once y is where the peers read it; its ``finish()`` sums. Write to y only then.
            async_op: return a `Work` whose ``result()`` is what would have been returned.

        Returns: [num_tokens, width], or a tuple if y is one. The sum is in float32 (float64: in float64), in slot order
        (flat: in rank order), and rounded once. With ``wire="rank"`` each rank sums the token's rows that it has, in
        slot order, and rounds to y's dtype; then these are summed, in rank order, and rounded once more.
        """
        routing = received.routing if isinstance(received, Received) else received
        is_tuple = isinstance(y, (tuple, list))
        outs = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
        weights = None if topk_weights is None else self._calls.weights("combine", topk_weights, routing)
        rows, outs, bound = self._calls.combine(
            y if is_tuple else (y,), routing, weights is not None, bias, outs, reduce
        )
        if async_op or self._fifo.pending:
            call = functools.partial(self._combine, rows, outs, bound, is_tuple, routing, weights, split)
            return self._fifo.call(call, async_op, bound.operation.text)
        return self._combine(rows, outs, bound, is_tuple, routing, weights, split)

    # ---- an operation's turn

    def _dispatch(self, tensors: Any, bound: Bound, is_tuple: bool, routing: Routing, weights: torch.Tensor | None,
                  out: Any, copy: bool, split: bool) -> Any:  # fmt: skip
        self._require_finished("dispatch")
        for at, tensor in zip(bound.addresses, tensors):
            bound.table[at] = tensor.data_ptr()
        bound.memory.publish()
        pool = self._memory.graph_receive if self._is_capturing("dispatch") else self._memory.receive
        lease = pool.take()  # the last one is never lent for longer than a call
        weights_address = 0 if weights is None else weights.data_ptr()
        words = (routing.workspace.address, bound.memory.address, weights_address, lease.index, 0, split)
        try:
            if self._runtime.run(bound.operation, *words):
                raise self._too_many_rows("dispatch", routing)
        except BaseException:
            lease.release()  # whoever keeps the exception keeps this frame, and would keep the block
            raise
        if split:
            second = self._binder.second_half(bound.operation, self._target.dispatch_receive(bound.operation.code))
            deliver = functools.partial(
                self._deliver, pool, lease, bound, is_tuple, routing, weights is not None, out, copy
            )
            return self._split(second, words, deliver)
        return self._deliver(pool, lease, bound, is_tuple, routing, weights is not None, out, copy)

    def _deliver(self, pool: BlockPool, lease: Lease, bound: Bound, is_tuple: bool, routing: Routing,
                 has_weights: bool, out: Any, copy: bool) -> Received:  # fmt: skip
        """The result of a dispatch that is complete."""
        self._current_outputs().all_read()
        routing.place()
        routing.has_places = True
        received = Received(self, routing, bound, is_tuple, has_weights, pool.buffer(lease))
        if out is None and not copy and pool.free:
            return received
        try:
            results = self._calls.checked(self._calls.results_of_dispatch, out, bound.tensors, routing)
            return copy_block(received, results)
        finally:
            lease.release()

    def _combine(self, rows: Any, outs: Any, bound: Bound, is_tuple: bool, routing: Routing,
                 weights: torch.Tensor | None, split: bool) -> Any:  # fmt: skip
        self._require_finished("combine")
        for at, row, result in zip(bound.addresses, rows, outs):
            bound.table[at], bound.table[at + _OUT] = row.data_ptr(), result.data_ptr()
        bound.memory.publish()
        outputs = self._current_outputs()
        block, stage_after = outputs.staging() if bound.is_summed_here else outputs.block_of(rows, bound.tensors)
        weights_address = 0 if weights is None else weights.data_ptr()
        words = (routing.workspace.address, bound.memory.address, weights_address, block, stage_after, split)
        self._runtime.run(bound.operation, *words)
        outputs.combined(block)
        result = tuple(outs) if is_tuple else outs[0]
        if split:
            second = self._binder.second_half(bound.operation, self._target.combine_receive(bound.operation.code))
            kept = (rows, weights, bound.keep)  # the second half reads them
            return self._split(second, words, lambda: (result, kept)[0])
        return result

    def _split(self, second: Operation, words: Sequence[int], deliver: Callable[[], Any]) -> Split:
        """What is left of an operation that has sent."""
        generation = self.generation

        def receive() -> Any:
            if self._unfinished is split:
                self._unfinished = None
            if self._calls.is_closed or self.generation != generation:
                raise ClosedError(f"rank {self.rank}: finish of {second.text}: it is from before a reset or close")
            self._runtime.run(second, *words)
            return deliver()

        split = Split(lambda: self._fifo.call(receive, False, second.text), second.text)
        self._unfinished = split
        return split

    def _require_finished(self, operation: str) -> None:
        if self._unfinished is not None:
            raise self._runtime.reject(
                ConfigError(
                    f"rank {self.rank}: {operation}: wanted no unfinished split operation on {self.name}, got "
                    f"{self._unfinished.text}: call its finish() first"
                )
            )

    # ---- details

    def _is_capturing(self, operation: str) -> bool:
        """True during a capture, which only a handle allows that never asks the device for anything."""
        if not self._target.stream.is_capturing():
            return False
        if self.config.host_sync:
            wanted = "wanted a handle with host_sync=False during a capture, got one with host_sync=True"
            raise self._runtime.reject(ConfigError(f"rank {self.rank}: {operation}: {wanted}"))
        return True

    def _current_outputs(self) -> Outputs:
        return self._graph_outputs if self._target.stream.is_capturing() else self._outputs

    def take_output(self) -> Any:
        """For `Received.output_buffer`: an output block that all peers have read, or None if there is no free one."""
        return None if self._calls.is_closed else self._current_outputs().take()

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
