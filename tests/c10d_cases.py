"""What ranks do with `torch.distributed` on epcomm, compared with definitions. Each case is called on every rank.

A case finds an initialised default group and leaves it open; its name tells what it covers.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_cases import REDUCTIONS, addend, payload, reduced, same_bits
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.torch_version import TorchVersion

import epcomm.integrations.c10d  # noqa: F401

OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
MOVED = (torch.float32, torch.bool, torch.bfloat16, torch.int64)


@contextlib.contextmanager
def group(backend: str = "epcomm", timeout: float = 30.0) -> Iterator[None]:
    """A default group of the ranks that a test has started."""
    dist.init_process_group(backend, init_method="epcomm://", timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        dist.destroy_process_group()


def place() -> tuple[int, int]:
    """This rank and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def calls(operation: Any, *args: Any, **kwargs: Any) -> None:
    """An operation that is asynchronous if `async_op` says so, waited for."""
    work = operation(*args, **kwargs)
    if kwargs.get("async_op"):
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    else:
        assert work is None


# ---- dist.*


def reductions() -> None:
    rank, size = place()
    for case, (dtype, op) in enumerate(REDUCTIONS):
        if dtype.is_complex and op == "avg":
            continue  # torch's front end divides nothing complex
        root, shape = case % size, (0, 1, 77, 20_001)[case % 4 : case % 4 + 1]
        inputs = [addend(source, shape, dtype, op, case, size) for source in range(size)]
        wanted = reduced(inputs, op)
        for is_async in (False, True, True):
            x = inputs[rank].clone()
            calls(dist.all_reduce, x, OPS[op], async_op=is_async)
            assert same_bits(x, wanted), ("all_reduce", dtype, op)
            x = inputs[rank].clone()
            calls(dist.reduce, x, root, OPS[op], async_op=is_async)
            assert rank != root or same_bits(x, wanted), ("reduce", dtype, op)


def scattered_reductions() -> None:
    rank, size = place()
    for call, shape in enumerate([(1,), (3, 5), (0,), (2, 20_000)]):
        parts = [
            [addend(source, shape, torch.float32, "sum", 10 * call + to, size) for to in range(size)]
            for source in range(size)
        ]
        wanted = reduced([sent[rank] for sent in parts], "sum")
        for is_async in (False, True, True):
            out = torch.empty(shape)
            calls(dist.reduce_scatter, out, [part.clone() for part in parts[rank]], async_op=is_async)
            assert same_bits(out, wanted)
            out = torch.empty(shape)
            calls(dist.reduce_scatter_single, out, torch.cat(parts[rank]), async_op=is_async)
            assert same_bits(out, wanted)
            out = torch.empty(shape)
            calls(dist.reduce_scatter_single, out, torch.stack(parts[rank]), async_op=is_async)  # by one more dimension
            assert same_bits(out, wanted)


def gathers_and_scatters() -> None:
    rank, size = place()
    for call, dtype in enumerate(MOVED):
        for shape in [(1,), (3, 5), (0,), (2, 30_000)]:
            parts, root = [payload(source, shape, dtype, call) for source in range(size)], call % size
            for is_async in (False, True, True):
                outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
                calls(dist.all_gather, outs, parts[rank], async_op=is_async)
                assert all(map(same_bits, outs, parts))
                for joined in (torch.cat(parts), torch.stack(parts)):
                    out = torch.empty_like(joined)
                    calls(dist.all_gather_single, out, parts[rank], async_op=is_async)
                    assert same_bits(out, joined)
                outs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
                calls(dist.gather, parts[rank], outs if rank == root else None, root, async_op=is_async)
                assert rank != root or all(map(same_bits, outs, parts))
                out = torch.empty(shape, dtype=dtype)
                calls(dist.scatter, out, parts if rank == root else None, root, async_op=is_async)
                assert same_bits(out, parts[rank])
                out = parts[rank].clone()
                calls(dist.broadcast, out, root, async_op=is_async)
                assert same_bits(out, parts[root])


