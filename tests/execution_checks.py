"""What executors of plans are checked against: each collective by its definition, on one communicator."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from collective_cases import FORMS, addend, payload, reduced, same_bits
from plan_programs import random_plan

import epcomm
from epcomm.collectives import planned
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan import COLLECTIVES, Plan
from epcomm.collectives.plan.conditions import REDUCTIONS
from epcomm.collectives.plan.lower import lower
from epcomm.errors import ConfigError
from epcomm.kernels.protocol import plans as table
from epcomm.kernels.protocol.lines import PROTOCOLS
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import run_ranks

CALLS = 3  # of each plan, each on new data
#: what is not for any number of ranks
POWERS_OF_TWO = {("halving_doubling", "reduce_scatter"), ("halving_doubling", "allgather")} | {
    ("swing", kind) for kind in ("allreduce", "allgather", "reduce_scatter")
}


@functools.cache
def plans_of(num_ranks: int, root: int, channels: int, protocol: str) -> tuple[Plan, ...]:
    """A plan by every algorithm for every collective that it does among so many ranks."""
    found = []
    for algorithm in ALGORITHMS.values():
        for kind in algorithm.forms:
            try:
                found.append(algorithm.plan(kind, num_ranks, root=root, channels=channels, protocol=protocol))
            except ConfigError as error:
                assert "power of two" in str(error)
                assert (algorithm.name, kind) in POWERS_OF_TWO and num_ranks & (num_ranks - 1)
    return tuple(found)


def _in_form(case: int, x: torch.Tensor) -> torch.Tensor:
    return list(FORMS.values())[case % len(FORMS)](x)


def _wanted(kind: str, inputs: list[torch.Tensor], rank: int, root: int, op: str) -> torch.Tensor | None:
    if kind == "broadcast":
        return inputs[root]
    if kind == "allgather":
        return torch.cat(inputs)
    if kind == "alltoall":
        return torch.cat([x.chunk(len(inputs))[rank] if len(x) else x for x in inputs])
    total = reduced(inputs, op)
    if kind == "reduce":
        return total if rank == root else None
    return total.chunk(len(inputs))[rank] if kind == "reduce_scatter" and len(total) else total


def _run(comm: epcomm.Communicator, plan: Plan | str, kind: str, x: torch.Tensor, out: Any, op: str, root: int) -> Any:
    arguments: dict[str, Any] = {"algorithm": plan, "out": out}
    if kind in REDUCTIONS:
        arguments["op"] = op
    if kind in ("broadcast", "reduce"):
        arguments["src" if kind == "broadcast" else "dst"] = root
    return getattr(comm, kind)(x, **arguments)


def check_plan(comm: epcomm.Communicator, plan: Plan | str, kind: str, num_items: int, dtype: torch.dtype,
               op: str = "sum", root: int = 0, in_place: bool = True, out_of_place: bool = True,
               addend: Callable[..., torch.Tensor] = addend) -> None:  # fmt: skip
    """Runs a plan CALLS times, out of place and in place where it may, on items that tell ranks and calls apart.

    `num_items` are a rank's of a block; `addend` makes what is reduced.
    """
    rank, size = comm.rank, comm.size
    shape = (num_items * (size if kind in ("reduce_scatter", "alltoall") else 1),)
    for call in range(CALLS):
        if kind in REDUCTIONS:
            inputs = [addend(other, shape, dtype, op, call, size) for other in range(size)]
        else:
            inputs = [payload(other, shape, dtype, call) for other in range(size)]
        wanted, own = _wanted(kind, inputs, rank, root, op), inputs[rank]
        name = plan if isinstance(plan, str) else f"{plan.name}, {plan.protocol}"
        label = f"rank {rank} of {size}: {kind} by {name}, {dtype} {shape} {op}"
        if out_of_place:
            x = _in_form(call, own)
            got = _run(comm, plan, kind, x, None, op, root)
            assert same_bits(got, wanted), f"{label}, call {call}: got {got}, wanted {wanted}"
            assert same_bits(x, own), f"{label}, call {call}: x changed"
        if in_place:
            x, out = _placed(kind, own, rank, size)
            result = out if kind != "reduce" or rank == root else None
            _run(comm, plan, kind, x, result, op, root)
            got = own if kind == "reduce" and result is None else out
            kept = own if kind == "reduce" and result is None else wanted
            assert same_bits(got, kept), f"{label}, call {call}, in place: got {got}, wanted {kept}"


def _placed(kind: str, own: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output as they share memory in place."""
    if kind == "allgather":
        out = torch.empty(size * len(own), dtype=own.dtype)
        return out[rank * len(own) : (rank + 1) * len(own)].copy_(own), out
    x = FORMS["unaligned"](own)
    num_items = len(own) // size
    return x, x[rank * num_items : (rank + 1) * num_items] if kind == "reduce_scatter" else x


def check_plans(comm: epcomm.Communicator, root: int, channels: int, cases: list[tuple[int, torch.dtype]],
                protocol: str = "simple") -> None:  # fmt: skip
    """Every algorithm's plans on blocks of every (number of items, dtype)."""
    for plan in plans_of(comm.size, root, channels, protocol):
        for num_items, dtype in cases:
            kind, in_place = plan.collective.kind, plan.in_place
            check_plan(comm, plan, kind, num_items, dtype, "sum", root, in_place, plan.out_of_place)


def check_random_plans(comm: epcomm.Communicator, seeds: Iterable[int],
                       cases: Sequence[tuple[int, torch.dtype]] = ((37, torch.int64), (1501, torch.float16)),
                       ) -> None:  # fmt: skip
    """Programs of the language made at random, for every collective, each by the protocol of its turn."""
    for seed, kind in itertools.product(seeds, COLLECTIVES):
        plan = random_plan(kind, comm.size, seed, PROTOCOLS[seed % len(PROTOCOLS)])
        for num_items, dtype in cases:
            check_plan(comm, plan, kind, num_items, dtype, root=plan.collective.root, in_place=plan.in_place)


def take_part_in_silence(comm: epcomm.Communicator, plan: Plan) -> None:
    """Enters the operation and does nothing of the plan."""
    def lower_to_nothing(*args: Any) -> np.ndarray:
        made = lower(*args)
        made[table.NUM_TILES] = 0
        return made

    with mock.patch.object(planned, "lower", lower_to_nothing):
        comm.allreduce(torch.ones(5000), algorithm=plan)


def on_kernels_of(kind: str, world: int, body: Callable[..., Any], *args: Any) -> None:
    """Runs `body(comm, *args)` on ranks with such kernels."""

    def run() -> None:
        with kernels_of(kind), epcomm.init(timeout=60.0) as comm:
            body(comm, *args)

    run_ranks(run, world, timeout=200.0)
