"""DeepEP's `ElasticBuffer`: rows per rank and per expert, with and without waiting for counts, handles, sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, check_combined, check_raised, check_rows, on_ranks, require

import epcomm
from epcomm.errors import CapacityError, ConfigError
from epcomm.integrations import deep_ep
from epcomm.moe.quantize import Float8
from epcomm.testing.oracle import combined, received_weights

BASE = Case(hidden=40, num_experts=7, max_tokens=6)
CASES = [
    replace(BASE, gate="holes", tokens="uneven"),
    replace(BASE, gate="holes_and_duplicates", tokens="none_on_even_ranks", index_dtype=torch.int32),
    replace(BASE, dtype=torch.float32, tokens="none"),
]


def dispatched(buffer: Any, step: Step, x: Any, **options: Any) -> tuple[Any, ...]:
    rank, case = buffer.rank_idx, step.case
    return buffer.dispatch(
        x, topk_idx=step.exchange.indices[rank], topk_weights=step.weights[rank], num_experts=case.num_experts,
        num_max_tokens_per_rank=case.max_tokens, expert_alignment=case.alignment, **options,
    )  # fmt: skip


def check_handle(step: Step, rank: int, handle: Any, waited: bool) -> None:
    """The fields that clients read, from their definition."""
    exchange, case, rows = step.exchange, step.case, step.exchange.rows[rank]
    is_expanded = case.layout == "contiguous"
    assert (handle.do_expand, handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (
        is_expanded, case.num_experts, case.alignment, case.max_tokens,
    )  # fmt: skip
    require("topk_idx", handle.topk_idx, exchange.indices[rank])
    owned = torch.tensor([expert in exchange.experts_of(rank) for expert in range(case.num_experts)] + [False])
    tokens = torch.tensor([int(owned[index.long()].any(dim=1).sum()) for index in exchange.indices])
    require("psum per rank", handle.psum_num_recv_tokens_per_scaleup_rank, tokens.cumsum(0).int())
    counts, aligned = rows.expert_counts.tolist(), []
    ends, first = [], 0
    for count in counts:
        aligned.append((count + case.alignment - 1) // case.alignment * case.alignment)
        ends.append(first + (count if is_expanded else aligned[-1]))
        first += aligned[-1]
    require("psum per expert", handle.psum_num_recv_tokens_per_expert, torch.tensor(ends, dtype=torch.int32))
    require("counts", handle.num_unaligned_recv_tokens_per_expert, rows.expert_counts)
    assert handle.num_recv_tokens_per_expert_list == (aligned if waited else [])
    if waited:
        assert handle.num_recv_tokens == int(tokens.sum())
        assert handle.num_expanded_tokens == (sum(aligned) if is_expanded else 0)


def round_trip(buffer: Any, step: Step, waits: bool) -> None:
    rank, exchange, case, what = buffer.rank_idx, step.exchange, step.case, f"rank {buffer.rank_idx}, {step}"
    x, y, rows, expand = step.x(), step.y(), step.exchange.rows[rank], step.case.layout == "contiguous"
    stats = torch.full((len(exchange.experts_of(rank)),), 3, dtype=torch.int32)
    got, index, weights, handle, event = dispatched(
        buffer, step, x[rank], do_expand=expand, do_cpu_sync=waits, do_zero_padding=expand,
        previous_event=buffer.capture(), async_with_compute_stream=True, allocate_on_comm_stream=True,
        cumulative_local_expert_recv_stats=stats,
    )  # fmt: skip
    event.current_stream_wait()
    count = len(rows.source_token)
    if not waits:
        most = step.size * case.max_tokens
        if expand:
            local = -(-case.num_experts // step.size)
            most = most * min(case.topk, local) + local * (case.alignment - 1)
        assert len(got) == len(weights) == most
    check_rows(step, rank, got[:count], x)
    require(f"{what}: recv_topk_weights", weights[:count], received_weights(exchange, rank, step.weights))
    if expand:
        assert index is None
    else:
        require(f"{what}: recv_topk_idx", index[:count], rows.topk_idx)
        assert index[count:].eq(-1).all()
    require(f"{what}: stats", stats, rows.expert_counts + 3)
    check_handle(step, rank, handle, waits)

    again, index_again, nothing, same, event = buffer.dispatch(2 * x[rank], handle=handle, do_expand=expand)
    check_rows(step, rank, again[:count], [2 * rows for rows in x])
    assert same is handle and nothing is None and event.event is None and (index_again is None) == expand
    *_, more, _, _ = buffer.dispatch(x[rank], topk_weights=step.weights[rank], handle=handle, do_expand=expand)
    require(f"{what}: weights of a cached dispatch", more[:count], weights[:count])

    whole = torch.full((len(got), case.hidden), torch.nan, dtype=case.dtype)
    whole[:count] = y[rank]
    wanted = combined(exchange, rank, y)
    result, nothing, _ = buffer.combine(whole, handle, async_with_compute_stream=True)
    check_combined(f"{what}: combine", result, wanted, case.dtype)
    assert nothing is None
    one = torch.full_like(x[rank], 2.0**-6)
    result, summed, _ = buffer.combine(whole, handle, topk_weights=weights, bias=(one, one))
    require(f"{what}: bias", result, (wanted.exact + 2 * one.double()).to(case.dtype))
    require(f"{what}: combined weights", summed, returned_weights(step, rank, expand))


def returned_weights(step: Step, rank: int, expand: bool) -> torch.Tensor:
    """What comes back of delivered weights: an expert's row has those of all its slots, added."""
    index, weights = step.exchange.indices[rank], step.weights[rank]
    if expand:
        same = index[:, :, None] == index[:, None, :]
        weights = (same * weights[:, None, :]).sum(dim=2)
    return torch.where(index >= 0, weights, 0.0)


