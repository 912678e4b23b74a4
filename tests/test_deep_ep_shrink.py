"""DeepEP's `Buffer` without some of its ranks: masked ones are left out, also one that died."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ep_cases import check_combined, check_rows, on_ranks, require
from gloo_ranks import with_process_group
from test_deep_ep_low_latency import PADDED, Step, check_handle, combine, dispatched, round_trip

import epcomm
from epcomm.errors import ConfigError, PeerLostError, UnsupportedError
from epcomm.integrations import deep_ep
from epcomm.testing.oracle import Exchange, combined

CASE = replace(PADDED, gate="holes", tokens="uneven", hidden=128)


class Shrunken(Step):
    """A step in which some ranks have no tokens, and nobody's tokens go to their experts."""

    def __init__(self, case: Any, size: int, number: int, masked: set[int]):
        super().__init__(case, size, number)
        whole, indices = Step(case, size, number).exchange, []
        gone = torch.tensor([owner in masked for owner in whole.owner] + [False])
        for rank, index in enumerate(whole.indices):
            left = index.masked_fill(gone[index.long()], -1)
            indices.append(left[:0] if rank in masked else left)
        self.__dict__["exchange"] = Exchange(case.layout, whole.owner, case.max_tokens, 1, tuple(indices), whole.wire)


def check_without(buffer: Any, number: int, masked: set[int], hooked: bool) -> None:
    """A round trip of the ranks that are left, with the indices that name the experts of all."""
    rank, whole = buffer.rank, Step(CASE, buffer.group_size, number)
    step = Shrunken(CASE, buffer.group_size, number, masked)
    x, y, rows = step.x(), step.y(), step.exchange.rows[rank]
    for quantized in (False, True):
        got, counts, handle = dispatched(buffer, whole, x[rank], hooked, use_fp8=quantized)
        require("counts", counts, rows.expert_counts)
        shape = len(counts), buffer.group_size * CASE.max_tokens
        assert (got[0] if quantized else got).shape == (*shape, CASE.hidden)
        if quantized:
            assert got[1].shape == (*shape, 1) and got[1].stride(1) == 1
    got, _, handle = dispatched(buffer, whole, x[rank], hooked, use_fp8=False)
    check_rows(step, rank, got, x)
    check_handle(step, rank, handle)
    wanted = combined(step.exchange, rank, y, step.weights[rank])
    for options in (dict(), dict(zero_copy=True)):
        buffer.get_next_low_latency_combine_buffer(handle).copy_(y[rank])
        result = combine(buffer, whole, y[rank], handle, hooked, **options)
        check_combined("combine", result, wanted, CASE.dtype)


def masks(buffer: Any) -> list[int]:
    status = torch.full((buffer.group_size,), 9, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def test_masked_ranks_take_no_part() -> None:
    """Rank 1 pauses while the others go on; then it is back. Another pair is left, again and again."""

    def body() -> None:
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
        round_trip(buffer, Step(CASE, 3, 0), False)
        for turn, masked in enumerate((1, 1, 0)):
            if buffer.rank != masked:
                buffer.low_latency_update_mask_buffer(masked, True)
                assert masks(buffer) == [int(rank == masked) for rank in range(3)]
                for number in range(3):
                    check_without(buffer, 10 * turn + number, {masked}, hooked=number % 2 == 1)
                if turn == 1:
                    buffer.low_latency_clean_mask_buffer()
                buffer.low_latency_update_mask_buffer(masked, False)
            assert masks(buffer) == [0, 0, 0]
            round_trip(buffer, Step(CASE, 3, 10 * turn + 5), True)
        buffer.destroy()

    with_process_group(3, body)


def test_survivors_of_a_rank_that_died_go_on() -> None:
    def body() -> str:
        buffer = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True)
        round_trip(buffer, Step(CASE, 3, 0), False)
        if buffer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(PeerLostError) as lost:
            while True:
                round_trip(buffer, Step(CASE, 3, 0), False)
        assert lost.value.rank == 1
        buffer.low_latency_update_mask_buffer(lost.value.rank, True)
        for number in range(3):
            check_without(buffer, number, {1}, hooked=number % 2 == 0)
        buffer.destroy()
        return "went on"

    outcomes = with_process_group(3, body, expendable=[1])
    assert [outcomes[0], outcomes[2]] == ["went on", "went on"], outcomes


def test_who_may_be_masked() -> None:
    def body() -> None:
        buffer = deep_ep.Buffer(dist.group.WORLD)
        with pytest.raises(ConfigError, match="enable_shrink"):
            buffer.low_latency_update_mask_buffer(1, True)
        buffer = deep_ep.Buffer(dist.group.WORLD, enable_shrink=True)
        for wrong in (2, -1, dist.get_rank()):
            with pytest.raises(ConfigError, match="rank_to_mask"):
                buffer.low_latency_update_mask_buffer(wrong, True)
        round_trip(buffer, Step(CASE, 2, 0), False)

    with_process_group(2, body)


def test_ranks_without_a_store_cannot_meet_again() -> None:
    def body(comm: epcomm.Communicator) -> None:
        with pytest.raises(UnsupportedError, match="store"):
            deep_ep.Buffer(comm, enable_shrink=True).low_latency_update_mask_buffer(1 - comm.rank, True)

    on_ranks(2, body)