def all_to_all() -> None:
    rank, size = place()
    for call, dtype in enumerate((torch.float32, torch.int64, torch.complex64)):

        def part(source: int, to: int, rows: int, call: int = call, dtype: torch.dtype = dtype) -> torch.Tensor:
            return payload(8 * source + to, (rows, 3), dtype, call)

        for rows in (
            [[2] * size] * size,
            [[(source * 5 + 3 * to) % 4 for to in range(size)] for source in range(size)],
        ):
            sends, receives = rows[rank], [row[rank] for row in rows]
            x = [part(rank, to, sends[to]) for to in range(size)]
            wanted = [part(source, rank, receives[source]) for source in range(size)]
            for is_async in (False, True, True):
                outs = [torch.empty_like(each) for each in wanted]
                calls(dist.all_to_all, outs, x, async_op=is_async)
                assert all(map(same_bits, outs, wanted))
                out = torch.empty_like(torch.cat(wanted))
                calls(dist.all_to_all_single, out, torch.cat(x), receives, sends, async_op=is_async)
                assert same_bits(out, torch.cat(wanted))
                if len(set(sends)) == 1:
                    calls(dist.all_to_all_single, out.zero_(), torch.cat(x), async_op=is_async)
                    assert same_bits(out, torch.cat(wanted))


def objects() -> None:
    rank, size = place()
    for call in range(3):
        own = {"rank": rank, "list": list(range(rank * 100 * call)), "call": call}
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, own)
        assert [each["rank"] for each in everyone] == list(range(size)) and everyone[rank] == own
        root = call % size
        gathered: list[Any] = [None] * size
        dist.gather_object(own, gathered if rank == root else None, root)
        assert rank != root or [each["rank"] for each in gathered] == list(range(size))
        shared = [own if rank == root else None, "x" * rank if rank == root else None]
        dist.broadcast_object_list(shared, root)
        assert shared[0]["rank"] == root and shared[1] == "x" * root
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {to}" for to in range(size)] if rank == root else None, root)
        assert mine == [f"for {rank}"]


def monitored_barrier(timeout: timedelta | None = None) -> None:
    """torch's, which asks for gloo by name until torch 2.14; then the method that it calls."""
    if TorchVersion(torch.__version__) >= (2, 14):
        dist.monitored_barrier(timeout=timeout)
    else:
        dist.group.WORLD.monitored_barrier(timeout or timedelta(0))  # type: ignore[union-attr]


def barriers() -> None:
    """Whoever leaves one finds that all have come."""
    _, size = place()
    store = dist.distributed_c10d._get_default_store()
    for call, barrier in enumerate([dist.barrier, monitored_barrier] * 3):
        store.add(f"call {call}", 1)
        barrier()
        assert store.add(f"call {call}", 0) == size


