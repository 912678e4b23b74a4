"""The process group and its works: what torch calls, in terms of a `Communicator`."""

# torch calls these methods by position; its stubs name the parameters otherwise
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epcomm.communicator import Communicator
from epcomm.initialize import init

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_NO_GRAPH_TASK = -1  # outside of a backward pass


class Work(dist._Work):
    """An operation of a group: `work` of a communicator, None once it is complete; `tensors` are its results."""

    def __init__(self, work: Any, tensors: list[Tensor], source: int | None = None):
        super().__init__()
        self.work, self._tensors, self._source = work, tensors, source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: B008
        """Returns True once it is complete, or raises what it raised; `TimeoutError` after a `timeout` that isn't 0."""
        return self.work is None or self.work.wait(_seconds(timeout))

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.work is None or self.work.is_completed()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return None if self.work is None else self.work.exception()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """The rank that a message came from."""
        return self.work.result()[1] if self._source is None else self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """A future of the results. In a backward pass the end of the pass waits for it as well, and raises.

        DistributedDataParallel reads futures in C++. There one that Python has failed looks complete, with the
        exception as its value, which crashes; one whose callback raised is an error, but of no particular kind.
        What is raised at the end of the pass, before it reads them, is what has happened.
        """
        if self.work is None:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(self._tensors)
            return future
        if torch._C._current_graph_task_id() != _NO_GRAPH_TASK:
            torch.autograd.Variable._execution_engine.queue_callback(self.synchronize)
        return self.work.get_future().then(self._results_of)

    def _results_of(self, future: torch.futures.Future) -> list[Tensor]:
        future.value()  # raises if the operation did
        return self._tensors


class ProcessGroup(dist.ProcessGroup):
    """A group of ranks with a communicator for each device of its tensors.

    The one for CPUs is made at once. Any other is made by the first operation on its device, which all ranks must call.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # that of (store, rank, size) fails in torch 2.13
        self._store, self._timeout = store, timeout.total_seconds()
        self._name = self._description = ""
        self._communicators: dict[torch.device, Communicator] = {}
        self._communicator(_CPU)

    def _communicator(self, device: torch.device) -> Communicator:
        if device not in self._communicators:
            self._communicators[device] = init(
                store=self._store, rank=self.rank(), world_size=self.size(), device=device, timeout=self._timeout
            )
        return self._communicators[device]

    # ---- the group

    def getBackendName(self) -> str:
        return "epcomm"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        """What `destroy_process_group` does. Collective, unless the group has failed."""
        for communicator in self._communicators.values():
            communicator.close()

    def abort(self) -> None:
        """Fails the group on all ranks and leaves it."""
        for communicator in self._communicators.values():
            communicator.abort("the process group was aborted")
            communicator.close()

    # ---- collectives. Lists are of one tensor each: they once held one for each GPU of a process.

    def _run(self, name: str, opts: Any, results: list[Tensor], x: Any, *args: Any, **kwargs: Any) -> Work:
        """Calls a method of the communicator, whose results are `results`."""
        device = (x[0] if isinstance(x, list) else results[0] if x is None else x).device
        method = getattr(self._communicator(device), name)
        work = method(x, *args, **kwargs, async_op=opts.asyncOp, timeout=_seconds(opts.timeout))
        return Work(work if opts.asyncOp else None, results)

    def barrier(self, opts: Any = dist.BarrierOptions()) -> Work:  # noqa: B008
        work = None
        for communicator in reversed(self._communicators.values()):  # the works of other devices are complete at once
            work = communicator.barrier(async_op=opts.asyncOp, timeout=_seconds(opts.timeout))
        return Work(work, [])

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


def _seconds(timeout: timedelta) -> float | None:
    """None for the values with which torch says that nothing was asked for, which are not positive."""
    return timeout.total_seconds() if timeout > timedelta(0) else None


def _flat(out: Tensor) -> Tensor:
    """A view of one dimension; a tensor of which there is none is left to the communicator, which rejects it."""
    return out.view(-1) if out.is_contiguous() else out
