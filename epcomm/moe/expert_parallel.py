"""The handle of expert parallelism: route, dispatch, combine.

A call is validated, matched with an operation that was bound at its first use, given its blocks, and run: one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.target import Kernel
from epcomm.moe import autograd, ops
from epcomm.moe.config import LAYOUTS, Config
from epcomm.moe.memory import Memory
from epcomm.moe.placed import PlacedExperts
from epcomm.moe.quantize import Quantizer
from epcomm.moe.received import Received
from epcomm.moe.routing import Routing, Workspace
from epcomm.moe.turns import Turns
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo

_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


class ExpertParallel(PlacedExperts):
    """Dispatch and combine for one shape of MoE layer. Made by `Communicator.expert_parallel`; all ranks call alike.

    Attributes: ``rank``, ``size``, ``config``, ``local_experts`` (int64 tensor: logical ids of its experts, by local
    number), ``local_expert_ids`` (the same as a list), ``placement``, ``load``.
    """

    def __init__(self, runtime: Runtime, fifo: Fifo, config: Config, name: str, barrier: Callable[[str], Operation]):
        self._closing = barrier(f"close({name})")
        self._runtime, self._fifo = runtime, fifo
        self.rank, self.size, self.generation = runtime.rank, runtime.size, runtime.generation
        self._target = runtime.target
        self.device, self.owned_memory = self._target.device, self._target.owned_memory
        self.num_experts, self.alignment = config.num_experts, config.alignment
        self.is_expanded = config.is_expanded
        self.is_flat, self.has_undefined_rows = config.layout == "flat", config.has_fixed_rows
        self.layout_code, self._is_latency = LAYOUTS[config.layout], config.mode == "latency"
        self._memory = Memory(runtime, config)
        self.regions, self.row_limit = self._memory.regions, self._memory.row_limit
        self.drops = self._memory.drops
        self._place_first(config, name, barrier)
        self._turns = Turns(self, runtime, fifo, self._memory)
        self.number = ops.register_handle(self)
        runtime.on_reset(self)

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<ExpertParallel of rank {self.rank} of {self.size}: {self.config.text}{state}>"

    # ---- life

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's part of the handle's segment, by region; pages are taken when first used."""
        return {name: num_bytes for name, (_, num_bytes) in self._memory.layout.regions.items()}

    def start_generation(self, generation: int) -> None:
        """For `Communicator.reset`: routings and results from before are outdated, lent blocks stay lent."""
        self.generation = self._calls.generation = generation
        self._memory.start_generation(generation)
        if self._load is not None:
            self._load.reset()
        self._turns.start_generation(generation)

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
        workspace.pools.workspaces.append(workspace)

    # ---- operations

    def route(self, topk_idx: torch.Tensor, *, requires_grad: bool = False) -> Routing:
        """Collective: decides which rows go where.

        Args:
            topk_idx: int32 or int64 [num_tokens <= max_tokens, any width <= topk]: experts of each token, -1 for none.
            requires_grad: dispatch and combine are part of a graph even where no tensor here asks for that. Ranks must
                all have a backward pass or none; if their tensors could differ in this (rows without gradients,
                experts without rows), say True: it holds for all ranks as soon as one does. (In latency mode, and with
                host_sync=False on a GPU, each rank is told for itself. While traced it has no effect: a graph has
                gradients where its inputs do.)

        Raises:
            ConfigError, CapacityError: the indices are wrong (before anything is sent; peers raise too).
            CapacityError: some rank would receive more than `max_recv_rows` (throughput mode; raised on all ranks,
            and the communicator stays usable).
        """
        if _is_compiling():
            return ops.route(self.number, self.config.layout, topk_idx)
        topk_idx = self._calls.indices(topk_idx)
        num_tokens, topk = topk_idx.shape
        pools = self._turns.pools("route")
        workspace = pools.workspaces.pop() if pools.workspaces else Workspace(self._target, self.config, pools)
        if workspace.config is not self.config:
            workspace.place(self.config, self._local_physical)
        index = topk_idx if self._mapped is None else self._mapped.to_physical(topk_idx, offset=self.rank)
        header = workspace.header
        header[protocol.NUM_TOKENS], header[protocol.TOPK] = num_tokens, topk
        header[protocol.INDEX_BYTES] = topk_idx.element_size()
        if not self._is_latency:
            header[protocol.REQUIRES_GRAD] = requires_grad
        workspace.memory.publish(0, Workspace.HEADER_BYTES)
        routing = Routing(self, self._calls, workspace, num_tokens, topk, topk_idx.dtype, requires_grad)
        context, operation = self._binder.route_context, self._binder.route
        if self._runtime.run_beside(context, operation, workspace.address, index.data_ptr()):
            workspace.refresh()
            raise self._runtime.reject(self._bad_index(topk_idx, header[protocol.BAD_SLOT]))
        if not self._is_latency:
            exchange = self._binder.exchange_counts
            if self._fifo.call(lambda: self._runtime.run(exchange, workspace.address), False, exchange.text):
                raise self._turns.too_many_rows("route", routing)
            routing.place()
            if self.config.host_sync or not self._target.defers:
                routing.learn_requires_grad()
        return routing

    def dispatch(
        self,
        x: Any,
        routing: Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        quantize: Quantizer | None = None,
        out: Any = None,
        copy: bool = False,
        split: bool = False,
        async_op: bool = False,
    ) -> Any:
        """Collective: sends each token's row to the ranks of its experts.

        Args:
            x: [num_tokens, width] of any dtype, or a tuple of such tensors that share rows; rows may be strided.
            topk_weights: floats [num_tokens, topk], delivered with the rows, not applied.
            quantize: a `Float8`, `MXFP8` or `NVFP4`: x, one tensor of bfloat16, float16 or float32, travels in that
                format, and the result's ``x`` is a tuple (codes, scales). For `Float8` these are float8_e4m3fn
                [.., hidden] and float32 [.., ceil(hidden / 128)] (or packed); `moe.quantize` says what the numbers are.
                Padding rows and their scales are zeros. Rows that are quantised already are a tuple of tensors.
            out: tensor(s) shaped like the result's ``x`` that receive the rows; they are then the result's ``x``. Rows
                are contiguous, or scales lie as `quantize` says.
            copy: put the result into memory of its own instead of lending a receive block.
            split: return a `Split` once this rank's rows are sent; its ``finish()`` receives.
            async_op: return a `Work` whose ``result()`` is what would have been returned.

        Returns: a `Received`.

        Raises:
            ConfigError, CapacityError: an argument is wrong (before anything is sent; peers raise too).
            CapacityError: more rows than `max_recv_rows` (latency mode; on all ranks, before rows are sent).
        """
        if _is_compiling():
            self._calls.check_traced(quantize=quantize, out=out, split=split, async_op=async_op)
            return ops.dispatch(x, routing, topk_weights)
        is_tuple = isinstance(x, (tuple, list))
        if _is_grad_enabled() and autograd.needs_grad(routing, topk_weights, x if is_tuple else (x,)):
            options = dict(quantize=quantize, out=out, split=split, async_op=async_op)
            self._calls.checked(self._calls.check_differentiable, "dispatch", options, routing)
            return autograd.dispatch(functools.partial(self.dispatch, copy=copy), x, routing, topk_weights)
        weights = None if topk_weights is None else self._calls.weights("dispatch", topk_weights, routing)
        if quantize is None:
            tensors, bound = self._calls.dispatch(x if is_tuple else (x,), routing, weights is not None)
        else:
            tensors, bound = self._calls.quantized_dispatch(x, quantize, routing, weights is not None)
            is_tuple = True
        if out is not None and (routing.is_placed or self.layout_code == protocol.PADDED):
            self._calls.checked(self._calls.results_of_dispatch, out, bound, routing)  # before anything is sent
        if async_op or self._fifo.pending:
            call = functools.partial(self._turns.dispatch, tensors, bound, is_tuple, routing, weights, out, copy, split)
            return self._fifo.call(call, async_op, bound.operation.text)
        return self._turns.dispatch(tensors, bound, is_tuple, routing, weights, out, copy, split)

    def combine(
        self,
        y: Any,
        received: Received | Routing,
        topk_weights: torch.Tensor | None = None,
        *,
        bias: Any = None,
        quantize: Quantizer | None = None,
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
            quantize: `Float8()`, or with scales that are powers of two: y, one tensor of bfloat16, float16 or float32,
                travels in half the bytes of bfloat16. Each number that is added up is off by at most
                ``quantize.error_bound`` of itself, times its weight; what is infinite becomes NaN. (To send bfloat16
                for float32, pass ``y.bfloat16()``, and an `out` of float32 for results that aren't rounded.)
            out: result tensor(s); their dtype is the result's (default: y's).
            reduce: False returns every slot's row instead of their sum, [num_tokens, topk, width]; zeros where the
                index was -1.
            split: return a `Split` once y is where the peers read it; its ``finish()`` sums. Write to y only then.
            async_op: return a `Work` whose ``result()`` is what would have been returned.

        Returns: [num_tokens, width], or a tuple if y is one. The sum is in float32 (float64: in float64), in slot order
        (flat: in rank order), and rounded once. With ``wire="rank"`` each rank sums the token's rows that it has, in
        slot order, and rounds to y's dtype (quantises it); then these are summed, in rank order, and rounded once more.
        """
        if _is_compiling():
            self._calls.check_traced(bias=bias, quantize=quantize, out=out, split=split, async_op=async_op)
            return ops.combine(y, received, topk_weights, reduce)
        routing = received.routing if isinstance(received, Received) else received
        is_tuple = isinstance(y, (tuple, list))
        if _is_grad_enabled() and autograd.needs_grad(
            routing, topk_weights, y if is_tuple else (y,), (getattr(received, "anchor", None), *autograd.flat(bias))
        ):
            options = dict(quantize=quantize, out=out, split=split, async_op=async_op, reduce=reduce)
            self._calls.checked(self._calls.check_differentiable, "combine", options, routing)
            return autograd.combine(self.combine, y, received, routing, topk_weights, bias)
        outs = out if isinstance(out, (tuple, list)) else () if out is None else (out,)
        weights = None if topk_weights is None else self._calls.weights("combine", topk_weights, routing)
        rows, outs, bound = self._calls.combine(
            y if is_tuple else (y,), routing, weights is not None, bias, outs, reduce, quantize
        )
        if async_op or self._fifo.pending:
            call = functools.partial(self._turns.combine, rows, outs, bound, is_tuple, routing, weights, split)
            return self._fifo.call(call, async_op, bound.operation.text)
        return self._turns.combine(rows, outs, bound, is_tuple, routing, weights, split)

    # ---- details

    @property
    def is_closed(self) -> bool:
        return self._calls.is_closed

    @property
    def has_unfinished(self) -> bool:
        """Whether a split operation waits for its ``finish()``: until then there can't be another one."""
        return self._turns.has_unfinished

    def second_half(self, operation: Operation, kernel_of: Callable[[Any], Kernel]) -> Operation:
        """For a split operation; `kernel_of` gives the kernel of the half that receives, for that which sends."""
        return self._binder.second_half(operation, kernel_of)

    def take_output(self) -> Any:
        """For `Received.output_buffer`: an output block that all peers have read, or None if there is no free one."""
        return None if self._calls.is_closed else self._turns.pools("output_buffer").outputs.take()

    def checked_indices(self, topk_idx: Any) -> torch.Tensor:
        """`topk_idx` as `route` wants it, values too."""
        index = self._calls.indices(topk_idx)
        bad = ((index < -1) | (index >= self.num_experts)).flatten().nonzero()
        if len(bad):
            raise self._runtime.reject(self._bad_index(index, int(bad[0])))
        return index

    def checked_weights(self, operation: str, weights: Any, routing: Routing) -> torch.Tensor:
        """Weights as dispatch and combine want them: float32, contiguous."""
        checked = self._calls.weights(operation, weights, routing)
        assert checked is not None
        return checked

    def _bad_index(self, topk_idx: torch.Tensor, at: int) -> ConfigError:
        token, slot = divmod(at, topk_idx.shape[1])
        return ConfigError(
            f"rank {self.rank}: route: argument `topk_idx`: wanted -1 or 0 to {self.num_experts - 1}, got "
            f"{topk_idx[token, slot].item()} at [{token}, {slot}]"
        )
