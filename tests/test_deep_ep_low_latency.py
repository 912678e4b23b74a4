"""DeepEP's `Buffer`, low latency: rows per expert, float8 and its scales, hooks, memory that combine reads in place."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_combined, check_raised, check_rows, on_ranks, require

import epcomm
from epcomm.errors import CapacityError, ConfigError
from epcomm.integrations import deep_ep
from epcomm.moe.quantize import Float8
from epcomm.testing.oracle import combined

PADDED = Case(mode="latency", layout="padded", hidden=24, num_experts=7, max_tokens=8)
CASES = [
    replace(PADDED, gate="holes", tokens="uneven"),
    replace(PADDED, gate="holes_and_duplicates", tokens="none_on_even_ranks", index_dtype=torch.int32),
    replace(PADDED, dtype=torch.float32, tokens="none"),
]


def dispatched(buffer: Any, step: Step, x: Any, hooked: bool, **options: Any) -> tuple[Any, ...]:
    """(rows, counts, handle) of a dispatch as clients call it, with a hook or without."""
    case = step.case
    got, counts, handle, event, hook = buffer.low_latency_dispatch(
        x, step.exchange.indices[buffer.rank], case.max_tokens, case.num_experts,
        return_recv_hook=hooked, async_finish=not hooked, **options,
    )  # fmt: skip
    if hooked:
        hook()
    else:
        event.current_stream_wait()
        assert hook is None
    return got, counts, handle


def combine(buffer: Any, step: Step, y: torch.Tensor, handle: Any, hooked: bool, **options: Any) -> torch.Tensor:
    index = step.exchange.indices[buffer.rank]
    result, event, hook = buffer.low_latency_combine(
        y, index, step.weights[buffer.rank], handle, return_recv_hook=hooked, async_finish=not hooked, **options
    )
    hook() if hooked else event.current_stream_wait()
    return result


def check_handle(step: Step, rank: int, handle: Any) -> None:
    """The parts of DeepEP's handle, as its tests read them."""
    exchange, case = step.exchange, step.case
    src_info, layout_range, max_tokens, hidden, num_experts = handle
    assert (max_tokens, num_experts) == (case.max_tokens, case.num_experts) == (handle[2], handle[4])
    rows = exchange.rows[rank]
    require("src_info", src_info[rows.is_real], rows.source_token[rows.is_real])
    assert layout_range.dtype == torch.int64
    for number, expert in enumerate(exchange.experts_of(rank)):
        first = 0
        for source in range(step.size):
            count = len(exchange.tokens_for(source, expert))
            begin, found = layout_range[number, source].item() >> 32, layout_range[number, source].item() & (2**32 - 1)
            assert (begin, found) == (first, count)
            first += count


def round_trip(buffer: Any, step: Step, hooked: bool) -> None:
    rank, exchange, case, what = buffer.rank, step.exchange, step.case, f"rank {buffer.rank}, {step}"
    x, y, rows = step.x(), step.y(), step.exchange.rows[rank]
    stats = torch.full((len(exchange.experts_of(rank)),), 5, dtype=torch.int32)
    got, counts, handle = dispatched(
        buffer, step, x[rank], hooked, use_fp8=False, cumulative_local_expert_recv_stats=stats
    )
    assert got.shape == (len(stats), step.size * case.max_tokens, case.hidden)
    check_rows(step, rank, got, x)
    require(f"{what}: counts", counts, rows.expert_counts)
    require(f"{what}: stats", stats, rows.expert_counts + 5)
    check_handle(step, rank, handle)

    wanted = combined(exchange, rank, y, step.weights[rank])
    out = torch.full_like(x[rank], torch.nan)
    assert combine(buffer, step, y[rank], handle, hooked, out=out, use_logfmt=True) is out
    check_combined(f"{what}: combine into out", out, wanted, case.dtype)
    memory = buffer.get_next_low_latency_combine_buffer(handle)
    assert memory.shape == got.shape and memory.dtype == got.dtype
    memory.copy_(y[rank])
    result = combine(buffer, step, torch.full_like(memory, torch.nan), handle, hooked, zero_copy=True)
    check_combined(f"{what}: zero copy", result, wanted, case.dtype)

    kept = exchange.indices[rank].clone()
    kept[:, 0] = -1  # the first slot is left out
    result, _, _ = buffer.low_latency_combine(y[rank], kept, step.weights[rank], handle)
    weights = step.weights[rank].masked_fill(kept < 0, 0)
    check_combined(f"{what}: without a slot", result, combined(exchange, rank, y, weights), case.dtype)


