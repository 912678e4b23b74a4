"""Who owns which memory when: results are not overwritten while a tensor on them lives, and dispatch never runs out."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import (
    KIND_IDS,
    KINDS,
    Case,
    Step,
    check_combined,
    check_fields,
    check_rows,
    dispatched,
    on_ranks,
    round_trip,
)

import epcomm
from epcomm.testing.oracle import combined
from epcomm.testing.ranks import run_ranks


def is_lent(ep: Any, tensor: torch.Tensor) -> bool:
    """True if a tensor lies in a receive block."""
    return ep._memory.receive.locate(tensor.data_ptr()) is not None


def is_output(ep: Any, tensor: torch.Tensor) -> bool:
    return ep._memory.outputs.locate(tensor.data_ptr()) is not None


def free_blocks(ep: Any) -> int:
    return len(ep._memory.receive.free)


# ---- receive blocks


def hold_results(comm: epcomm.Communicator, case: Case) -> None:
    """More results alive than there are blocks: the first ones are lent, the last block is only passed through."""
    for blocks in (1, 2, 3, 5):
        ep = replace(case, blocks=blocks).handle(comm)
        held: list[tuple[Step, Any]] = []
        for number in range(8):
            step = Step(case, comm.size, number)
            held.append((step, dispatched(ep, step, step.weights[comm.rank])))
            assert is_lent(ep, held[-1][1].x) == (number < blocks - 1)
            assert free_blocks(ep) >= 1
            if number == 5:
                del held[1]
                assert free_blocks(ep) == (2 if blocks > 2 else 1)
                held.insert(1, (step, dispatched(ep, step, step.weights[comm.rank])))
                assert is_lent(ep, held[1][1].x) == (blocks > 2)
            for step, received in held:
                check_rows(step, comm.rank, received.x, step.x())
                check_fields(step, received, has_weights=True)
        for step, received in held:
            y = step.y()
            wanted = combined(step.exchange, comm.rank, y)
            check_combined(f"{blocks} blocks", ep.combine(y[comm.rank], received), wanted, case.dtype)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_results_held_beyond_the_blocks(mode: str, layout: str) -> None:
    on_ranks(2, hold_results, Case(mode, layout, alignment=4))


def in_another_thread(x: torch.Tensor) -> Any:
    """A thread that has the only reference; calling it lets the thread drop it."""
    holder, go = [x], threading.Event()

    def drop() -> None:
        go.wait()
        holder.clear()

    thread = threading.Thread(target=drop)
    thread.start()

    def end() -> None:
        go.set()
        thread.join()

    return end


def saved_for_backward(x: torch.Tensor) -> Any:
    weight = torch.ones(x.shape[-1], requires_grad=True)
    return (x * weight).sum()


def in_a_cycle(x: torch.Tensor) -> Any:
    class Node:
        pass

    node: Any = Node()
    node.itself, node.x = node, x
    return node


HOLDS: dict[str, Callable[[Any], Any]] = {
    "received": lambda received: received,
    "tensor": lambda received: received.x,
    "slice": lambda received: received.x[..., 1:3],
    "view": lambda received: received.x.view(torch.int32),
    "transposed": lambda received: received.x.mT,
    "detached": lambda received: received.x.detach(),
    "storage": lambda received: received.x.untyped_storage(),
    "array": lambda received: received.x.numpy(),
    "other field": lambda received: received.source_token[..., :1],
    "output of an operation": lambda received: saved_for_backward(received.x),
    "thread": lambda received: in_another_thread(received.x),
    "cycle": lambda received: in_a_cycle(received.x),
}


def hold_in_many_ways(comm: epcomm.Communicator, case: Case) -> None:
    """A block is lent as long as anything refers to its memory, and back at once when nothing does."""
    ep, step = case.handle(comm), Step(case, comm.size, 0)
    for name, hold in HOLDS.items():
        held = hold(dispatched(ep, step))
        assert free_blocks(ep) == 2, name
        for number in range(3):
            round_trip(ep, Step(case, comm.size, number))
        assert free_blocks(ep) == 2, name
        if name == "thread":
            held()
        del held
        if name == "cycle":
            gc.collect()
        assert free_blocks(ep) == 3, name


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_block_returns_with_its_last_tensor(mode: str, layout: str) -> None:
    on_ranks(2, hold_in_many_ways, Case(mode, layout, dtype=torch.float32, hidden=4, max_tokens=11), longest=0)


def outlive(case: Case) -> None:
    """Tensors stay as they are when their result, routing, handle and communicator are gone."""
    kept = []
    for number in range(3):
        with epcomm.init(timeout=30.0) as comm:
            ep, step = case.handle(comm), Step(case, comm.size, number)
            received = dispatched(ep, step)
            rank, x, tokens, output = comm.rank, received.x, received.source_token, received.output_buffer()
            output.fill_(number)
            kept.append((number, x, tokens, output))
            del received
            round_trip(ep, Step(case, comm.size, 7))
            ep.close()
            del ep
        del comm
        gc.collect()
        for number, x, tokens, output in kept:
            step = Step(case, 2, number)
            check_rows(step, rank, x, step.x())
            rows = step.exchange.rows[rank]
            assert torch.equal(tokens[rows.is_real], rows.source_token[rows.is_real])
            assert (output == number).all()


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_tensors_outlive_everything(mode: str, layout: str) -> None:
    run_ranks(outlive, 2, Case(mode, layout))


def use_routings_in_any_order(comm: epcomm.Communicator, case: Case) -> None:
    """Each routing has memory of its own for as long as it lives."""
    ep, size = case.handle(comm), comm.size
    steps = [Step(case, size, number) for number in range(6)]
    routings = [ep.route(step.exchange.indices[comm.rank]) for step in steps]
    for number in (4, 1, 1, 5, 0, 2, 3):
        step, x, y = steps[number], steps[number].x(), steps[number].y()
        received = ep.dispatch(x[comm.rank], routings[number])
        check_rows(step, comm.rank, received.x, x)
        check_fields(step, received)
        round_trip(ep, Step(case, size, 10 + number))
        check_combined(number, ep.combine(y[comm.rank], received), combined(step.exchange, comm.rank, y), case.dtype)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_routings_used_in_any_order(mode: str, layout: str) -> None:
    on_ranks(3, use_routings_in_any_order, Case(mode, layout, gate="holes_and_duplicates", tokens="uneven"))


# ---- output blocks


def use_up_output_buffers(comm: epcomm.Communicator, case: Case) -> None:
    for blocks in (1, 2, 3):
        ep = replace(case, blocks=blocks).handle(comm)
        for number in range(3):
            step = Step(case, comm.size, number)
            received, y = dispatched(ep, step), step.y()
            outputs = [received.output_buffer() for _ in range(4)]
            assert [is_output(ep, output) for output in outputs] == [i < blocks - 1 for i in range(4)]
            for output in outputs:
                output.copy_(y[comm.rank])
            wanted = combined(step.exchange, comm.rank, y)
            for output in reversed(outputs):
                check_combined(f"{blocks}", ep.combine(output, received), wanted, case.dtype)
            del outputs, output


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_output_buffers_may_run_out(mode: str, layout: str) -> None:
    on_ranks(2, use_up_output_buffers, Case(mode, layout, max_tokens=8))


def overwrite_outputs_soon(comm: epcomm.Communicator, case: Case, num_steps: int) -> None:
    """Writes to every output buffer that can be had while peers may still read the last combine's."""
    ep = case.handle(comm)
    for number in range(num_steps):
        step = Step(case, comm.size, number % 4)
        received, y = dispatched(ep, step), step.y()
        wanted = combined(step.exchange, comm.rank, y)
        result = ep.combine(received.output_buffer().copy_(y[comm.rank]), received)
        for output in [received.output_buffer() for _ in range(3)]:
            output.fill_(torch.nan)
        check_combined(step, result, wanted, case.dtype)
        staged = y[comm.rank].clone()  # one after another, they share the staging block
        results = [ep.combine(staged.mul_(2), received) for _ in range(3)]
        for power, result in enumerate(results):
            scaled = wanted._replace(exact=wanted.exact * 2.0 ** (power + 1))
            check_combined(step, result, scaled, case.dtype)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_output_blocks_are_read_before_they_are_reused(mode: str, layout: str, ranks: str) -> None:
    case = Case(mode, layout, hidden=2000, max_tokens=40)
    disturb = 3 if ranks == "processes" else None
    on_ranks(3, overwrite_outputs_soon, case, 8, ranks=ranks, disturb=disturb, longest=0.003)


