"""What an operation does when it is its turn: takes blocks, runs its kernel, gives a result; or half of that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from epcomm.errors import CapacityError, ClosedError, ConfigError, EpcommError
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.bind import Bound
from epcomm.moe.blocks import Lease
from epcomm.moe.memory import Memory
from epcomm.moe.outputs import Outputs, Pools
from epcomm.moe.received import Received, copy_block
from epcomm.moe.routing import Routing
from epcomm.moe.split import Split
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo

if TYPE_CHECKING:
    from epcomm.moe.expert_parallel import ExpertParallel

_OUT = protocol.T_OUT - protocol.T_ADDRESS  # from a tensor's address to its result's


class Turns:
    """Of one handle."""

    def __init__(self, ep: ExpertParallel, runtime: Runtime, fifo: Fifo, memory: Memory):
        self._ep, self._runtime, self._fifo, self._memory = ep, runtime, fifo, memory
        self._target, self._captures = runtime.target, runtime.target.stream.can_capture
        generation = runtime.generation
        self._pools = Pools(memory.receive, Outputs(memory.outputs, memory.staging, generation))
        # replays write to what captured calls use: it is for them only
        self._pools_of_graphs = Pools(memory.graph_receive, Outputs(memory.graph_outputs, memory.staging, generation))
        self._unfinished: Split | None = None

    def start_generation(self, generation: int) -> None:
        """For `Communicator.reset`."""
        for pools in (self._pools, self._pools_of_graphs):
            pools.outputs.start_generation(generation)
        if self._unfinished is not None:
            where = f"rank {self._ep.rank}: finish of {self._unfinished.text}"
            self._unfinished.abandon(ClosedError(f"{where}: it is from before the communicator was reset"))
        self._unfinished = None

    def pools(self, operation: str) -> Pools:
        """Those of graphs during a capture, which only a handle allows that never asks the device for anything."""
        if not self._captures or not self._target.stream.is_capturing():
            return self._pools
        if self._ep.config.host_sync:
            wanted = "wanted a handle with host_sync=False during a capture, got one with host_sync=True"
            raise self._runtime.reject(ConfigError(f"rank {self._ep.rank}: {operation}: {wanted}"))
        return self._pools_of_graphs

    def dispatch(self, tensors: Any, bound: Bound, is_tuple: bool, routing: Routing, weights: torch.Tensor | None,
                 out: Any, copy: bool, split: bool) -> Any:  # fmt: skip
        """The result of a dispatch, or half of one."""
        if self._unfinished is not None:
            raise self._not_finished("dispatch")
        # loaded now: no one may wait for this rank then
        second = self._ep.second_half(bound.operation, self._target.dispatch_receive) if split else None
        for at, tensor in zip(bound.addresses, tensors):
            bound.table[at] = tensor.data_ptr()
        bound.memory.publish()
        pools = self.pools("dispatch") if self._captures else self._pools
        lease = pools.receive.take()  # the last one is never lent for longer than a call
        weights_address = 0 if weights is None else weights.data_ptr()
        routed, table = routing.workspace.address, bound.memory.address
        try:
            if self._runtime.run(bound.operation, routed, table, weights_address, lease.index, 0, split):
                raise self.too_many_rows("dispatch", routing)
        except BaseException:
            lease.release()  # whoever keeps the exception keeps this frame, and would keep the block
            raise
        buffer = pools.receive.buffer(lease)
        received = Received(self._ep, routing, bound, is_tuple, weights is not None, buffer)
        is_lent = out is None and not copy and bool(pools.receive.free)
        if second is not None:
            words = routed, table, weights_address, lease.index
            expected = received if is_lent and self._ep.has_undefined_rows else None
            deliver = functools.partial(self._deliver, pools, lease, received, is_lent, out)
            return self._split(second, words, deliver, expected)
        return self._deliver(pools, lease, received, is_lent, out)

    def _deliver(self, pools: Pools, lease: Lease, received: Received, is_lent: bool, out: Any) -> Received:
        """The result of a dispatch that is complete."""
        routing = received.routing
        pools.outputs.all_read()
        routing.has_places = True
        if routing.rows_shape is None:
            routing.place()
        if is_lent:
            return received
        try:
            calls = routing.calls
            return copy_block(received, calls.checked(calls.results_of_dispatch, out, received.bound, routing))
        finally:
            lease.release()

    def combine(self, rows: Any, outs: Any, bound: Bound, is_tuple: bool, routing: Routing,
                weights: torch.Tensor | None, split: bool) -> Any:  # fmt: skip
        """The result of a combine, or half of one."""
        if self._unfinished is not None:
            raise self._not_finished("combine")
        second = self._ep.second_half(bound.operation, self._target.combine_receive) if split else None
        for at, row, result in zip(bound.addresses, rows, outs):
            bound.table[at], bound.table[at + _OUT] = row.data_ptr(), result.data_ptr()
        bound.memory.publish()
        outputs = (self.pools("combine") if self._captures else self._pools).outputs
        block, stage_after = outputs.staging() if bound.is_staged else outputs.block_of(rows, bound.tensors)
        weights_address = 0 if weights is None else weights.data_ptr()
        routed, table = routing.workspace.address, bound.memory.address
        self._runtime.run(bound.operation, routed, table, weights_address, block, stage_after, split)
        outputs.combined(block)
        result = tuple(outs) if is_tuple else outs[0]
        if second is not None:
            kept = (rows, weights, bound.keep)  # the second half reads them
            return self._split(second, (routed, table, weights_address, block), lambda: (result, kept)[0])
        return result

    def _split(
        self, second: Operation, words: Sequence[int], deliver: Callable[[], Any], expected: Received | None = None
    ) -> Split:
        """What is left of an operation that has sent."""

        def receive() -> Any:
            self._unfinished = None
            if self._ep.is_closed:
                raise ClosedError(f"rank {self._ep.rank}: finish of {second.text}: the handle is closed")
            self._runtime.run(second, *words)
            return deliver()

        self._unfinished = Split(lambda: self._fifo.call(receive, False, second.text), second.text, expected)
        return self._unfinished

    @property
    def has_unfinished(self) -> bool:
        """Whether a split operation is not finished."""
        return self._unfinished is not None

    def require_finished(self, operation: str) -> None:
        """Raises `ConfigError` if a split operation is not finished."""
        if self.has_unfinished:
            raise self._not_finished(operation)

    def _not_finished(self, operation: str) -> EpcommError:
        assert self._unfinished is not None
        where, got = f"rank {self._ep.rank}: {operation}", f"{self._unfinished.text}: call its finish() first"
        wanted = f"wanted no unfinished split operation on {self._ep.name}, got {got}"
        return self._runtime.reject(ConfigError(f"{where}: {wanted}"))

    def too_many_rows(self, operation: str, routing: Routing) -> CapacityError:
        """What all ranks raise that learn of it together."""
        routing.workspace.refresh()
        needed = routing.workspace.header[protocol.MOST_ROWS]
        return CapacityError(
            f"rank {self._ep.rank}: {operation}: argument `max_recv_rows`: wanted at least {needed} (rows of rank "
            f"{int(routing.workspace.rows_of.argmax())}), got {self._memory.row_limit}; nothing was sent"
        )
