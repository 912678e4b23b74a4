"""Plans on ranks: every algorithm's results by definition, and what is refused or goes wrong."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_cases import MOVED, REDUCTIONS
from execution_checks import check_plan, check_plans, check_random_plans
from failure_cases import raised_by, works

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import Collective, Location, Op, Plan, Program, Step
from epcomm.collectives.plan.lower import prove
from epcomm.collectives.plan.msccl import from_msccl
from epcomm.testing.adversary import delay_operations
from epcomm.testing.ranks import run_ranks
from examples import plans

SMALL = [(0, torch.int64), (1, torch.float32), (37, torch.int64), (1501, torch.float16)]
MSCCL = sorted((Path(__file__).parent / "data" / "msccl").glob("*.xml"))
MANY_TILES = 700_001  # float32: chunks of several slots; results of 8 ranks are larger than what stays in caches


def on_ranks(world: int, body: Callable[..., Any], *args: Any, ranks: str = "processes", **init: Any) -> list[Any]:
    """What ``body(communicator, *args)`` returns on each rank."""

    def run() -> Any:
        with epcomm.init(timeout=60.0, **init) as comm:
            delay_operations(comm, seed=world, longest=0.0005)
            return body(comm, *args)

    return run_ranks(run, world, ranks=ranks, timeout=200.0)


@pytest.mark.parametrize("world", [2, 3, 4, 5, *(pytest.param(world, marks=pytest.mark.slow) for world in (6, 7)), 8])
def test_every_algorithm(world: int) -> None:
    on_ranks(world, check_plans, world // 2, 1 + world % 2, SMALL, ranks="threads", num_threads=1)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_programs_that_run_side_by_side(num_threads: int) -> None:
    """Fewer of them than a plan's channels, as many, and more."""

    def body(comm: epcomm.Communicator) -> None:
        for channels in (1, num_threads, 4):
            check_plans(comm, 1, channels, [(1501, torch.int64)])
        for op in ("avg", "max"):
            check_plan(comm, "bidirectional_ring", "allreduce", 1501, torch.float32, op)

    on_ranks(2 if num_threads == 3 else 3, body, num_threads=num_threads)


def check_dtypes(comm: epcomm.Communicator) -> None:
    for dtype, op in REDUCTIONS:
        for name, kind in (("ring", "allreduce"), ("double_binary_tree", "reduce"), ("pat", "reduce_scatter")):
            if dtype is not torch.bfloat16 or op == "max":  # its sums are rounded: see below
                check_plan(comm, name, kind, 67, dtype, op, root=comm.size - 1)
    for dtype in MOVED:
        for name, kind in (("bruck", "allgather"), ("double_binary_tree", "broadcast"), ("bruck", "alltoall")):
            check_plan(comm, name, kind, 67, dtype)


def test_every_dtype_and_op() -> None:
    on_ranks(3, check_dtypes)