def messages() -> None:
    rank, size = place()
    following, previous = (rank + 1) % size, (rank - 1) % size
    for call, shape in enumerate([(1,), (0,), (70_000,), (2, 3)]):
        sent, out = payload(rank, shape, torch.float32, call), torch.empty(shape)
        wanted = payload(previous, shape, torch.float32, call)
        if rank == 0:
            dist.send(sent, following, tag=call)
            assert dist.recv(out, previous, tag=call) == previous
        else:
            assert dist.recv(out, previous, tag=call) == previous
            dist.send(sent, following, tag=call)
        assert same_bits(out, wanted)
        works = [dist.isend(sent, following), dist.irecv(out.zero_(), previous)]
        dist.barrier()  # messages are beside the collectives
        assert all(work.wait() for work in works) and same_bits(out, wanted)
        batch = [dist.P2POp(dist.irecv, out.zero_(), previous), dist.P2POp(dist.isend, sent, following)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert same_bits(out, wanted)


def messages_of_any_rank() -> None:
    """Every rank sends to rank 0, which takes them as they come: those of one rank in order."""
    rank, size = place()
    for call in range(3):
        dist.barrier()
        found: dict[int, list[float]] = {source: [] for source in range(1, size)}
        for number in range(3 if rank else 3 * (size - 1)):
            x = torch.full((5,), 10.0 * rank + number)
            if rank:
                dist.send(x, 0, tag=call)
            elif number % 2:
                found[dist.recv(x, tag=call)].append(x[-1].item())
            else:
                work = dist.irecv(x, tag=call)
                assert work is not None and work.wait()
                found[work._source_rank()].append(x[-1].item())
        assert rank or found == {source: [10.0 * source + number for number in range(3)] for source in found}


def coalesced() -> None:
    rank, size = place()
    shapes = [(3,), (0,), (2, 5), (40_000,)]
    for is_async in (False, True, True):
        inputs = [[addend(source, shape, torch.float32, "sum", 0, size) for source in range(size)] for shape in shapes]
        wanted = [reduced(each, "sum") for each in inputs]
        own = [each[rank].clone() for each in inputs]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for x in own:
                dist.all_reduce(x)
        if is_async:
            manager.wait()
        assert all(map(same_bits, own, wanted))
        outs = [torch.empty(size, *shape) for shape in shapes]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for out, each in zip(outs, inputs):
                dist.all_gather_single(out, each[rank])
        if is_async:
            manager.wait()
        assert all(same_bits(out, torch.stack(each)) for out, each in zip(outs, inputs))
        outs = [torch.empty(shape) for shape in shapes]
        with dist._coalescing_manager(async_ops=is_async) as manager:
            for out, each in zip(outs, inputs):
                dist.reduce_scatter_single(out, torch.stack([each[rank]] * size))
        if is_async:
            manager.wait()
        assert all(map(same_bits, outs, wanted))
        lists = [[torch.empty(shape) for shape in shapes] for _ in range(size)]
        dist.all_gather_coalesced(lists, [each[rank] for each in inputs])
        assert all(same_bits(lists[source][index], inputs[index][source])
                   for source in range(size) for index in range(len(shapes)))  # fmt: skip


def order_of_calls() -> None:
    """Synchronous and asynchronous operations on the same tensors run in the order of the calls."""
    rank, size = place()
    for call in range(10):
        x = torch.full((10_000,), float(rank + call))
        first = dist.all_reduce(x, async_op=True)
        second = dist.broadcast(x, call % size, async_op=True)
        out = torch.empty(size, 10_000)
        dist.all_gather_single(out, x)
        assert first.is_completed() and second.is_completed(), "a synchronous call overtook asynchronous ones"
        assert out.unique().tolist() == [float(sum(range(size)) + size * call)]
        barrier = dist.barrier(async_op=True)
        assert barrier.wait()


def works() -> None:
    rank, size = place()
    x = torch.ones(5)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        if size > 1:
            try:
                work.wait(timedelta(milliseconds=30))
            except TimeoutError:
                assert not work.is_completed() and not work.is_success()
            else:
                raise AssertionError("nobody else has come, and the wait ended")
    else:
        dist.recv(torch.empty(1), 0)
        work = dist.all_reduce(x, async_op=True)
    for peer in range(1, size if rank == 0 else 0):
        dist.send(torch.ones(1), peer)
    (result,) = work.result()
    assert result is x and x.tolist() == [float(size)] * 5
    (value,) = work.get_future().wait()
    assert value.tolist() == [float(size)] * 5
    doubled = dist.all_reduce(x, async_op=True).get_future().then(lambda future: 2 * future.value()[0])
    assert doubled.wait().tolist() == [2.0 * size * size] * 5


def older_names() -> None:
    """The methods as torch 2.11 and 2.12 call them."""
    rank, size = place()
    own = dist.group.WORLD
    assert own is not None
    x, out = torch.arange(4.0) + rank, torch.empty(size, 4)
    wanted = torch.stack([torch.arange(4.0) + source for source in range(size)])
    own._allgather_base(out, x, torch._C._distributed_c10d.AllgatherOptions()).wait()
    assert same_bits(out, wanted)
    own.allgather_into_tensor_coalesced([out.zero_()], [x], torch._C._distributed_c10d.AllgatherOptions()).wait()
    assert same_bits(out, wanted)
    options = dist.ReduceScatterOptions()
    own._reduce_scatter_base(x, wanted.clone(), options).wait()
    assert same_bits(x, wanted[rank] * size)
    own.reduce_scatter_tensor_coalesced([x.zero_()], [wanted.clone()], options).wait()
    assert same_bits(x, wanted[rank] * size)
    own.alltoall_base(out.zero_(), wanted.clone(), [], [], dist.AllToAllOptions()).wait()
    assert same_bits(out, wanted[rank].expand(size, 4).contiguous())


# ---- groups


def subgroups() -> None:
    """Groups of some ranks, and roots and peers by their rank in the world."""
    rank, size = place()
    for members in ([0], list(range(size)), [size - 1, 0][: min(size, 2)], list(range(size))[size // 2 :]):
        part = dist.new_group(members)
        if rank not in members:
            assert part == dist.GroupMember.NON_GROUP_MEMBER
            continue
        for call in range(3):
            x, ordered = torch.full((3,), float(rank)), sorted(members)
            dist.all_reduce(x, group=part)
            assert x.tolist() == [float(sum(members))] * 3
            root = ordered[call % len(ordered)]
            dist.broadcast(x.fill_(rank), root, group=part)
            assert x.tolist() == [float(root)] * 3
            if len(ordered) > 1 and rank in ordered[:2]:
                peer = ordered[1 - ordered.index(rank)]
                work = dist.isend(torch.full((2,), float(rank)), peer, group=part)
                assert dist.recv(x[:2], peer, group=part) == peer and x[:2].tolist() == [float(peer)] * 2
                work.wait()
        assert dist.get_backend(part) == "epcomm"
        dist.destroy_process_group(part)


def devices() -> None:
    """What torch asks a group for before it binds it to a device, or looks for one for its own tensors."""
    own = dist.group.WORLD
    assert own is not None and dist.distributed_c10d._device_capability() == ["cpu", "cuda"]
    assert dist.distributed_c10d._get_pg_default_device() == torch.device("cpu")
    assert not own._get_backend(torch.device("cuda")).supports_splitting


def beside_gloo() -> None:
    rank, size = place()
    gloo = dist.new_group(backend="gloo")
    for call in range(3):
        x, y = torch.full((5,), float(rank + call)), torch.full((5,), float(rank + call))
        dist.all_reduce(x)
        dist.all_reduce(y, group=gloo)
        assert same_bits(x, y)


# ---- functional collectives, meshes, DTensor


def functional_collectives() -> None:
    rank, size = place()
    world = dist.group.WORLD
    for call in range(3):
        x = torch.arange(2.0 * size) + 100 * rank + call
        everyone = torch.stack([torch.arange(2.0 * size) + 100 * source + call for source in range(size)])
        assert same_bits(functional.all_reduce(x, "sum", world).wait(), everyone.sum(0))
        assert same_bits(functional.all_gather_single(x, 0, world).wait(), everyone.flatten())
        scattered = functional.reduce_scatter_single(x, "sum", 0, world).wait()
        assert same_bits(scattered, everyone.sum(0).view(size, 2)[rank])
        assert same_bits(functional.broadcast(x, size - 1, world).wait(), everyone[-1])
        sent = functional.all_to_all_single(x, [2] * size, [2] * size, world).wait()
        assert same_bits(sent, everyone.view(size, size, 2)[:, rank].flatten())
        leaf = x.clone().requires_grad_()
        (functional.all_to_all_single_autograd(leaf, None, None, world) * (rank + 1)).sum().backward()
        assert leaf.grad is not None and same_bits(leaf.grad, torch.arange(1.0, size + 1).repeat_interleave(2))
        for got in functional.all_reduce_coalesced([x, 2 * x], "sum", world):
            assert got.tolist() in (everyone.sum(0).tolist(), (2 * everyone.sum(0)).tolist())


def distributed_tensors() -> None:
    rank, size = place()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size * size).view(2 * size, 2 * size)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert same_bits(rows.to_local(), whole.chunk(size)[rank]) and same_bits(rows.full_tensor(), whole)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert same_bits(columns.to_local().contiguous(), whole.chunk(size, 1)[rank].contiguous())
    partial = DTensor.from_local(whole + rank, mesh, [Partial()])
    total = size * whole + sum(range(size))
    assert same_bits(partial.redistribute(mesh, [Replicate()]).to_local(), total)
    assert same_bits(partial.redistribute(mesh, [Shard(0)]).to_local(), total.chunk(size)[rank])
    assert same_bits((rows @ columns.redistribute(mesh, [Replicate()])).full_tensor(), whole @ whole)


# ---- training


def _model(width: int = 24) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width))


