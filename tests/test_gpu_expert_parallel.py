"""The GPU target's kernels of expert parallelism, interpreted, against the definition; alone and beside Numba ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_ep_combine
import test_ep_dispatch
import torch
from ep_cases import KIND_IDS, KINDS, KINDS_BY_RANK, Case, Step, on_ranks, round_trip, run_cases, run_option, run_steps
from test_ep_failures import run_over_capacity
from test_ep_split import split_round_trip

import epcomm
from epcomm.errors import ConfigError, MismatchError, PeerFailedError

WORLDS = [(1, "triton"), (2, "triton"), (3, "mixed"), (4, "mixed")]
WORLD_IDS = [f"{world}-{kernels}" for world, kernels in WORLDS]


def cases(world: int) -> list[Case]:
    """Few of each kind: the interpreter needs milliseconds for what a kernel does in microseconds."""
    by_turns = tuple(expert % world for expert in range(7))
    chosen = [
        Case(gate="holes_and_duplicates", tokens="uneven", alignment=4),
        Case(hidden=16, tokens="none_on_even_ranks", gate="zipf", index_dtype=torch.int32),
        Case(hidden=96, dtype=torch.float32, gate="one_rank", alignment=3),
        Case(hidden=1, dtype=torch.float64, gate="none", max_tokens=1),
        Case(hidden=33, dtype=torch.float16, num_experts=7, topk=5, placement=by_turns, alignment=8),
    ]
    return chosen if world < 4 else chosen[:2]


@pytest.mark.parametrize("world, kernels", WORLDS, ids=WORLD_IDS)
@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_traffic(mode: str, layout: str, world: int, kernels: str) -> None:
    chosen = [replace(case, mode=mode, layout=layout) for case in cases(world)]
    on_ranks(world, run_cases, chosen, kernels=kernels)


BY_RANK = [
    Case(gate="holes_and_duplicates", tokens="uneven", alignment=4),
    Case(hidden=96, dtype=torch.float32, gate="one_rank", alignment=3, index_dtype=torch.int32),
]


@pytest.mark.parametrize("world, kernels", [WORLDS[0], WORLDS[2]], ids=[WORLD_IDS[0], WORLD_IDS[2]])
@pytest.mark.parametrize("mode, layout", KINDS_BY_RANK, ids=[layout for _, layout in KINDS_BY_RANK])
def test_traffic_by_rank(mode: str, layout: str, world: int, kernels: str) -> None:
    chosen = [replace(case, mode=mode, layout=layout, wire="rank") for case in BY_RANK]
    on_ranks(world, run_cases, chosen, kernels=kernels)


def run_split(comm: epcomm.Communicator, case: Case) -> None:
    ep = case.handle(comm)
    for number in range(3):
        split_round_trip(ep, Step(case, comm.size, number), comm.barrier)


@pytest.mark.parametrize("wire", ["expert", "rank"])
@pytest.mark.parametrize("kernels", ["triton", "mixed"])
def test_split(kernels: str, wire: str) -> None:
    case = Case(wire=wire, gate="holes_and_duplicates", tokens="uneven", alignment=4)
    on_ranks(2, run_split, case, kernels=kernels, longest=0)


OPTIONS = [
    test_ep_dispatch.dispatch_into_strided_out,
    test_ep_dispatch.dispatch_often_along_one_routing,
    test_ep_combine.combine_with_bias,
    test_ep_combine.combine_without_sum,
    test_ep_combine.combine_in_place,
    test_ep_combine.combine_along_a_routing,
]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.__name__)
def test_option(option: Any) -> None:
    on_ranks(2, run_option, option, kernels="mixed", longest=0)


@pytest.mark.slow
@pytest.mark.parametrize("world, kernels", [(1, "triton"), (3, "mixed")], ids=["1-triton", "3-mixed"])
@pytest.mark.parametrize(
    "option", test_ep_dispatch.OPTIONS + test_ep_combine.OPTIONS, ids=lambda option: option.__name__
)
def test_every_option(option: Any, world: int, kernels: str) -> None:
    on_ranks(world, run_option, option, kernels=kernels, longest=0, timeout=110)


def run_large_rows(comm: epcomm.Communicator) -> None:
    """Rows of several tiles, and more tokens than are routed at once."""
    run_steps(comm, Case(hidden=9000, dtype=torch.float32, max_tokens=2, topk=2), num_steps=2)
    run_steps(comm, Case(hidden=2, num_experts=3, topk=2, max_tokens=300, gate="zipf"), num_steps=1)


def test_large_rows_and_many_tokens() -> None:
    on_ranks(2, run_large_rows, kernels="mixed", longest=0)


@pytest.mark.parametrize("mode, layout", [KINDS[0], KINDS[5]], ids=[KIND_IDS[0], KIND_IDS[5]])
def test_more_rows_than_there_is_room_for(mode: str, layout: str) -> None:
    case = Case(mode, layout, gate="one_rank", tokens="uneven", alignment=4)
    on_ranks(2, run_over_capacity, case, kernels="mixed", longest=0)


def run_failures(comm: epcomm.Communicator, case: Case) -> list[str]:
    """A bad index on one rank, different calls, and a rank that stays away; a reset after each, then traffic."""
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    heard = []
    indices = step.exchange.indices[comm.rank].clone()
    if comm.rank == 1:
        indices[2, 1] = case.num_experts
    with pytest.raises(ConfigError if comm.rank == 1 else PeerFailedError, match=r"got 6 at \[2, 1\]"):
        ep.dispatch(step.x()[comm.rank], ep.route(indices))
    comm.reset()
    with pytest.raises(MismatchError, match=r"barrier\(\)|route"):
        ep.dispatch(step.x()[0], ep.route(step.exchange.indices[0])) if comm.rank == 0 else comm.barrier()
    comm.reset()
    if comm.rank == 0:
        with pytest.raises(epcomm.errors.EpcommError) as raised:
            comm.barrier()
        heard.append(str(raised.value))
    else:
        comm.abort("rank 1 has had enough")
    comm.reset()
    for number in range(3):
        round_trip(ep, Step(case, comm.size, number))
    return heard


@pytest.mark.parametrize("mode, layout", [KINDS[0], KINDS[5]], ids=[KIND_IDS[0], KIND_IDS[5]])
@pytest.mark.parametrize("kernels", ["triton", "mixed"])
def test_failures(mode: str, layout: str, kernels: str) -> None:
    heard = on_ranks(2, run_failures, Case(mode, layout, tokens="full"), kernels=kernels, longest=0)
    assert "rank 1 has had enough" in heard[0][0]