FORMATS = [
    dict(),
    dict(round_scale=True),
    dict(round_scale=True, use_ue8m0=True),
]


def quantized_trip(buffer: Any, step: Step, hooked: bool, options: dict[str, bool]) -> None:
    """Codes and scales are those of the format, laid out as DeepEP has them."""
    rank, case, hidden = buffer.rank, step.case, 640
    is_rounded, is_packed = options.get("round_scale", False), options.get("use_ue8m0", False)
    quantize = Float8(round_scales_to_power_of_two=is_rounded, packed_ue8m0=is_packed)
    x = step.x(torch.bfloat16, hidden)
    pairs = [quantize.quantized(rows) for rows in x]
    (codes, scales), counts, _ = dispatched(buffer, step, x[rank], hooked, **options)
    check_rows(step, rank, codes, [pair[0] for pair in pairs])
    check_rows(step, rank, scales, [pair[1] for pair in pairs])
    num_rows, width = step.size * case.max_tokens, 2 if is_packed else 5
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scales.shape == (len(counts), num_rows, width)
    assert scales.dtype == (torch.int32 if is_packed else torch.float32)
    assert scales.stride()[1:] == (1, num_rows) and (len(counts) < 2 or scales.stride(0) == num_rows * width)


@pytest.mark.parametrize("world", [2, 3])
def test_low_latency(world: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        for case in CASES:
            buffer = deep_ep.Buffer(comm, low_latency_mode=True)
            for number, hooked in itertools.product(range(3), (False, True)):
                step = Step(case, comm.size, number)
                round_trip(buffer, step, hooked)
                for options in FORMATS:
                    quantized_trip(buffer, step, hooked, options)
                buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.num_experts)
            buffer.destroy()

    on_ranks(world, body)


def test_two_micro_batches_are_under_way_at_once() -> None:
    """Each has its dispatch and its combine begun before the other's is finished, as in dual batch overlap."""

    def body(comm: epcomm.Communicator) -> None:
        rank, buffer = comm.rank, deep_ep.Buffer(comm, low_latency_mode=True)
        for number in range(4):
            steps = [Step(CASES[0], comm.size, 2 * number + half) for half in range(2)]
            begun = [
                buffer.low_latency_dispatch(
                    step.x()[rank], step.exchange.indices[rank], PADDED.max_tokens, PADDED.num_experts,
                    use_fp8=False, return_recv_hook=True,
                ) for step in steps
            ]  # fmt: skip
            for _, _, _, _, hook in reversed(begun):
                hook()
            results = []
            for step, (got, _, handle, _, _) in zip(steps, begun):
                check_rows(step, rank, got, step.x())
                index, weights = step.exchange.indices[rank], step.weights[rank]
                results.append(
                    buffer.low_latency_combine(step.y()[rank], index, weights, handle, return_recv_hook=True)
                )
            for step, (result, _, hook) in zip(steps, results):
                hook()
                wanted = combined(step.exchange, rank, step.y(), step.weights[rank])
                check_combined(step, result, wanted, torch.bfloat16)
        assert len(buffer._handles._lanes) == 2

    on_ranks(2, body)


def test_handles_that_clients_keep_hold_no_memory_that_others_need() -> None:
    """Each layer of a model keeps its last handle; all of their rows still arrive where they stay."""

    def body(comm: epcomm.Communicator) -> None:
        rank, buffer, layers, places = comm.rank, deep_ep.Buffer(comm), {}, set()
        for number in range(12):
            step = Step(CASES[0], comm.size, number)
            got, _, handle = dispatched(buffer, step, step.x()[rank], True, use_fp8=False)
            check_rows(step, rank, got, step.x())
            places.add(got.data_ptr())
            combine(buffer, step, step.y()[rank], handle, True)
            layers[number % 4] = handle
            assert handle.src_info is None
        assert len(places) <= 2  # blocks

    on_ranks(2, body)