# ---- nothing is left behind


def resources() -> tuple[int, int, int]:
    """Open descriptors, mappings, and resident KiB of this process."""
    with open("/proc/self/maps") as maps, open("/proc/self/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
        return len(os.listdir("/proc/self/fd")), sum(1 for _ in maps), resident


def create_and_close(comm: epcomm.Communicator, num_cycles: int) -> list[tuple[int, int, int]]:
    found = []
    for cycle in range(num_cycles):
        mode, layout = KINDS[cycle % len(KINDS)]
        case = Case(mode, layout, hidden=512, max_tokens=64)
        ep = case.handle(comm)
        round_trip(ep, Step(case, comm.size, cycle % 3))
        kept = dispatched(ep, Step(case, comm.size, 0)).x if cycle % 2 else None
        ep.close()
        del ep, kept
        if cycle % 50 == 49:
            gc.collect()
            comm.barrier()
            found.append(resources())
            comm.barrier()
    return found


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_handles_come_and_go_without_a_trace(ranks: str) -> None:
    for found in on_ranks(2, create_and_close, 300, ranks=ranks, longest=0, timeout=100.0):
        descriptors, mappings, resident = zip(*found, strict=True)
        assert max(descriptors) <= min(descriptors) + 4, found  # another rank thread may be counting too
        assert max(mappings[2:]) <= mappings[1] + 4, found  # the allocator's own
        assert min(resident[2:]) <= resident[1] + 16384, found  # a handle takes about 2000


def close_but_keep(comm: epcomm.Communicator) -> None:
    """A closed handle holds no memory, even if something still refers to it."""
    case = Case(hidden=4096, max_tokens=64)
    closed = []
    before = resources()[1]
    for _ in range(20):
        ep = case.handle(comm)
        round_trip(ep, Step(case, comm.size, 0))
        ep.close()
        closed.append(ep)
    assert resources()[1] < before + 20


def test_closed_handle_holds_no_memory() -> None:
    on_ranks(2, close_but_keep, longest=0)
