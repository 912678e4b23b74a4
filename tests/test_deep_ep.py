"""DeepEP's `Buffer`, high throughput: layouts, rows, counts, handles, sums, against the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_cases import Case, Step, check_combined, check_raised, check_rows, on_ranks, require, spread
from gloo_ranks import with_process_group

import epcomm
from epcomm.errors import CapacityError, ClosedError, ConfigError
from epcomm.integrations import deep_ep
from epcomm.integrations.deep_ep.high_throughput import combine_with_bias
from epcomm.moe.quantize import Float8
from epcomm.testing.oracle import combined, received_weights

FLAT = Case(layout="flat", hidden=40, num_experts=7)  # 7 experts: not as many on each of 2 or 3 ranks
CASES = [
    replace(FLAT, gate="holes", tokens="uneven"),
    replace(FLAT, gate="holes_and_duplicates", tokens="none_on_even_ranks", index_dtype=torch.int32),
    replace(FLAT, dtype=torch.float32, tokens="none"),
]
NUM_STEPS = 3


def rounded_up(counts: torch.Tensor, alignment: int) -> list[int]:
    return [(count + alignment - 1) // alignment * alignment for count in counts.tolist()]


def check_layout(buffer: Any, step: Step) -> tuple[torch.Tensor, ...]:
    """What `get_dispatch_layout` says, counted one by one."""
    exchange, rank = step.exchange, buffer.rank
    index = exchange.indices[rank]
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(index, step.case.num_experts)
    event.current_stream_wait()
    wanted = torch.zeros(len(index), step.size, dtype=torch.bool)
    for token, experts in enumerate(index.tolist()):
        for expert in experts:
            if expert >= 0:
                wanted[token, exchange.owner[expert]] = True
    require("is_token_in_rank", in_rank, wanted)
    require("num_tokens_per_rank", per_rank, wanted.sum(dim=0).int())
    selected = torch.tensor([int((index == expert).sum()) for expert in range(step.case.num_experts)])
    require("num_tokens_per_expert", per_expert, selected.int())
    nodes = torch.tensor(buffer.communicator.nodes)
    by_node = [int(wanted[:, nodes == node].any(dim=1).sum()) for node in range(int(nodes.max()) + 1)]
    require("num_tokens_per_rdma_rank", per_node, torch.tensor(by_node).int() if len(by_node) > 1 else None)
    return per_rank, per_expert, in_rank


def dispatched(buffer: Any, step: Step, x: Any, **options: Any) -> tuple[Any, ...]:
    """A dispatch as clients call it."""
    per_rank, per_expert, in_rank = check_layout(buffer, step)
    return buffer.dispatch(
        x,
        topk_idx=step.exchange.indices[buffer.rank],
        topk_weights=step.weights[buffer.rank],
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        **options,
    )


def round_trip(buffer: Any, step: Step) -> None:
    """Dispatch, again along its handle, and combine; and the other way round, as a backward pass has it."""
    rank, exchange, case, what = buffer.rank, step.exchange, step.case, f"rank {buffer.rank}, {step}"
    x, y, rows = step.x(), step.y(), step.exchange.rows[rank]
    alignment = 1 + 3 * (step.number % 2)
    previous = deep_ep.Buffer.capture()
    options = dict(expert_alignment=alignment, previous_event=previous, async_finish=True, allocate_on_comm_stream=True)
    got, index, weights, counts, handle, event = dispatched(buffer, step, x[rank], **options)
    event.current_stream_wait()
    check_rows(step, rank, got, x)
    assert got.is_contiguous() and not got.requires_grad
    require(f"{what}: recv_topk_idx", index, rows.topk_idx)
    require(f"{what}: recv_topk_weights", weights, received_weights(exchange, rank, step.weights))
    assert counts == rounded_up(rows.expert_counts, alignment)

    more = step.x(torch.float16, 3)
    again, *nothing, event = buffer.dispatch(more[rank], handle=handle)
    check_rows(step, rank, again, more)
    assert nothing == [None] * 4 and event.event is None

    result, nothing, event = buffer.combine(y[rank], handle, async_finish=True)
    event.current_stream_wait()
    check_combined(f"{what}: combine", result, combined(exchange, rank, y), case.dtype)
    assert nothing is None

    result, summed, _ = buffer.combine(y[rank], handle, topk_weights=weights)
    check_combined(f"{what}: combine with weights", result, combined(exchange, rank, y), case.dtype)
    named = exchange.indices[rank] >= 0
    require(f"{what}: combined_topk_weights", summed, torch.where(named, step.weights[rank], 0.0))


def quantized_trip(buffer: Any, step: Step) -> None:
    """Rows in float8 with their scales, which experts return in bfloat16."""
    rank, float8 = buffer.rank, Float8(round_scales_to_power_of_two=True)
    pairs = [float8.quantized(x) for x in step.x(torch.bfloat16, 300)]
    (rows, scales), *_, handle, _ = dispatched(buffer, step, pairs[rank])
    check_rows(step, rank, rows, [pair[0] for pair in pairs])
    check_rows(step, rank, scales, [pair[1] for pair in pairs])
    assert rows.dtype == torch.float8_e4m3fn and rows.is_contiguous() and scales.is_contiguous()
    y = step.y(torch.bfloat16, 300)
    result, _, _ = buffer.combine(y[rank], handle)
    check_combined("bfloat16 after float8", result, combined(step.exchange, rank, y), torch.bfloat16)


def biased_trip(buffer: Any, step: Step) -> None:
    """One and two addends, with a single rounding at the end, whatever the weights do."""
    rank, y = buffer.rank, step.y()
    *_, weights, _, handle, _ = dispatched(buffer, step, step.x()[rank])
    one = torch.full_like(step.x()[rank], 2.0**-6)
    for bias, total in ((one, one), ((one, 3 * one), 4 * one)):
        for given in (None, weights):
            result, summed, _ = buffer.combine(y[rank], handle, topk_weights=given, bias=bias)
            wanted = combined(step.exchange, rank, y).exact + total.double()
            require(f"bias of {step}", result, wanted.to(step.case.dtype))
            assert (summed is None) == (given is None)


def worst_case_trip(buffer: Any, step: Step) -> None:
    """`num_worst_tokens`: a fixed number of rows, with -1 behind the last one."""
    rank, x, rows = buffer.rank, step.x(), step.exchange.rows[buffer.rank]
    most, count = step.size * step.case.max_tokens, len(rows.source_token)
    got, index, weights, counts, handle, _ = dispatched(buffer, step, x[rank], num_worst_tokens=most)
    assert got.shape == (most, step.case.hidden) and index.shape == weights.shape == (most, step.case.topk)
    check_rows(step, rank, got[:count], x)
    require("recv_topk_idx", index[:count], rows.topk_idx)
    assert index[count:].eq(-1).all() and weights[count:].eq(0).all() and counts == []
    again, *_ = buffer.dispatch(x[rank], handle=handle)
    require("again", again[:count], got[:count])
    y = step.y()
    whole = torch.full((most, step.case.hidden), torch.nan, dtype=step.case.dtype)
    whole[:count] = y[rank]
    result, _, _ = buffer.combine(whole, handle)
    check_combined("worst case", result, combined(step.exchange, rank, y), step.case.dtype)


def unnamed_trip(buffer: Any, step: Step) -> None:
    """Without indices: rows go where `is_token_in_rank` says."""
    rank, x, y = buffer.rank, step.x(), step.y()
    per_rank, per_expert, in_rank = check_layout(buffer, step)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert)
    got, index, weights, counts, handle, _ = buffer.dispatch(x[rank], **layout, expert_alignment=2)
    check_rows(step, rank, got, x)
    selections = [int((torch.cat(step.exchange.indices) == e).sum()) for e in step.exchange.experts_of(rank)]
    assert index is None and weights is None and counts == rounded_up(torch.tensor(selections), 2)
    result, _, _ = buffer.combine(y[rank], handle)
    check_combined("without indices", result, combined(step.exchange, rank, y), step.case.dtype)


TRIPS = [round_trip, quantized_trip, biased_trip, worst_case_trip, unnamed_trip]


@pytest.mark.parametrize("world", [2, 3])
def test_high_throughput(world: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        for case in CASES:
            buffer = deep_ep.Buffer(comm, num_nvl_bytes=1 << 20)
            for number in range(NUM_STEPS):
                for trip in TRIPS:
                    trip(buffer, Step(case, comm.size, number))
            buffer.destroy()
            buffer.destroy()

    on_ranks(world, body)


def test_buffer_grows_with_its_calls_and_keeps_what_was_before() -> None:
    def body(comm: epcomm.Communicator) -> None:
        buffer, kept = deep_ep.Buffer(comm), []
        for number, max_tokens in enumerate((1, 3, 200, 40, 300)):
            step = Step(replace(FLAT, max_tokens=max_tokens, hidden=8 + number), comm.size, number)
            *_, handle, _ = dispatched(buffer, step, spread(step.x()[comm.rank]))
            kept.append((step, handle))
            for earlier, old in kept:
                y = earlier.y()
                result, _, _ = buffer.combine(y[comm.rank], old)
                check_combined(earlier, result, combined(earlier.exchange, comm.rank, y), torch.bfloat16)
        buffer.destroy()

    on_ranks(2, body)


def test_buffers_of_a_process_group() -> None:
    """They share a communicator, and a handle outlives the buffer it was made with."""

    def body() -> None:
        group = dist.group.WORLD
        buffer = deep_ep.Buffer(group, 100, 200)
        rank = dist.get_rank()
        assert (buffer.group, buffer.rank, buffer.group_size) == (group, rank, 2)
        step = Step(CASES[0], 2, 1)
        *_, handle, _ = dispatched(buffer, step, step.x()[rank])
        other = deep_ep.Buffer(group, 300, 200)
        assert other.communicator is buffer.communicator
        del buffer
        y = step.y()
        result, _, _ = other.combine(y[rank], handle)
        check_combined("of another buffer", result, combined(step.exchange, rank, y), torch.bfloat16)
        comm = other.communicator
        other.destroy()
        comm.close()
        round_trip(deep_ep.Buffer(group), step)  # with a new one

    with_process_group(2, body)


def test_errors_keep_their_kind() -> None:
    def body(comm: epcomm.Communicator) -> None:
        step = Step(replace(FLAT, gate="uniform"), comm.size, 0)
        index, x = step.exchange.indices[comm.rank], step.x()[comm.rank]
        is_bad = comm.rank == 1
        buffer = deep_ep.Buffer(comm)

        wrong = torch.full_like(index, 7) if is_bad else index

        def layout() -> Any:
            return buffer.get_dispatch_layout(wrong, 7), comm.barrier()  # it is local: the peer learns of it later

        check_raised(comm, layout, ConfigError, "get_dispatch_layout", "`topk_idx`", "7")
        check_raised(comm, lambda: dispatched(buffer, step, x[1:] if is_bad else x), ConfigError, "`x`")
        none = dict(num_tokens_per_expert=None) if is_bad else {}
        _, per_expert, in_rank = check_layout(buffer, step)
        given = dict(num_tokens_per_expert=per_expert, is_token_in_rank=in_rank, topk_idx=index)
        check_raised(comm, lambda: buffer.dispatch(x, **{**given, **none}), ConfigError, "`handle`")
        wide = torch.zeros(len(x), 100_000) if is_bad else x
        *_, handle, _ = dispatched(buffer, step, x)
        check_raised(comm, lambda: buffer.dispatch(wide, handle=handle), CapacityError, "bytes")
        with pytest.raises(ClosedError, match="reset"):
            buffer.dispatch(x, handle=handle)
        comm.reset()
        round_trip(buffer, step)

    on_ranks(2, body)


def test_too_few_worst_tokens() -> None:
    """More rows than `num_worst_tokens` are an error everywhere, and nothing is lost silently."""

    def body(comm: epcomm.Communicator) -> None:
        buffer = deep_ep.Buffer(comm)
        step = Step(replace(FLAT, gate="one_rank"), comm.size, 0)
        for _ in range(3):
            with pytest.raises((CapacityError, epcomm.errors.PeerFailedError), match="max_recv_rows"):
                dispatched(buffer, step, step.x()[comm.rank], num_worst_tokens=10)
            if comm.size > 1:
                comm.reset()

    on_ranks(2, body)


def test_weights_and_bias_of_float64() -> None:
    def body(comm: epcomm.Communicator) -> None:
        ep = comm.expert_parallel(num_experts=2, topk=1, hidden=4, max_tokens=3, dtype=torch.float64, layout="flat")
        x = torch.tensor([[1.0], [2.0**40], [3.0]], dtype=torch.float64)
        routing = ep.route(torch.zeros(3, 1, dtype=torch.int64))
        y = ep.dispatch(x, routing).x
        result, _ = combine_with_bias(ep, y, routing, None, torch.full_like(x, 2.0**-10))
        assert torch.equal(result, x + 2.0**-10)

    on_ranks(2, body)
