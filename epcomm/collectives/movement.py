"""Collectives that move data, and reduce_scatter: tables that tell which bytes go to and come from each rank.

What goes to or comes from the ranks may be one tensor, cut along dim 0, or a list of one tensor per rank, which is
neither copied together nor apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from epcomm.collectives.calls import Calls, rejecting
from epcomm.collectives.checks import (
    check_divisible,
    check_op,
    check_out,
    check_overlap,
    check_rank,
    check_splits,
    check_tensor,
    check_timeout,
)
from epcomm.collectives.copy_engine import CopyMove
from epcomm.collectives.parts import Parts, Tensors, check_out_parts, check_parts, check_whole, parts_of
from epcomm.collectives.plan import Plan
from epcomm.device.cpu.memory import STREAMING_BYTES
from epcomm.errors import ConfigError
from epcomm.operation import Operation


class _Uneven(NamedTuple):
    """An exchange of parts of any sizes, which are counted in units of so many bytes."""

    text: str
    unit_bytes: int
    source: Parts
    sends: list[int]
    receives: list[int] | None  # None: whatever the peers send
    argument: str  # the one that tells `receives`
    result_of: Callable[[list[int]], Tensors]  # where so many units from each peer go


class Movement(Calls):
    """The data movement of one communicator; `epcomm.communicator` documents it for users."""

    def _move(self, key: Any, bind: Callable[[], Operation | CopyMove], source: Parts, into: Parts | None,
              async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        """Runs an exchange, bound under `key`, between parts (None: nothing is received here)."""
        # where tensors of lists lie hardly ever comes again, and would push out what does
        is_bound_anew = source.offsets is not None or (into is not None and into.offsets is not None)
        operation = bind() if is_bound_anew else self._binder.cached(key, bind)
        return self._run_move(operation, source, into, async_op, timeout)

    def _run_move(self, operation: Operation | CopyMove, source: Parts, into: Parts | None, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        result, address, streaming = None, 0, False
        if into is not None:
            result, address, streaming = into.tensors, into.address, into.num_bytes > STREAMING_BYTES
        if not isinstance(operation, CopyMove):
            values = (source.address, address, source.num_bytes, streaming)
            return self._call(operation, values, source.tensors, result, async_op, timeout)
        text = f"rank {self.runtime.rank}: {operation.text}"
        check_timeout(text, timeout)

        def run(keep: Any = source.tensors) -> Any:
            operation.run(source.address, address, timeout)
            return result

        return self._fifo.call(run, async_op, text)

    @rejecting
    def allgather(self, x: torch.Tensor, out: Tensors | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        return self._gather("allgather", x, -1, out, async_op, timeout, algorithm)

    @rejecting
    def gather(self, x: torch.Tensor, dst: int, out: Tensors | None, async_op: bool,
               timeout: float | None) -> Any:  # fmt: skip
        check_rank(self._where("gather"), "dst", dst, self.runtime.size)
        return self._gather("gather", x, dst, out, async_op, timeout)

    def _gather(self, name: str, x: torch.Tensor, dst: int, out: Tensors | None, async_op: bool,
                timeout: float | None, algorithm: str | Plan = "auto") -> Any:  # fmt: skip
        where, size = self._where(name), self.runtime.size
        x = check_tensor(where, "x", x, self._device)
        receives = dst in (-1, self.runtime.rank)
        into = self._room(where, x, out) if receives else None
        if algorithm != "auto":
            check_whole(where, "out", out)
            assert into is not None  # all ranks receive
            return self._run_plan(name, x.contiguous(), into.tensors, algorithm, async_op, timeout)
        each = x.nbytes

        def bind() -> Operation | CopyMove:
            sends = [each if dst in (-1, rank) else 0 for rank in self._everyone]
            offsets = [0] * size if into is None else into.offsets_of([each] * size)
            table = [[0] * size, sends, offsets, [each if receives else 0] * size]
            to = "" if dst < 0 else f", dst={dst}"
            return self._binder.exchange(f"{name}(x={x.dtype} {tuple(x.shape)}{to})", table, each, shared=True)

        return self._move((name, x.shape, x.dtype, dst), bind, parts_of(x.contiguous()), into, async_op, timeout)

    def _room(self, where: str, x: torch.Tensor, out: Tensors | None) -> Parts:
        """Where everyone's `x` goes: into one tensor or into one for each rank."""
        size = self.runtime.size
        if isinstance(out, Sequence):
            check_out_parts(where, out, size, x.shape, x)
            return parts_of(out)
        return parts_of(check_out(where, out, (size * x.shape[0], *x.shape[1:]) if x.dim() else (size,), x))

    @rejecting
    def broadcast(self, x: torch.Tensor, src: int, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None) -> Any:  # fmt: skip
        where = self._where("broadcast")
        x, size = check_tensor(where, "x", x, self._device), self.runtime.size
        check_rank(where, "src", src, size)
        result, each = check_out(where, out, x.shape, x), x.nbytes
        if algorithm != "auto":
            return self._run_plan("broadcast", x.contiguous(), result, algorithm, async_op, timeout, root=src)

        def bind() -> Operation | CopyMove:
            sends = [each if self.runtime.rank == src else 0] * size
            receives = [each if rank == src else 0 for rank in self._everyone]
            text = f"broadcast(x={x.dtype} {tuple(x.shape)}, src={src})"
            table = [[0] * size, sends, [0] * size, receives]
            return self._binder.exchange(text, table, each, shared=True, root=src)

        source, key = parts_of(x.contiguous()), ("broadcast", x.shape, x.dtype, src)
        return self._move(key, bind, source, parts_of(result), async_op, timeout)

    @rejecting
    def scatter(self, x: Tensors | None, src: int, out: torch.Tensor | None, async_op: bool,
                timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("scatter"), self.runtime.size
        check_rank(where, "src", src, size)
        if self.runtime.rank == src:
            source, part = self._even_parts(where, x)
            result = check_out(where, out, part.shape, part)
        elif out is None:
            raise ConfigError(f"{where}: argument `out`: wanted a tensor to receive into: only rank {src} has x")
        else:
            check_tensor(where, "out", out, self._device)
            result = check_out(where, out, out.shape, out)
            source = parts_of(result)
        each = result.nbytes

        def bind() -> Operation | CopyMove:
            sends = [each if self.runtime.rank == src else 0] * size
            receives = [each if rank == src else 0 for rank in self._everyone]
            text = f"scatter(part={result.dtype} {tuple(result.shape)}, src={src})"
            table = [source.offsets_of([each] * size), sends, [0] * size, receives]
            return self._binder.exchange(text, table, each)

        key = ("scatter", result.shape, result.dtype, src)
        return self._move(key, bind, source, parts_of(result), async_op, timeout)

    @rejecting
    def reduce_scatter(self, x: Tensors, op: str, out: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                       timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("reduce_scatter"), self.runtime.size
        # between hosts the way depends on sizes alone, and one of them wants the parts side by side
        source, part = self._even_parts(where, x, is_joined=self._binder.spans_hosts)
        check_op(where, part.dtype, op)
        result = check_out(where, out, part.shape, part)
        if algorithm != "auto":
            whole = check_whole(where, "x", source.tensors)
            return self._run_plan("reduce_scatter", whole, result, algorithm, async_op, timeout, op)
        each = result.nbytes

        def bind() -> Operation | CopyMove:
            text = f"reduce_scatter(part={part.dtype} {tuple(part.shape)}, op={op})"
            return self._binder.reduce_scatter(text, source.offsets_of([each] * size), each, part.dtype, op)

        key = ("reduce_scatter", part.shape, part.dtype, op)
        return self._move(key, bind, source, parts_of(result), async_op, timeout)

    def _even_parts(
        self, where: str, x: Tensors | None, *, is_joined: bool = False
    ) -> tuple[Parts, torch.Tensor]:
        """Equal parts of `x`, by dim 0 or one tensor for each rank; and the first, for its shape and dtype."""
        size = self.runtime.size
        if isinstance(x, Sequence):
            listed = [part.contiguous() for part in check_parts(where, "x", x, size, self._device, alike=True)]
            return parts_of(torch.stack(listed) if is_joined else listed), listed[0]
        whole = check_tensor(where, "x", x, self._device).contiguous()
        return parts_of(whole), whole[: check_divisible(where, whole, size)]

    @rejecting
    def alltoall(self, x: Tensors, out: Tensors | None, algorithm: str | Plan, async_op: bool,
                 timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("alltoall"), self.runtime.size
        if algorithm != "auto":
            check_whole(where, "x", x)
            check_whole(where, "out", out)
        if isinstance(x, Sequence) or isinstance(out, Sequence):
            return self._alltoall_lists(where, x, out, async_op, timeout)
        source, part = self._even_parts(where, x)
        result = check_out(where, out, (size * part.shape[0], *part.shape[1:]), part)
        if algorithm != "auto":
            return self._run_plan("alltoall", source.tensors, result, algorithm, async_op, timeout)

        def bind() -> Operation | CopyMove:
            counts = [part.nbytes] * size
            offsets = source.offsets_of(counts)
            text = f"alltoall(part={part.dtype} {tuple(part.shape)})"
            return self._binder.exchange(text, [offsets, counts, offsets, counts], part.nbytes)

        return self._move(("alltoall", part.shape, part.dtype), bind, source, parts_of(result), async_op, timeout)

    def _alltoall_lists(self, where: str, x: Tensors, out: Tensors | None, async_op: bool,
                        timeout: float | None) -> Any:  # fmt: skip
        size = self.runtime.size
        if not (isinstance(x, Sequence) and isinstance(out, Sequence)):
            raise ConfigError(f"{where}: arguments `x` and `out`: wanted two tensors or two lists of {size} tensors")
        sent = [part.contiguous() for part in check_parts(where, "x", x, size, self._device, alike=False)]
        check_parts(where, "out", out, size, self._device, alike=False)
        for part in out:
            check_out(where, part, part.shape, sent[0])
            for other in sent:
                check_overlap(where, other, part)
        counts = [part.numel() for part in sent], [part.numel() for part in out]
        text, unit = f"alltoall(parts={sent[0].dtype})", sent[0].element_size()
        return self._call_uneven(_Uneven(text, unit, parts_of(sent), *counts, "out", lambda _: out), async_op, timeout)

    @rejecting
    def alltoallv(self, x: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int] | None,
                  out: torch.Tensor | None, async_op: bool, timeout: float | None) -> Any:  # fmt: skip
        where, size = self._where("alltoallv"), self.runtime.size
        x = check_tensor(where, "x", x, self._device)
        if x.dim() == 0:
            raise ConfigError(f"{where}: argument `x`: wanted at least 1 dimension, got a scalar")
        sends = check_splits(where, "send_splits", send_splits, x.shape[0], size)
        receives = None if recv_splits is None else check_splits(where, "recv_splits", recv_splits, None, size)
        row = x.shape[1:]
        if out is not None:
            check_overlap(where, x, check_tensor(where, "out", out, self._device))

        def result_of(receives: list[int]) -> torch.Tensor:
            return check_out(where, out, (sum(receives), *row), x)

        text, row_bytes = f"alltoallv(row={x.dtype} {tuple(row)})", x.element_size() * row.numel()
        request = _Uneven(text, row_bytes, parts_of(x.contiguous()), sends, receives, "recv_splits", result_of)
        return self._call_uneven(request, async_op, timeout)

    def _call_uneven(self, request: _Uneven, async_op: bool, timeout: float | None) -> Any:
        """An exchange in whose turn the ranks first tell each other how much they send."""
        check_timeout(self._where(request.text), timeout)
        run = functools.partial(self._exchange_uneven, request, timeout)
        return self._fifo.call(run, async_op, self._where(request.text))

    @rejecting
    def _exchange_uneven(self, request: _Uneven, timeout: float | None) -> Any:
        rank, unit = self.runtime.rank, request.unit_bytes
        matrix = self.allgather(torch.tensor([request.sends], device=self._device), None, "auto", False, timeout)
        receives = matrix[:, rank].tolist()
        if request.receives not in (None, receives):
            got = f"wanted {receives}, which is what the peers send, got {request.receives}"
            raise ConfigError(f"{self._where(request.text)}: argument `{request.argument}`: {got}")
        into = parts_of(request.result_of(receives))
        table = []
        for parts, counts in ((request.source, request.sends), (into, receives)):
            num_bytes = [count * unit for count in counts]
            table += [parts.offsets_of(num_bytes), num_bytes]
        # bound anew for each call: splits hardly ever come again, and would push out what does
        operation = self._binder.exchange(request.text, table, int(matrix.max()) * unit)
        return self._run_move(operation, request.source, into, False, timeout)