def _batch(rank: int, step: int, width: int = 24) -> torch.Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def _losses(model: nn.Module, steps: int = 4) -> list[float]:
    """Of a few steps of training."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(_batch(dist.get_rank(), step)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def data_parallel() -> None:
    """DDP, with and without a hook: the losses are gloo's; with 2 ranks to the bit, for additions have one order."""
    _, size = place()
    gloo = dist.new_group(backend="gloo")
    for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        losses = []
        for parent in (gloo, dist.group.WORLD):
            model = DistributedDataParallel(_model(), process_group=parent, bucket_cap_mb=0.001)
            if hook is not None:
                model.register_comm_hook(parent, hook)
            losses.append(_losses(model))
        tolerance = 0.0 if size <= 2 else 1e-2 if hook is default_hooks.fp16_compress_hook else 1e-6
        torch.testing.assert_close(losses[0], losses[1], rtol=tolerance, atol=tolerance)
        assert losses[0][-1] != losses[0][0]


def data_parallel_without_sync() -> None:
    """Gradients that accumulate over two backward passes, and a parameter that is not used."""
    rank, size = place()
    model = _model()
    model.unused = nn.Parameter(torch.ones(3))  # type: ignore[assignment]
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    with parallel.no_sync():
        parallel(_batch(rank, 0)).sum().backward()
    parallel(_batch(rank, 1)).sum().backward()
    alone = _model()
    for source in range(size):
        for step in (0, 1):
            alone(_batch(source, step)).sum().backward()
    for name, wanted in alone.named_parameters():
        got = model.get_parameter(name)
        assert got.grad is not None and wanted.grad is not None
        torch.testing.assert_close(got.grad, wanted.grad / size, rtol=1e-5, atol=1e-5)


