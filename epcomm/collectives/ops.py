"""The collectives on tensors. Shapes and defaults follow torch.distributed; results are new tensors unless `out`.

Every method validates, looks its request up among the bound operations (binding it the first time), and runs it: at
once, or in its turn behind asynchronous operations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from epcomm.collectives.bind import Binder
from epcomm.collectives.checks import (
    check_divisible,
    check_op,
    check_out,
    check_overlap,
    check_rank,
    check_splits,
    check_tensor,
    check_timeout,
    is_plain,
)
from epcomm.collectives.copy_engine import CopyMove
from epcomm.collectives.plan import Plan
from epcomm.collectives.planned import PlanBinder
from epcomm.collectives.selection import ALGORITHMS, check_algorithm
from epcomm.device.cpu.memory import STREAMING_BYTES
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo

Method = TypeVar("Method", bound=Callable[..., Any])


def _rejecting(method: Method) -> Method:
    """An argument error fails the communicator, so that peers that are in the operation learn of it."""

    @functools.wraps(method)
    def checked(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (ConfigError, UnsupportedError) as error:
            raise self.runtime.reject(error) from None

    return checked  # type: ignore[return-value]


def _num_bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


class Collectives:
    """The collectives of one communicator; `epcomm.communicator` documents them for users."""

    def __init__(self, runtime: Runtime, binder: Binder, fifo: Fifo):
        self.runtime, self._binder, self._fifo = runtime, binder, fifo
        self._plans = PlanBinder(binder)
        self._everyone, self._device = range(runtime.size), runtime.target.device

    def _where(self, name: str) -> str:
        return f"rank {self.runtime.rank}: {name}"

    def _call(self, operation: Operation, values: tuple[int, ...], keep: Any, result: Any, async_op: bool,
              timeout: float | None) -> Any:  # fmt: skip
        """Runs an operation in its turn; `keep` are the tensors behind the addresses."""
        if timeout is None and not async_op and not self._fifo.pending:
            self.runtime.run(operation, *values)
            return result

        check_timeout(f"rank {self.runtime.rank}: {operation.text}", timeout)

        def run(keep: Any = keep) -> Any:
            if timeout is None:
                self.runtime.run(operation, *values)
            else:
                self.runtime.run_within(timeout, operation, *values)
            return result

        return self._fifo.call(run, async_op, f"rank {self.runtime.rank}: {operation.text}")

    def barrier(self, timeout: float | None = None) -> None:
        operation = self._binder.cached("barrier", lambda: self._binder.barrier("barrier()"))
        self._call(operation, (), None, None, False, timeout)

    # ---- by plans

    def _run_plan(self, kind: str, x: torch.Tensor, result: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None, op: str = "", root: int = 0) -> Any:  # fmt: skip
        """Runs a plan, or the plan of the algorithm that is named, from x (contiguous) to result."""
        operation, values = self._plans.request(self._where(kind), kind, algorithm, x, result, op, root)
        return self._call(operation, values, (x, result), result, async_op, timeout)

    # ---- reductions

    def _bind_reduce(self, name: str, x: torch.Tensor, op: str, algorithm: str, root: int) -> Operation:
        where = self._where(name)
        check_op(where, x.dtype, op)
        binder = self._binder
        check_algorithm(where, algorithm, _num_bytes(x), x.dtype, op, binder.has_multicast, binder.spans_hosts)
        to = "" if root < 0 else f", root={root}"
        text = f"{name}(x={x.dtype} {tuple(x.shape)}, op={op}, algorithm={algorithm}{to})"
        return binder.reduce(text, _num_bytes(x), x.dtype, op, algorithm, root)

    @_rejecting
    def allreduce(self, x: torch.Tensor, op: str, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        if not is_plain(x, self._device):
            x = check_tensor(self._where("allreduce"), "x", x, self._device).contiguous()
        if not isinstance(op, str):
            check_op(self._where("allreduce"), x.dtype, op)
        operation = self._binder.bound.get((x.shape, x.dtype, op, algorithm))
        if operation is None:
            if algorithm not in ALGORITHMS:
                result = check_out(self._where("allreduce"), out, x.shape, x)
                return self._run_plan("allreduce", x, result, algorithm, async_op, timeout, op)
            operation = self._bind_reduce("allreduce", x, op, algorithm, -1)
            self._binder.remember((x.shape, x.dtype, op, algorithm), operation)
        result = torch.empty_like(x) if out is None else check_out(self._where("allreduce"), out, x.shape, x)
        num_bytes = x.nbytes
        values = (x.data_ptr(), result.data_ptr(), num_bytes, num_bytes > STREAMING_BYTES)
        return self._call(operation, values, x, result, async_op, timeout)

    @_rejecting
    def bind_allreduce(
        self, x: torch.Tensor, op: str, out: torch.Tensor | None, algorithm: str | Plan
    ) -> Callable[[], Any]:
        where = self._where("bind_allreduce")
        data = check_tensor(where, "x", x, self._device)
        if data.data_ptr() != x.data_ptr() or not data.is_contiguous():
            raise ConfigError(f"{where}: argument `x`: wanted a contiguous tensor, got strides {x.stride()}")
        result = check_out(where, x if out is None else out, x.shape, x)
        num_bytes = _num_bytes(x)
        values: tuple[int, ...] = (x.data_ptr(), result.data_ptr(), num_bytes, num_bytes > STREAMING_BYTES)
        if algorithm in ALGORITHMS:
            operation = self._bind_reduce("allreduce", x, op, algorithm, -1)
        else:
            operation, values = self._plans.request(where, "allreduce", algorithm, x, result, op)
        launch, fifo, runtime = self.runtime.bind(operation, *values), self._fifo, self.runtime

        def call(keep: Any = (x, result)) -> torch.Tensor:
            if fifo.pending:
                fifo.call(lambda: runtime.run(operation, *values), False, operation.text)
            elif status := launch():
                runtime.settle(status, operation, runtime.context)
            return result

        return call

    @_rejecting
    def reduce(self, x: torch.Tensor, dst: int, op: str, out: torch.Tensor | None, algorithm: str | Plan,
               async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        where = self._where("reduce")
        x, dst = check_tensor(where, "x", x, self._device), check_rank(where, "dst", dst, self.runtime.size)
        source, num_bytes = x.contiguous(), _num_bytes(x)
        result = check_out(where, out, x.shape, x) if self.runtime.rank == dst else None
        if algorithm != "auto":
            return self._run_plan("reduce", source, result, algorithm, async_op, timeout, op, dst)
        key = ("reduce", x.shape, x.dtype, op, dst)
        operation = self._binder.cached(key, lambda: self._bind_reduce("reduce", x, op, "auto", dst))
        values = (source.data_ptr(), 0 if result is None else result.data_ptr(), num_bytes, num_bytes > STREAMING_BYTES)
        return self._call(operation, values, (source, result), result, async_op, timeout)

    # ---- data movement

    def _move(self, key: Any, bind: Callable[[], Operation | CopyMove], x: torch.Tensor, result: torch.Tensor | None,
              async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        """Runs an exchange, bound under `key`, from x to result (None: nothing is received here)."""
        return self._run_move(self._binder.cached(key, bind), x, result, async_op, timeout)

    def _run_move(self, operation: Operation | CopyMove, x: torch.Tensor, result: torch.Tensor | None,
                  async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        if isinstance(operation, CopyMove):
            return self._copy(operation, x, result, async_op, timeout)
        streaming = result is not None and _num_bytes(result) > STREAMING_BYTES
        values = (x.data_ptr(), 0 if result is None else result.data_ptr(), x.nbytes, streaming)
        return self._call(operation, values, (x, result), result, async_op, timeout)

    def _copy(self, move: CopyMove, x: torch.Tensor, result: torch.Tensor | None, async_op: bool,
              timeout: float | None) -> Any:  # fmt: skip
        """`_run_move` without a kernel."""
        text = f"rank {self.runtime.rank}: {move.text}"
        check_timeout(text, timeout)

        def run() -> torch.Tensor | None:
            move.run(x.data_ptr(), 0 if result is None else result.data_ptr(), timeout)
            return result

        return self._fifo.call(run, async_op, text)

    @_rejecting
    def allgather(self, x: torch.Tensor, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        return self._gather("allgather", x, -1, out, async_op, timeout, algorithm)

    @_rejecting
    def gather(self, x: torch.Tensor, dst: int, out: torch.Tensor | None, async_op: bool,
               timeout: float | None) -> Any:  # fmt: skip
        check_rank(self._where("gather"), "dst", dst, self.runtime.size)
        return self._gather("gather", x, dst, out, async_op, timeout)

    def _gather(self, name: str, x: torch.Tensor, dst: int, out: torch.Tensor | None, async_op: bool,
                timeout: float | None, algorithm: str | Plan = "auto") -> Any:  # fmt: skip
        where = self._where(name)
        x = check_tensor(where, "x", x, self._device)
        receives = dst in (-1, self.runtime.rank)
        shape = (self.runtime.size * x.shape[0], *x.shape[1:]) if x.dim() else (self.runtime.size,)
        result = check_out(where, out, shape, x) if receives else None
        if algorithm != "auto":
            return self._run_plan(name, x.contiguous(), result, algorithm, async_op, timeout)
        size, each = self.runtime.size, _num_bytes(x)

        def bind() -> Operation | CopyMove:
            sends = [each if dst in (-1, rank) else 0 for rank in self._everyone]
            offsets = [rank * each for rank in self._everyone]
            table = [[0] * size, sends, offsets, [each if receives else 0] * size]
            to = "" if dst < 0 else f", dst={dst}"
            return self._binder.exchange(f"{name}(x={x.dtype} {tuple(x.shape)}{to})", table, each, shared=True)

        return self._move((name, x.shape, x.dtype, dst), bind, x.contiguous(), result, async_op, timeout)

    @_rejecting
    def broadcast(self, x: torch.Tensor, src: int, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        where = self._where("broadcast")
        x, size = check_tensor(where, "x", x, self._device), self.runtime.size
        check_rank(where, "src", src, size)
        result, each = check_out(where, out, x.shape, x), _num_bytes(x)
        if algorithm != "auto":
            return self._run_plan("broadcast", x.contiguous(), result, algorithm, async_op, timeout, root=src)

        def bind() -> Operation | CopyMove:
            sends = [each if self.runtime.rank == src else 0] * size
            receives = [each if rank == src else 0 for rank in self._everyone]
            text = f"broadcast(x={x.dtype} {tuple(x.shape)}, src={src})"
            table = [[0] * size, sends, [0] * size, receives]
            return self._binder.exchange(text, table, each, shared=True, root=src)

        return self._move(("broadcast", x.shape, x.dtype, src), bind, x.contiguous(), result, async_op, timeout)

    @_rejecting
    def scatter(self, x: torch.Tensor | None, src: int, out: torch.Tensor | None, async_op: bool,
                timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("scatter"), self.runtime.size
        check_rank(where, "src", src, size)
        if self.runtime.rank == src:
            x = check_tensor(where, "x", x, self._device)
            rows = check_divisible(where, x, size)
            result = check_out(where, out, (rows, *x.shape[1:]), x)
        elif out is None:
            raise ConfigError(f"{where}: argument `out`: wanted a tensor to receive into: only rank {src} has x")
        else:
            check_tensor(where, "out", out, self._device)
            x = result = check_out(where, out, out.shape, out)
        each = _num_bytes(result)

        def bind() -> Operation | CopyMove:
            sends = [each if self.runtime.rank == src else 0] * size
            receives = [each if rank == src else 0 for rank in self._everyone]
            offsets = [rank * each for rank in self._everyone]
            text = f"scatter(part={result.dtype} {tuple(result.shape)}, src={src})"
            return self._binder.exchange(text, [offsets, sends, [0] * size, receives], each)

        return self._move(("scatter", result.shape, result.dtype, src), bind, x.contiguous(), result, async_op, timeout)

    @_rejecting
    def reduce_scatter(self, x: torch.Tensor, op: str, out: torch.Tensor | None, algorithm: str | Plan,
                       async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("reduce_scatter"), self.runtime.size
        x = check_tensor(where, "x", x, self._device)
        rows = check_divisible(where, x, size)
        check_op(where, x.dtype, op)
        result = check_out(where, out, (rows, *x.shape[1:]), x)
        if algorithm != "auto":
            return self._run_plan("reduce_scatter", x.contiguous(), result, algorithm, async_op, timeout, op)
        each = _num_bytes(result)

        def bind() -> Operation | CopyMove:
            text = f"reduce_scatter(x={x.dtype} {tuple(x.shape)}, op={op})"
            return self._binder.reduce_scatter(text, each, x.dtype, op)

        return self._move(("reduce_scatter", x.shape, x.dtype, op), bind, x.contiguous(), result, async_op, timeout)

    @_rejecting
    def alltoall(self, x: torch.Tensor, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                 timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("alltoall"), self.runtime.size
        x = check_tensor(where, "x", x, self._device)
        check_divisible(where, x, size)
        result, each = check_out(where, out, x.shape, x), _num_bytes(x) // size
        if algorithm != "auto":
            return self._run_plan("alltoall", x.contiguous(), result, algorithm, async_op, timeout)

        def bind() -> Operation | CopyMove:
            offsets = [rank * each for rank in self._everyone]
            text = f"alltoall(x={x.dtype} {tuple(x.shape)})"
            return self._binder.exchange(text, [offsets, [each] * size, offsets, [each] * size], each)

        return self._move(("alltoall", x.shape, x.dtype), bind, x.contiguous(), result, async_op, timeout)

    @_rejecting
    def alltoallv(self, x: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None,
                  out: torch.Tensor | None, async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        where, size, rank = self._where("alltoallv"), self.runtime.size, self.runtime.rank
        x = check_tensor(where, "x", x, self._device)
        if x.dim() == 0:
            raise ConfigError(f"{where}: argument `x`: wanted at least 1 dimension, got a scalar")
        sends = check_splits(where, "send_splits", send_splits, x.shape[0], size)
        matrix = self.allgather(torch.tensor([sends], device=self._device), None, "auto", False, timeout)
        receives = matrix[:, rank].tolist()
        if recv_splits is not None and check_splits(where, "recv_splits", recv_splits, None, size) != receives:
            raise ConfigError(
                f"{where}: argument `recv_splits`: wanted {receives}, which is what the peers send, "
                f"got {list(recv_splits)}"
            )
        result = check_out(where, out, (sum(receives), *x.shape[1:]), x)
        if out is not None:
            check_overlap(where, x, result)
        row = x.element_size() * torch.Size(x.shape[1:]).numel()
        counts = [[n * row for n in splits] for splits in (sends, receives)]
        send_offsets, receive_offsets = ([0, *itertools.accumulate(count)][:size] for count in counts)

        # bound anew for each call: splits hardly ever come again, and would push out what does
        table = [send_offsets, counts[0], receive_offsets, counts[1]]
        text, max_pair_bytes = f"alltoallv(row={x.dtype} {tuple(x.shape[1:])})", int(matrix.max()) * row
        operation = self._binder.exchange(text, table, max_pair_bytes)
        return self._run_move(operation, x.contiguous(), result, async_op, timeout)
