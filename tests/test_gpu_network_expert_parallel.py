"""What else expert parallelism does among ranks of several nodes, with Triton's kernels, interpreted.

The bodies are those of one node. There are no worlds in which Numba's ranks take part: they reach other nodes by their
proxy, which shares no memory with them, and interpreted ranks by `device.gpu.remote`, which copies between mapped ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_ep_no_sync
import test_ep_quantized
import test_ep_quantized_combine
import torch
from ep_cases import Case, Step, dispatched, in_all_kinds, round_trip
from failure_cases import raised_by
from test_ep_failures import run_over_capacity
from test_gpu_expert_parallel import run_failures
from test_gpu_graphs import PADDED, run_replays
from test_gpu_network import WORLDS, on_nodes, tell_late
from test_hosts_expert_parallel import run_after_reset, run_by_node

import epcomm
from epcomm.errors import MismatchError

ONE_EACH, UNEVEN, TWO_EACH = WORLDS["1+1"], WORLDS["1+2"], WORLDS["2+2"]

# ---- results of a fixed shape, dropped rows

FIXED = test_ep_no_sync.kinds(test_ep_no_sync.CASE)
#: rows per expert, per rank and expanded, per rank
FEW_FIXED = [case for case in FIXED if (case.mode, case.layout) in (("throughput", "contiguous"), ("latency", "flat"))]


def run_fixed_and_dropping(comm: epcomm.Communicator, cases: list[Case]) -> None:
    test_ep_no_sync.run_fixed(comm, cases)
    test_ep_no_sync.run_dropping(comm, cases)


def test_fixed_and_dropped_rows() -> None:
    on_nodes(ONE_EACH, run_fixed_and_dropping, FEW_FIXED)


@pytest.mark.slow
def test_fixed_and_dropped_rows_of_every_kind() -> None:
    for case in FIXED:
        on_nodes(UNEVEN, run_fixed_and_dropping, [case])


def test_dropped_rows_with_host_sync() -> None:
    on_nodes(UNEVEN, test_ep_no_sync.run_dropped_with_host_sync)


# ---- quantised rows

COMBINED = replace(test_ep_quantized_combine.CASE, max_tokens=3)


def run_quantized(comm: epcomm.Communicator, kinds: list[tuple[str, str]]) -> None:
    """There and back, of rows that move in vectors and of others."""
    for number, kind in enumerate(kinds):
        wire = "rank" if number % 2 else "auto"
        traffic = list(test_ep_quantized.traffic_of((130, 384), kind, wire if kind[1] != "flat" else "auto"))
        test_ep_quantized.run_quantized(comm, traffic)
        first = traffic[0][0]
        case = replace(COMBINED, mode=first.mode, layout=first.layout, wire=first.wire)
        test_ep_quantized_combine.run(comm, [case], test_ep_quantized_combine.combine_in_any_way, 3)


KINDS_BY_TURNS = [("throughput", "contiguous"), ("latency", "padded"), ("latency", "flat")]


def test_quantized() -> None:
    on_nodes(ONE_EACH, run_quantized, KINDS_BY_TURNS)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [UNEVEN, TWO_EACH], ids=["1+2", "2+2"])
@pytest.mark.parametrize("kind", KINDS_BY_TURNS, ids="-".join)
def test_quantized_in_larger_worlds(nodes: list[int], kind: tuple[str, str]) -> None:
    on_nodes(nodes, run_quantized, [kind])


# ---- rows once per node


@pytest.mark.slow
def test_by_node() -> None:
    on_nodes(UNEVEN, run_by_node)


# ---- captured calls


def run_captured(comm: epcomm.Communicator) -> None:
    """Captured handles of both wires; then captured collectives, of other data in each replay."""
    for wire in ("expert", "rank"):
        run_replays(comm, replace(PADDED, wire=wire))
    x, total, everyone = torch.zeros(700), torch.zeros(700), torch.zeros(700 * comm.size)

    def step() -> None:
        comm.allreduce(x, out=total)
        comm.allgather(x, out=everyone)

    step()
    with comm._runtime.target.stream.capture() as graph:
        step()
    inputs = torch.arange(700.0).repeat(comm.size, 1) * torch.arange(1.0, comm.size + 1)[:, None]
    for number in range(3):
        x.copy_(inputs[comm.rank] + number)
        graph.replay()
        assert torch.equal(total, (inputs + number).sum(0)) and torch.equal(everyone, (inputs + number).flatten())


def test_captured_calls() -> None:
    on_nodes(ONE_EACH, run_captured)


@pytest.mark.slow
def test_captured_calls_of_more_ranks() -> None:
    on_nodes(UNEVEN, run_captured)


# ---- what goes wrong


def test_failures() -> None:
    """A bad index, different calls and an abort: the other node's rank hears of each; a reset revives the handle."""
    heard = on_nodes(ONE_EACH, run_failures, Case(tokens="full"))
    assert "rank 1 has had enough" in heard[0][0]


def test_abort_in_the_middle_of_traffic() -> None:
    """What was under way of the earlier generation harms nobody."""
    on_nodes(TWO_EACH, run_after_reset, Case(hidden=40))


def run_alike(comm: epcomm.Communicator, case: Case) -> list[Any]:
    """Calls that raise the same words: what a peer calls may come after its word, and is awaited."""
    ep, step, found = case.handle(comm), Step(case, comm.size, 0), []
    tell_late(comm)
    for number in range(4):
        weights = step.weights[comm.rank] if comm.rank == 1 else None
        found.append(raised_by(dispatched, ep, step, weights))
        comm.reset()
        round_trip(ep, Step(case, comm.size, number))
    return found


def test_calls_that_raise_the_same_words() -> None:
    for found in on_nodes(ONE_EACH, run_alike, Case("latency", "padded")):
        for raised in found:
            assert type(raised.error) is MismatchError, raised
            assert "topk_weights=given" in raised.text and "topk_weights=None" in raised.text, raised


def test_more_rows_than_there_is_room_for() -> None:
    on_nodes(ONE_EACH, run_over_capacity, Case("latency", "flat", gate="one_rank", tokens="uneven"))


OVER_CAPACITY = list(in_all_kinds([Case(gate="one_rank", tokens="uneven", alignment=4)]))[::3]


@pytest.mark.slow
@pytest.mark.parametrize("case", OVER_CAPACITY, ids=str)
def test_more_rows_than_there_is_room_for_in_every_kind(case: Case) -> None:
    on_nodes(UNEVEN, run_over_capacity, case)
