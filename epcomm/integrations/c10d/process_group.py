"""The operations of a process group: what torch calls, in terms of a `Communicator`."""

# torch calls these methods by position; its stubs name the parameters otherwise
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epcomm.integrations.c10d.group import CPU, Group
from epcomm.integrations.c10d.work import Work, seconds_of

Tensor = torch.Tensor


class ProcessGroup(Group):
    """torch's lists are of one tensor each: they once held one for each GPU of a process."""

    def _run(self, name: str, opts: Any, results: list[Tensor], x: Any, *args: Any, **kwargs: Any) -> Work:
        """Calls a method of the communicator, whose results are `results`."""
        device = (x[0] if isinstance(x, list) else results[0] if x is None else x).device
        method = getattr(self._communicator(device), name)
        work = method(x, *args, **kwargs, async_op=opts.asyncOp, timeout=seconds_of(opts.timeout))
        return Work(work if opts.asyncOp else None, results)

    def barrier(self, opts: Any = dist.BarrierOptions()) -> Work:  # noqa: B008
        work = None
        for communicator in reversed(self._communicators.values()):  # the works of other devices are complete at once
            work = communicator.barrier(async_op=opts.asyncOp, timeout=seconds_of(opts.timeout))
        return Work(work, [])

    def monitored_barrier(self, timeout: timedelta = timedelta(0), wait_all_ranks: bool = False) -> None:  # noqa: B008
        """A barrier on CPUs, whose error names a rank that has not come; only one, whatever `wait_all_ranks` says."""
        self._communicator(CPU).barrier(timeout=seconds_of(timeout))

    def allreduce(self, tensors: list[Tensor], opts: Any = dist.AllreduceOptions()) -> Work:  # noqa: B008
        (x,) = tensors
        return self._run("allreduce", opts, [x], x, _op(opts), out=x)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        (x,) = tensors
        out = x if opts.rootRank == self.rank() else None
        return self._run("reduce", opts, [x], x, opts.rootRank, _op(opts), out=out)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        (x,) = tensors
        return self._run("broadcast", opts, [x], x, opts.rootRank, out=x)

    def allgather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        (out,), (x,) = outs, tensors
        return self._run("allgather", opts, out, x, out=out)

    def gather(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        (x,), out = tensors, outs[0] if outs else None
        return self._run("gather", opts, out or [], x, opts.rootRank, out=out)

    def scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Work:
        (out,), x = outs, tensors[0] if tensors else None
        return self._run("scatter", opts, [out], x, opts.rootRank, out=out)

    def reduce_scatter(self, outs: list[Tensor], tensors: list[list[Tensor]], opts: Any) -> Work:
        (out,), (x,) = outs, tensors
        return self._run("reduce_scatter", opts, [out], x, _op(opts), out=out)

    def alltoall(self, outs: list[Tensor], tensors: list[Tensor], opts: Any) -> Work:
        return self._run("alltoall", opts, outs, tensors, out=outs)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any) -> Work:
        return self._run("allgather", opts, [out], x.reshape(-1), out=_flat(out))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Work:
        return self._run("reduce_scatter", opts, [out], x.reshape(-1), _op(opts), out=_flat(out))

    def all_to_all_single(self, out: Tensor, x: Tensor, receives: list[int], sends: list[int], opts: Any) -> Work:
        if not (receives or sends):
            return self._run("alltoall", opts, [out], x, out=out)
        sends, receives = sends or self._evenly(x), receives or self._evenly(out)
        return self._run("alltoallv", opts, [out], x, sends, receives, out=out)

    def _evenly(self, tensor: Tensor) -> list[int]:
        return [tensor.shape[0] // self.size()] * self.size()

    # ---- several at once

    def _each(self, method: Callable[..., Work], results: list[Any], *lists: list[Any]) -> Work:
        """A call per element. They complete in order, and none after one that failed: the last stands for all."""
        works = [method(*elements) for elements in zip(*lists, strict=True)]
        return Work(works[-1].work if works else None, results)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        return self._each(lambda x: self.allreduce([x], opts), tensors, tensors)

    def allgather_coalesced(self, outs: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Work:
        by_tensor = [list(parts) for parts in zip(*outs, strict=True)]
        return self._each(lambda out, x: self.allgather([out], [x], opts), outs, by_tensor, tensors)

    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any) -> Work:
        return self._each(lambda out, x: self.all_gather_single(out, x, opts), outs, outs, tensors)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any) -> Work:
        return self._each(lambda out, x: self.reduce_scatter_single(out, x, opts), outs, outs, tensors)

    # ---- messages

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        (x,) = tensors
        return Work(self._communicator(x.device).send(x, dst, tag, async_op=True), [x])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        (out,) = tensors
        return Work(self._communicator(out.device).recv(out, src, tag, async_op=True), [out], src)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        (out,) = tensors
        return Work(self._communicator(out.device).recv_any(out, tag, async_op=True), [out])

    # ---- names until torch 2.12

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _op(opts: Any) -> str:
    """epcomm's name of a reduction; the communicator says which there are."""
    name = opts.reduceOp.op.name.lower()
    return "prod" if name == "product" else name


def _flat(out: Tensor) -> Tensor:
    """A view of one dimension; a tensor of which there is none is left to the communicator, which rejects it."""
    return out.view(-1) if out.is_contiguous() else out