def check_many_tiles(comm: epcomm.Communicator) -> None:
    for kind in ("allreduce", "allgather", "reduce_scatter"):
        check_plan(comm, "ring", kind, MANY_TILES, torch.float32)
    check_plan(comm, "ring", "allreduce", 3 * MANY_TILES, torch.float32, "avg")
    check_plan(comm, "double_binary_tree", "broadcast", 2 * MANY_TILES, torch.float32, root=1)
    check_plan(comm, "bruck", "alltoall", MANY_TILES // 3, torch.float32)
    shallow = ALGORITHMS["two_shot"].plan("allreduce", comm.size, pieces=3, fifo_depth=2)
    check_plan(comm, shallow, "allreduce", MANY_TILES, torch.float32)


@pytest.mark.parametrize("world, num_threads", [(2, 1), (3, 2)])
def test_chunks_larger_than_slots(world: int, num_threads: int) -> None:
    on_ranks(world, check_many_tiles, num_threads=num_threads)


@pytest.mark.parametrize("path", MSCCL, ids=lambda path: path.stem)
def test_plans_that_others_wrote(path: Path) -> None:
    plan = from_msccl(path.read_text(), path.name)
    collective = plan.collective

    def body(comm: epcomm.Communicator) -> None:
        for num_items in (0, 16 * collective.num_chunks, 16 * 500 * collective.num_chunks):
            check_plan(
                comm, plan, collective.kind, num_items, torch.int32,
                in_place=plan.in_place, out_of_place=plan.out_of_place,
            )  # fmt: skip

    on_ranks(plan.num_ranks, body, ranks="threads", num_threads=1)


@pytest.mark.parametrize("world, num_threads, seed", [
    (2, 2, 0), (3, 1, 10), (4, 3, 20),
    *(pytest.param(world, 1 + world % 3, 100 * world, marks=pytest.mark.slow) for world in range(1, 7)),
])  # fmt: skip
def test_programs_made_at_random(world: int, num_threads: int, seed: int) -> None:
    """Of the language, by any trees, on any channels."""
    num_seeds = 3 if seed < 100 else 30
    on_ranks(world, check_random_plans, range(seed, seed + num_seeds), ranks="threads", num_threads=num_threads)


def test_examples_of_the_language() -> None:
    """What `examples/plans.py` runs on arrays, on ranks."""

    def body(comm: epcomm.Communicator) -> None:
        for plan in (plans.ring_allreduce(4), plans.hierarchical_allreduce(2, 2), plans.all_pairs_alltoall(4)):
            for num_items, dtype in SMALL:
                check_plan(comm, plan, plan.collective.kind, num_items, dtype, in_place=plan.in_place)

    on_ranks(4, body, ranks="threads", num_threads=2)


def sums(comm: epcomm.Communicator) -> list[bytes]:
    """Sums of random floats, checked against a bound for as many roundings as the proof says; the results' bytes."""
    found = []
    names = ("ring", "double_binary_tree", "recursive_doubling", "one_shot")
    for name, wide_sums in itertools.product(names, (False, True)):
        plan = ALGORITHMS[name].plan("allreduce", comm.size, wide_sums=wide_sums)
        for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24))[: 1 if wide_sums else 2]:
            inputs = [torch.randn(3001, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(comm.size)]
            got = comm.allreduce(inputs[comm.rank], algorithm=plan)
            exact = torch.stack(inputs).double()
            bound = (1.01 * unit * prove(plan).proof.roundings) * exact.abs().sum(0)
            assert ((got.double() - exact.sum(0)).abs() <= bound).all(), (name, wide_sums, dtype)
            found.append(bytes(got.view(torch.uint8).numpy()))
    return found


def test_rounding_is_as_proven_and_the_same_everywhere() -> None:
    runs = [on_ranks(5, sums, ranks="threads", num_threads=1) for _ in range(2)]
    assert all(result == runs[0][0] for run in runs for result in run)


def check_beside_others(comm: epcomm.Communicator) -> None:
    """Plans' slots are other collectives' in turn; bound and asynchronous calls run plans as well."""
    x = torch.arange(400_001, dtype=torch.float32) % 100 + comm.rank
    wanted = (torch.arange(400_001) % 100 * comm.size + sum(range(comm.size))).float()
    bound = comm.bind_allreduce(x, out=(out := torch.empty_like(x)), algorithm="halving_doubling")
    for _ in range(20):
        works(comm)
        assert torch.equal(comm.allreduce(x, algorithm="ring"), wanted)
        assert torch.equal(comm.allreduce(x), wanted)
        assert torch.equal(bound(), wanted) and bound() is out
        assert torch.equal(comm.allgather(x[:30_000], algorithm="bruck")[:30_000], comm.allgather(x[:30_000])[:30_000])
        assert torch.equal(comm.allreduce(x, algorithm="two_shot"), wanted)
        work = comm.allreduce(x, algorithm="pat", async_op=True)
        assert torch.equal(comm.allreduce(x, algorithm="double_binary_tree"), wanted)
        work.wait()


def test_beside_other_collectives_and_after_a_reset() -> None:
    def body(comm: epcomm.Communicator) -> None:
        check_beside_others(comm)
        comm.barrier()
        if comm.rank == 1:
            comm.abort("enough")
        raised_by(comm.allreduce, torch.ones(5), algorithm="ring")
        comm.reset()
        check_beside_others(comm)

    on_ranks(3, body)


# ---- what is refused


def _ring(num_ranks: int = 2, **changes: Any) -> Plan:
    return dataclasses.replace(ALGORITHMS["ring"].plan("allreduce", num_ranks), **changes)


def _changed() -> Plan:
    """A plan that was right before its last step was cut off."""
    plan = _ring()
    prove(plan)
    cut = [tuple(dataclasses.replace(p, steps=p.steps[:-1]) for p in programs) for programs in plan.programs]
    return dataclasses.replace(plan, programs=tuple(cut))


def _misplaced() -> Plan:
    """A broadcast of 2 chunks, each of which rests where the other belongs."""
    def both(op: Op, **peer: int) -> tuple[Step, ...]:
        return tuple(Step(op, Location("input", chunk), **peer) for chunk in (0, 1))

    received = (
        Step(Op.RECV, None, Location("output", 1), receive_from=0),
        Step(Op.COPY, Location("output", 1), Location("scratch", 0)),
        Step(Op.RECV, None, Location("output", 1), receive_from=0),
        Step(Op.COPY, Location("scratch", 0), Location("output", 0)),
    )
    kept = tuple(Step(Op.COPY, Location("input", chunk), Location("output", chunk)) for chunk in (0, 1))
    programs = ((Program(0, both(Op.SEND, send_to=1) + kept),), (Program(0, received),))
    return Plan("misplaced", Collective("broadcast", 2, 2), programs, scratch_chunks=1, in_place=False)


X = torch.arange(64.0)
REFUSED: dict[str, tuple[Callable[[epcomm.Communicator], Any], str]] = {
    "wrong": (lambda c: c.allreduce(X, algorithm=_changed()), "argument `algorithm`: plan ring allreduce: rank 0"),
    "wrong, bound": (lambda c: c.bind_allreduce(X, algorithm=_changed()), "its message is never received"),
    "lists": (
        lambda c: c.allreduce(X, algorithm=_ring(programs=[list(of_rank) for of_rank in _ring().programs])),
        "wanted tuples throughout",
    ),
    "ranks": (lambda c: c.allreduce(X, algorithm=_ring(3)), "wanted a plan of allreduce of 2 ranks"),
    "collective": (lambda c: c.alltoall(X, algorithm=_ring()), "wanted a plan of alltoall of 2 ranks, got one of allr"),
    "root": (
        lambda c: c.broadcast(X, 1, algorithm=ALGORITHMS["ring"].plan("broadcast", 2)),
        "wanted a plan of broadcast of 2 ranks, root 1",
    ),
    "name": (lambda c: c.allreduce(X, algorithm="rings"), "a plan or one of auto, one_shot, .*, ring, .*, got 'rings'"),
    "name for another collective": (lambda c: c.alltoall(X, algorithm="ring"), "ring does allreduce"),
    "no plan": (lambda c: c.allgather(X, algorithm=7), "wanted a plan or one of auto, ring"),
    "op": (lambda c: c.reduce_scatter(X, "band", algorithm="ring"), "argument `op`: wanted one of"),
    "in place": (lambda c: c.alltoall(X, out=X, algorithm="direct"), "works out of place only"),
    "out of place": (lambda c: c.allreduce(X, algorithm=_ring(out_of_place=False)), "works in place only"),
    "overlap": (lambda c: c.allreduce(X[:40], out=X[20:60], algorithm="ring"), "shares memory with `x`, but not as"),
    "listed result": (lambda c: c.allgather(X, out=[X + 0, X + 1], algorithm="ring"), "`out`: wanted one tensor where"),
    "listed parts": (lambda c: c.reduce_scatter([X, X], algorithm="ring"), "argument `x`: wanted one tensor where"),
    "listed": (lambda c: c.alltoall([X, X], out=[X + 0, X + 1], algorithm="direct"), "`x`: wanted one tensor where"),
    "misplaced": (lambda c: c.broadcast(X[:17], 0, algorithm=_misplaced()), "keeps a chunk where a smaller one"),
}


def test_what_is_refused() -> None:
    def body(comm: epcomm.Communicator) -> list[str]:
        found = []
        for call, _ in REFUSED.values():
            raised = raised_by(call, comm)
            found.append(f"{type(raised.error).__name__}: {raised.text}")
            comm.reset()
        check_plan(comm, _misplaced(), "broadcast", 32, torch.float32, in_place=False)
        works(comm)
        return found

    for found in run_ranks(lambda: body(epcomm.init(timeout=20.0)), 2):
        for (name, (_, text)), got in zip(REFUSED.items(), found, strict=True):
            # both ranks refuse it, or one has told the other why
            assert got.startswith(("ConfigError", "PeerFailedError")) and re.search(text, got), (name, got)