def fully_sharded() -> None:
    """FSDP2's losses and parameters are those of one process that has all data."""
    rank, size = place()
    model = _model()
    for layer in (model[0], model[3]):
        fully_shard(layer)
    fully_shard(model)
    losses = _losses(model)
    alone = _model()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step, found in enumerate(losses):
        optimizer.zero_grad()
        each = [(alone(_batch(source, step)) ** 2).mean() for source in range(size)]
        torch.stack(each).mean().backward()
        optimizer.step()
        assert abs(found - each[rank].item()) < 1e-5
    for got, wanted in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(got.full_tensor(), wanted, rtol=1e-4, atol=1e-5)


def checkpoints() -> None:
    """The weights that one rank has, sharded, saved by a thread, and loaded into another model's shards."""
    rank, _ = place()
    wanted = {name: weight + 1 for name, weight in _model().state_dict().items()}
    shards = _model()
    fully_shard(shards)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(shards, dict(wanted) if rank == 0 else {}, options=options)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    checkpoint.async_save(shards.state_dict(), checkpoint_id=folders[0]).result()
    others = _model()
    fully_shard(others)
    checkpoint.load(found := others.state_dict(), checkpoint_id=folders[0])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folders[0])
    for name, weight in found.items():
        assert same_bits(weight.full_tensor(), wanted[name]), name


def compiled() -> None:
    """`torch.compile` without graph breaks, of functional collectives and of those of `dist`, which it replaces."""
    rank, size = place()

    def by_functional(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_single(functional.all_reduce(x, "sum", dist.group.WORLD) * 2, 0, dist.group.WORLD)

    def by_dist(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        dist.all_reduce(x)
        return x * 2

    total = torch.arange(3.0) * size + sum(range(size))
    torch._dynamo.reset()
    for function, wanted in ((by_functional, (2 * total).repeat(size)), (by_dist, 2 * total)):
        fast = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert same_bits(fast(torch.arange(3.0) + rank), wanted)


CASES = {
    case.__name__: case
    for case in (
        reductions,
        scattered_reductions,
        gathers_and_scatters,
        all_to_all,
        objects,
        barriers,
        messages,
        messages_of_any_rank,
        coalesced,
        order_of_calls,
        works,
        older_names,
        subgroups,
        devices,
        beside_gloo,
        functional_collectives,
        distributed_tensors,
        data_parallel,
        data_parallel_without_sync,
        fully_sharded,
        checkpoints,
        compiled,
    )
}


def run_case(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about names that it is going to change
        with group():
            CASES[name]()