def quantized_trip(buffer: Any, step: Step) -> None:
    """Rows in float8 with scales, which may be column-major."""
    rank, float8 = buffer.rank_idx, Float8(round_scales_to_power_of_two=True, packed_ue8m0=True)
    pairs = [float8.quantized(x) for x in step.x(torch.bfloat16, 640)]
    columns = pairs[rank][0], pairs[rank][1].T.contiguous().T  # scales may lie anyhow
    expand = step.case.layout == "contiguous"
    (rows, scales), *_ = dispatched(buffer, step, columns, do_expand=expand, use_tma_aligned_col_major_sf=True)
    check_rows(step, rank, rows, [pair[0] for pair in pairs])
    check_rows(step, rank, scales, [pair[1] for pair in pairs])
    assert rows.dtype == torch.float8_e4m3fn and rows.is_contiguous() and scales.dtype == torch.int32
    if len(scales):
        assert scales.stride() == (1, -(-len(scales) // 4) * 4)


@pytest.mark.parametrize("world", [2, 3])
def test_elastic_buffer(world: int) -> None:
    def body(comm: epcomm.Communicator) -> None:
        for case in CASES:
            for expand, several in ((False, True), (True, True), (True, False)):
                case = replace(case, layout="contiguous" if expand else "flat", alignment=4)
                buffer = deep_ep.ElasticBuffer(comm, allow_multiple_reduction=several)
                for number in range(3):
                    step = Step(case, comm.size, number)
                    for waits in (True, False):
                        round_trip(buffer, step, waits)
                    quantized_trip(buffer, step)
                buffer.destroy()

    on_ranks(world, body)


def test_sizes_and_domains() -> None:
    def body(comm: epcomm.Communicator) -> None:
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=100, hidden=256, num_topk=8)
        assert buffer.num_bytes == deep_ep.ElasticBuffer.get_buffer_size_hint(comm, 100, 256, 8)
        assert buffer.num_bytes % (2 << 20) == 0 and buffer.num_bytes >= 2 * comm.size * 100 * 512
        assert deep_ep.ElasticBuffer(comm, num_bytes=123).num_bytes == 123
        assert buffer.get_logical_domain_size() == (1, 3) == (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks)
        assert buffer.get_physical_domain_size() == (1, 3) == (buffer.num_rdma_ranks, buffer.num_nvlink_ranks)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == (0, comm.rank)
        num_sms = buffer.get_theoretical_num_sms(256, 8)
        assert num_sms % 2 == 0 and num_sms >= comm.num_programs and buffer.get_theoretical_num_qps(num_sms) == 1
        for _ in range(3):
            buffer.barrier()

    on_ranks(3, body)


def test_errors_keep_their_kind() -> None:
    def body(comm: epcomm.Communicator) -> None:
        step = Step(replace(BASE, gate="uniform", layout="flat"), comm.size, 0)
        is_bad, x, index = comm.rank == 1, step.x()[comm.rank], step.exchange.indices[comm.rank]
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=6)

        def dispatch(**options: Any) -> Any:
            return buffer.dispatch(x, topk_idx=index, num_experts=7, **options)

        none = dict(topk_idx=None) if is_bad else dict(topk_idx=index)
        check_raised(comm, lambda: buffer.dispatch(x, num_experts=7, **none), ConfigError, "`handle`")
        more = (torch.cat([x, x]), torch.cat([index, index])) if is_bad else (x, index)
        check_raised(comm, lambda: buffer.dispatch(*more, num_experts=7), CapacityError, "max_tokens=6")
        for wrong, name in (
            (dict(topk_idx=index), "topk_idx"),
            (dict(do_cpu_sync=True), "do_cpu_sync"),
            (dict(do_expand=True), "do_expand"),
            (dict(num_experts=8), "num_experts"),
            (dict(expert_alignment=2), "expert_alignment"),
        ):
            *_, handle, _ = dispatch()
            given = wrong if is_bad else {}
            check_raised(comm, lambda: buffer.dispatch(x, handle=handle, **given), ConfigError, f"`{name}`")  # noqa: B023
        round_trip(buffer, step, True)

    on_ranks(2, body)
