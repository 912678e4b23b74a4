"""Dispatch and combine against their definition: layouts, modes, gates, formats and kinds of ranks, on 1 to 7 ranks.

One call of `run_ranks` goes through many handles; each is used several times with new data, with random pauses around
every operation. Every field of every result is compared bit by bit.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ep_cases import (
    KIND_IDS,
    KINDS,
    Case,
    Step,
    check_combined,
    in_all_kinds,
    on_ranks,
    round_trip,
    run_cases,
    run_steps,
)

import epcomm
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.testing.adversary import delay_operations
from epcomm.testing.oracle import combined
from epcomm.testing.ranks import run_ranks
from epcomm.testing.routing import GATES, TOKENS

WORLDS = (1, 2, 3, 5, 7)


def traffic_cases() -> list[Case]:
    """Every gate, every distribution of tokens."""
    tokens = itertools.cycle(TOKENS)
    cases = [Case(gate=gate, tokens="full" if gate == "zipf" else next(tokens), alignment=4) for gate in GATES]
    return cases + [Case(gate="uniform", tokens=name, index_dtype=torch.int32) for name in TOKENS]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_traffic(mode: str, layout: str, world: int) -> None:
    cases = [replace(case, mode=mode, layout=layout) for case in traffic_cases()]
    on_ranks(world, run_cases, cases if world < 5 else cases[world % 2 :: 2], longest=0.0005)


def shape_cases() -> list[Case]:
    cases = [Case(dtype=dtype, gate="holes_and_duplicates") for dtype in (torch.float16, torch.float32, torch.float64)]
    cases += [Case(hidden=hidden, alignment=3) for hidden in (1, 2, 31, 33, 200)]
    cases += [Case(hidden=1, dtype=torch.float64), Case(hidden=65, dtype=torch.float16)]
    cases += [Case(hidden=7168, max_tokens=3)]
    cases += [Case(num_experts=5, topk=topk, gate="uniform") for topk in range(1, 6)]
    cases += [Case(num_experts=1, topk=1), Case(num_experts=2, topk=2), Case(num_experts=33, topk=8, gate="zipf")]
    cases += [Case(max_tokens=0), Case(max_tokens=1), Case(max_tokens=70, num_experts=16, topk=4, tokens="uneven")]
    cases += [Case(blocks=1), Case(blocks=2), Case(alignment=16, gate="one_expert"), Case(alignment=8, gate="none")]
    return cases


def placement_cases(world: int) -> list[Case]:
    """Experts in turn, all on one rank, and spread at random."""
    generator = torch.Generator().manual_seed(world)
    random = tuple(torch.randint(world, (7,), generator=generator).tolist())
    placements = [tuple(expert % world for expert in range(7)), (world - 1,) * 7, random]
    return [Case(num_experts=7, placement=placement, gate="holes", alignment=2) for placement in placements]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_shapes_formats_and_placements(mode: str, layout: str, world: int) -> None:
    cases = shape_cases() + placement_cases(world)
    on_ranks(world, run_cases, [replace(case, mode=mode, layout=layout) for case in cases], longest=0)


@pytest.mark.parametrize("world", [5, 7])
def test_few_experts_on_many_ranks(world: int) -> None:
    cases = [Case(num_experts=3, topk=2, gate="duplicates"), *placement_cases(world)]
    on_ranks(world, run_cases, list(in_all_kinds(cases)), longest=0)


# ---- kinds of ranks


MIXED = [
    Case(gate="holes_and_duplicates", alignment=4),
    Case(gate="zipf", tokens="uneven", max_tokens=40, num_experts=16, topk=4, dtype=torch.float32),
    Case(tokens="none_on_odd_ranks"),
]


@pytest.mark.parametrize("ranks, world", [("processes", 1), ("processes", 2), ("processes", 3), ("threads", 2)])
def test_two_programs_per_rank(ranks: str, world: int) -> None:
    on_ranks(world, run_cases, list(in_all_kinds(MIXED)), ranks=ranks, num_threads=2, longest=0)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_thread_ranks(world: int) -> None:
    on_ranks(world, run_cases, list(in_all_kinds(MIXED)), ranks="threads")


def run_at_once(comm: epcomm.Communicator, cases: list[Case]) -> None:
    """Live handles used in turn: each must keep its own epochs, blocks and counts."""
    handles = [case.handle(comm) for case in cases]
    for number in range(6):
        for case, ep in zip(cases, handles):
            round_trip(ep, Step(case, comm.size, number))
    for ep in reversed(handles):
        ep.close()


@pytest.mark.parametrize("world, num_threads", [(2, 1), (3, 1), (2, 2)])
def test_live_handles_in_turn(world: int, num_threads: int) -> None:
    cases = list(in_all_kinds([Case(gate="holes", tokens="uneven")]))
    on_ranks(world, run_at_once, cases, num_threads=num_threads, disturb=world)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_many_steps_of_disturbed_ranks(mode: str, layout: str) -> None:
    """Pauses around operations, and processes stopped anywhere inside of them."""
    case = Case(mode, layout, gate="holes_and_duplicates", tokens="uneven", hidden=300, alignment=4)
    on_ranks(3, run_steps, case, 60, disturb=1, longest=0.002)


def run_groups(path: str, cases: list[Case]) -> None:
    world = epcomm.init(timeout=30.0)
    group, rank = divmod(world.rank, 2)
    store = torch.distributed.FileStore(f"{path}-{group}", 2)
    with epcomm.init(store=store, rank=rank, world_size=2, timeout=30.0) as pair:
        delay_operations(pair, seed=group)
        for case in cases:
            ep, ep_of_all = case.handle(pair), case.handle(world)
            for number in range(3):
                round_trip(ep, Step(case, 2, 10 * group + number))  # other traffic in each group
                round_trip(ep_of_all, Step(case, 4, number))
    world.close()


def test_groups_side_by_side(tmp_path: Path) -> None:
    """Two communicators over parts of the ranks and one over all of them, in use at once."""
    run_ranks(run_groups, 4, str(tmp_path / "store"), list(in_all_kinds([Case(gate="holes_and_duplicates")])))


# ---- sizes


def run_streamed(comm: epcomm.Communicator, cases: list[Case]) -> None:
    """Traffic that goes past the caches, as large traffic does, in small so that every row size is tried."""
    for case in cases:
        ep = case.handle(comm)
        ep._memory._state.array.view(np.int64)[protocol.STREAMING_BYTES] = -1
        for number in range(3):
            round_trip(ep, Step(case, comm.size, number))
        ep.close()


@pytest.mark.parametrize("num_threads", [1, 2])
def test_streamed_rows_of_any_size(num_threads: int) -> None:
    sizes = (1, 3, 31, 32, 33, 63, 64, 65, 127, 1000)
    cases = [Case(hidden=hidden, dtype=dtype) for hidden in sizes for dtype in (torch.bfloat16, torch.float32)]
    on_ranks(2, run_streamed, list(in_all_kinds(cases)), num_threads=num_threads, longest=0)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "flat"])
def test_large_traffic(layout: str) -> None:
    """More bytes than a cache holds."""
    case = Case(layout=layout, num_experts=8, topk=4, hidden=7168, max_tokens=200, gate="zipf")
    on_ranks(2, run_steps, case, 2, longest=0)


def run_vast(comm: epcomm.Communicator, case: Case) -> None:
    """Rows that lie more than 2**31 elements apart; only what is touched takes memory."""
    ep = replace(case, max_tokens=1 << 16, blocks=2).handle(comm)
    step = Step(case, comm.size, 0)
    rows, x, y = step.exchange.rows[comm.rank], step.x(), step.y()
    assert ep.memory()["receive blocks"] > 2 * 2**32
    used = rows.source_token.shape[1]
    received = ep.dispatch(x[comm.rank], ep.route(step.exchange.indices[comm.rank]))
    assert torch.equal(received.x[:, :used][rows.is_real], rows.gather(x)[rows.is_real])
    output = received.output_buffer()
    output[:, :used] = y[comm.rank]
    check_combined("vast", ep.combine(output, received), combined(step.exchange, comm.rank, y), case.dtype)


def test_offsets_beyond_32_bits() -> None:
    case = Case("latency", "padded", num_experts=8, hidden=7168)
    on_ranks(2, run_vast, case)