def test_both_modes_in_one_buffer_and_results_that_stay() -> None:
    def body(comm: epcomm.Communicator) -> None:
        rank, buffer, kept = comm.rank, deep_ep.Buffer(comm, 1 << 20, 1 << 20, low_latency_mode=True), []
        for number in range(5):  # more than there are blocks
            step = Step(CASES[0], comm.size, number)
            got, _, _ = dispatched(buffer, step, step.x()[rank], False, use_fp8=False)
            kept.append((step, got))
            flat = Step(replace(CASES[0], mode="throughput", layout="flat"), comm.size, number)
            index = flat.exchange.indices[rank]
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(index, PADDED.num_experts)
            rows, *_ = buffer.dispatch(
                flat.x()[rank], topk_idx=index, topk_weights=flat.weights[rank], num_tokens_per_rank=per_rank,
                num_tokens_per_expert=per_expert, is_token_in_rank=in_rank,
            )  # fmt: skip
            check_rows(flat, rank, rows, flat.x())
        for step, got in kept:
            check_rows(step, rank, got, step.x())

    on_ranks(2, body)


def test_statistics_name_the_rank_that_was_waited_for() -> None:
    """Rank 2 is late in every dispatch and in every combine, and the others' time goes there."""

    def body(comm: epcomm.Communicator) -> float:
        late, rank, buffer, longest = 0.3, comm.rank, deep_ep.Buffer(comm), 0.0
        step = Step(replace(PADDED, gate="uniform"), comm.size, 0)
        round_trip(buffer, step, True)  # makes the handle, which is waiting, too

        def timed(call: Any, stats: torch.Tensor) -> Any:
            nonlocal longest
            comm.barrier()
            time.sleep(late * (rank == 2))
            began = time.monotonic_ns()
            result = call()
            took = time.monotonic_ns() - began
            waited = stats - 1000
            assert waited.min() >= 0 and waited[rank] == 0 and waited.sum() <= took
            if rank != 2 and took > late / 2 * 1e9:  # else this rank was late, too
                assert waited[2] > took / 2, (waited, took)
                longest = max(longest, took * 1e-9)
            return result

        for hooked in (False, True, False):
            of_dispatch, of_combine = torch.full((2, comm.size), 1000, dtype=torch.int64)
            options = dict(use_fp8=False, dispatch_wait_recv_cost_stats=of_dispatch)
            _, _, handle = timed(lambda: dispatched(buffer, step, step.x()[rank], hooked, **options), of_dispatch)  # noqa: B023
            options = dict(combine_wait_recv_cost_stats=of_combine)
            timed(lambda: combine(buffer, step, step.y()[rank], handle, hooked, **options), of_combine)  # noqa: B023
        return longest

    assert max(on_ranks(3, body, longest=0)[:2]) > 0.15


def test_errors_keep_their_kind() -> None:
    def body(comm: epcomm.Communicator) -> None:
        step = Step(replace(PADDED, gate="uniform"), comm.size, 0)
        rank, is_bad = comm.rank, comm.rank == 1
        x, y, index, weights = step.x()[rank], step.y()[rank], step.exchange.indices[rank], step.weights[rank]
        buffer = deep_ep.Buffer(comm)

        def dispatch(x: Any = x, index: Any = index, **options: Any) -> Any:
            return buffer.low_latency_dispatch(x, index, PADDED.max_tokens, 7, **{"use_fp8": False, **options})

        more = torch.cat([x, x]), torch.cat([index, index])
        check_raised(comm, lambda: dispatch(*(more if is_bad else ())), CapacityError, "max_tokens=8")
        unrounded = dict(use_ue8m0=True, use_fp8=True) if is_bad else {}
        check_raised(comm, lambda: dispatch(**unrounded), ConfigError, "`round_scale`")
        _, _, handle, _, _ = dispatch()
        others = index.roll(1, dims=0) if is_bad else index
        check_raised(comm, lambda: buffer.low_latency_combine(y, others, weights, handle), ConfigError, "`topk_idx`")
        _, _, handle, _, _ = dispatch()
        options = dict(zero_copy=is_bad)
        check_raised(
            comm, lambda: buffer.low_latency_combine(y, index, weights, handle, **options), ConfigError, "`zero_copy`"
        )
        _, _, handle, _, hook = dispatch(return_recv_hook=True)
        with pytest.raises(ConfigError, match="receive hook"):
            deep_ep.Buffer.get_next_low_latency_combine_buffer(buffer, handle)
        comm.reset()
        round_trip(buffer, step, True)

    on_ranks(2, body)
