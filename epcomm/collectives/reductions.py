"""The barrier and reductions of tensors, with shapes and defaults of torch.distributed; results are new unless `out`.

Every method validates, looks its request up among the bound operations (binding it the first time), and runs it: at
once, or in its turn behind asynchronous operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epcomm.collectives.calls import Calls, rejecting
from epcomm.collectives.checks import check_op, check_out, check_rank, check_tensor, is_plain
from epcomm.collectives.cost.kernels import octave
from epcomm.collectives.plan import Plan
from epcomm.collectives.planned import PlannedCollective
from epcomm.collectives.selection import check_algorithm, chosen_kernel, chosen_on, is_kernel
from epcomm.device.cpu.memory import STREAMING_BYTES
from epcomm.errors import ConfigError
from epcomm.operation import Operation


class Reductions(Calls):
    """The barrier and the reductions of one communicator; `epcomm.communicator` documents them for users."""

    def barrier(self, async_op: bool, timeout: float | None) -> Any:
        operation = self._binder.cached("barrier", lambda: self._binder.barrier("barrier()"))
        return self._call(operation, (), None, None, async_op, timeout)

    def _bind_reduce(
        self, name: str, x: torch.Tensor, op: str, algorithm: str, root: int = -1, is_auto: bool = True
    ) -> Operation:
        """A reduction by a kernel: that of the algorithm, which `is_auto` if nobody asked for it."""
        where, binder = self._where(name), self._binder
        check_op(where, x.dtype, op)
        check_algorithm(where, algorithm, x.nbytes, x.dtype, op, binder.has_multicast, binder.spans_hosts)
        kernel = chosen_kernel(algorithm, x.nbytes, binder.spans_hosts)
        by = f"auto ({kernel})" if is_auto else algorithm
        to = "" if root < 0 else f", root={root}"
        text = f"{name}(x={x.dtype} {tuple(x.shape)}, op={op}, algorithm={by}{to})"
        return binder.reduce(text, x.nbytes, x.dtype, op, kernel, root)

    def _chosen(self, where: str, x: torch.Tensor, op: str, algorithm: str | Plan) -> str | Plan:
        """What "auto" means for an allreduce: by prices, where there are some, a kernel's name or a plan."""
        binder, machine = self._binder, self._binder.machine
        if algorithm != "auto" or machine is None or binder.spans_hosts or x.nbytes == 0:
            return algorithm

        def choose() -> str | Plan:
            check_op(where, x.dtype, op)
            has_ll128 = self.runtime.target.moves_whole_lines(self.runtime.collectives)
            return chosen_on(machine, x.nbytes, x.dtype, op, binder.num_channels, has_ll128)

        return binder.cached(("auto", octave(x.nbytes), x.dtype, op), choose)

    @rejecting
    def allreduce(self, x: torch.Tensor, op: str, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        if not is_plain(x, self._device):
            x = check_tensor(self._where("allreduce"), "x", x, self._device).contiguous()
        if not isinstance(op, str):
            check_op(self._where("allreduce"), x.dtype, op)
        bound = self._binder.bound.get((x.shape, x.dtype, op, algorithm))
        if bound is None:
            bound = self._bound_allreduce(self._where("allreduce"), x, op, algorithm)
            self._binder.remember((x.shape, x.dtype, op, algorithm), bound)
        result = torch.empty_like(x) if out is None else check_out(self._where("allreduce"), out, x.shape, x)
        operation, values = self._call_of(bound, "allreduce", x, result)
        return self._call(operation, values, x, result, async_op, timeout)

    def _bound_allreduce(
        self, where: str, x: torch.Tensor, op: str, algorithm: str | Plan
    ) -> Operation | PlannedCollective:
        """By a kernel, or by a plan."""
        chosen = self._chosen(where, x, op, algorithm)
        if is_kernel(chosen):
            return self._bind_reduce("allreduce", x, op, chosen, is_auto=algorithm == "auto")
        return self._plans.bound(where, "allreduce", chosen, x, op)

    def _call_of(
        self, bound: Operation | PlannedCollective, name: str, x: torch.Tensor, result: torch.Tensor
    ) -> tuple[Operation, tuple[int, ...]]:
        """The operation of an allreduce that was bound, and its call words."""
        if isinstance(bound, PlannedCollective):
            return bound.operation, bound.call_words(self._where(name), x, result)
        num_bytes = x.nbytes
        return bound, (x.data_ptr(), result.data_ptr(), num_bytes, num_bytes > STREAMING_BYTES)

    @rejecting
    def bind_allreduce(
        self, x: torch.Tensor, op: str, out: torch.Tensor | None, algorithm: str | Plan
    ) -> Callable[[], Any]:
        where = self._where("bind_allreduce")
        data = check_tensor(where, "x", x, self._device)
        if data.data_ptr() != x.data_ptr() or not data.is_contiguous():
            raise ConfigError(f"{where}: argument `x`: wanted a contiguous tensor, got strides {x.stride()}")
        result = check_out(where, x if out is None else out, x.shape, x)
        bound = self._bound_allreduce(where, x, op, algorithm)
        operation, values = self._call_of(bound, "bind_allreduce", x, result)
        launch, fifo, runtime = self.runtime.bind(operation, *values), self._fifo, self.runtime

        def call(keep: Any = (x, result)) -> torch.Tensor:
            if fifo.pending:
                fifo.call(lambda: runtime.run(operation, *values), False, operation.text)
            elif status := launch():
                runtime.settle(status, operation, runtime.context)
            return result

        return call

    def describe_allreduce(self, x: torch.Tensor, op: str, algorithm: str | Plan) -> str:
        where = self._where("describe_allreduce")
        x = check_tensor(where, "x", x, self._device)
        bound = self._bound_allreduce(where, x, op, algorithm)
        return (bound.operation if isinstance(bound, PlannedCollective) else bound).text

    @rejecting
    def reduce(self, x: torch.Tensor, dst: int, op: str, out: torch.Tensor | None, algorithm: str | Plan,
               async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        where = self._where("reduce")
        x, dst = check_tensor(where, "x", x, self._device), check_rank(where, "dst", dst, self.runtime.size)
        source, num_bytes = x.contiguous(), x.nbytes
        result = check_out(where, out, x.shape, x) if self.runtime.rank == dst else None
        if algorithm != "auto":
            return self._run_plan("reduce", source, result, algorithm, async_op, timeout, op, dst)
        key = ("reduce", x.shape, x.dtype, op, dst)
        operation = self._binder.cached(key, lambda: self._bind_reduce("reduce", x, op, "auto", dst))
        values = (source.data_ptr(), 0 if result is None else result.data_ptr(), num_bytes, num_bytes > STREAMING_BYTES)
        return self._call(operation, values, (source, result), result, async_op, timeout)
