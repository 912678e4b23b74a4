"""The low-latency half of DeepEP's `Buffer`: rows per local expert, which is epcomm's padded layout in latency mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from epcomm.integrations.deep_ep.events import EventOverlap, event_of
from epcomm.integrations.deep_ep.members import MaskableBuffer, Members
from epcomm.moe.autograd import flat
from epcomm.moe.checks import describe
from epcomm.moe.quantize import Float8
from epcomm.moe.received import output_rows

Hook = Callable[[], None]


class LowLatencyHandle:
    """What `low_latency_dispatch` returns for the combine. It unpacks to the five things that DeepEP's handle has.

    ``src_info`` int32 [local experts, size * max tokens]: each row's token number on its source rank (undefined past
    the count), once the rows are there and until they are combined: clients keep handles for longer, and a handle that
    kept its rows would keep the memory that the next ones are received in. ``layout_range`` int64 [local experts,
    size]: the first row from each rank, times 2^32, plus how many.
    """

    def __init__(self, members: Members, routing: Any, topk_idx: torch.Tensor, sizes: tuple[int, int, int]):
        self.members, self.routing, self.topk_idx = members, routing, topk_idx
        self.max_tokens, self.hidden, self.num_experts = sizes
        self.bound: Any = None  # until the rows are there
        self._tokens: torch.Tensor | None = None
        self.combine_buffer: torch.Tensor | None = None  # that was handed out last

    @property
    def num_rows(self) -> int:
        """Of each expert: as many as all of the group's ranks could send, masked or not."""
        return self.members.group_size * self.max_tokens

    def arrived(self, received: Any) -> None:
        """The rows are there."""
        self.bound, self._tokens = received.bound, received.source_token

    def combined(self) -> None:
        """They were used."""
        self._tokens = self.combine_buffer = None

    @property
    def src_info(self) -> torch.Tensor | None:
        if self._tokens is None:
            return None
        return torch.nn.functional.pad(self._tokens, (0, self.num_rows - self._tokens.shape[1]))

    @property
    def layout_range(self) -> torch.Tensor:
        received = self.routing.received_counts().T
        counts = received.new_zeros(len(received), self.members.group_size, dtype=torch.int64)
        counts[:, list(self.members.ranks)] = received.long()
        return ((counts.cumsum(dim=1) - counts) << 32) + counts

    def __iter__(self) -> Iterator[Any]:
        yield from (self.src_info, self.layout_range, self.max_tokens, self.hidden, self.num_experts)

    def __getitem__(self, number: int) -> Any:
        return tuple(self)[number]


class LowLatency(MaskableBuffer):
    """`low_latency_dispatch`, `low_latency_combine` and what belongs to them."""

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Collective: sends each token once to each of its experts.

        Args:
            x: [num_tokens <= num_max_dispatch_tokens_per_rank, hidden]; with `use_fp8` of bfloat16, float16 or float32.
            topk_idx: int32 or int64 [num_tokens, topk], -1 for no expert.
            cumulative_local_expert_recv_stats: int32 [local experts], to which the counts are added.
            dispatch_wait_recv_cost_stats: int64 [size], to which nanoseconds are added that each rank was waited for.
            use_fp8, round_scale, use_ue8m0: rows travel and arrive as float8_e4m3fn with a scale per 128 columns; the
                scales are powers of two; or their exponents, four in an int32.
            return_recv_hook: return once rows are sent. What is returned is filled when the hook is called.

        Returns: rows [local experts, size * max tokens, hidden], each expert's from 0 on, ordered by source rank and
        token, undefined past the count; with `use_fp8` (rows, scales), whose last two dimensions are column-major;
        counts int32 [local experts]; a handle; an event; the hook, or None.
        """
        quantize = self._quantizer(use_fp8, round_scale, use_ue8m0)
        members = self._membership.current()
        ep = members.handles.unused(
            **members.placement(num_experts), topk=topk_idx.shape[1], hidden=x.shape[1], dtype=x.dtype,
            max_tokens=num_max_dispatch_tokens_per_rank, mode="latency", layout="padded",
        )  # fmt: skip
        routing = ep.route(members.index(topk_idx, num_experts))
        sizes = num_max_dispatch_tokens_per_rank, x.shape[1], num_experts
        handle = LowLatencyHandle(members, routing, topk_idx, sizes)
        with _waiting(members, dispatch_wait_recv_cost_stats):
            sent = ep.dispatch(x, routing, quantize=quantize, split=return_recv_hook)
        rows = _rows_for(handle, x, quantize, sent.expected if return_recv_hook else sent)
        counts = torch.empty(len(ep.local_expert_ids), dtype=torch.int32, device=x.device)

        def arrived(received: Any) -> None:
            handle.arrived(received)
            counts.copy_(received.expert_counts)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(counts)
            for whole, part in zip(flat(rows), received.rows_in_block()):
                if whole.data_ptr() != part.data_ptr():
                    whole[:, : part.shape[1]] = part

        def hook() -> None:
            with _waiting(members, dispatch_wait_recv_cost_stats):
                arrived(sent.finish())

        if not return_recv_hook:
            arrived(sent)
        return rows, counts, handle, event_of(async_finish), hook if return_recv_hook else None

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Collective: brings the experts' outputs back and sums them, weighted.

        Args:
            x: [local experts, size * max tokens, hidden], rows as they were received; those past the counts are not
                read. With `zero_copy` what `get_next_low_latency_combine_buffer` gave is taken instead.
            topk_idx: what was given to the dispatch, in which slots may have become -1: they are left out.
            topk_weights: floats [num_tokens, topk].
            use_logfmt: has no effect: rows travel in x's dtype.
            return_recv_hook: return once x is where the peers read it; the result is there when the hook is called.
            out: [num_tokens, hidden] for the result.
            combine_wait_recv_cost_stats: int64 [size], see `low_latency_dispatch`.

        Returns: [num_tokens, hidden] of x's (or out's) dtype, summed in float32, rounded once; an event; the hook, or
        None.
        """
        where = "low_latency_combine"
        is_left_out = topk_idx < 0
        same = (topk_idx == handle.topk_idx) | is_left_out
        if topk_idx.shape != handle.topk_idx.shape or (topk_idx.device.type == "cpu" and not same.all()):
            wanted = "argument `topk_idx`: wanted the dispatch's, or -1 in some slots"
            raise self._rejected(where, f"{wanted}, got other experts {describe(topk_idx)}")
        if zero_copy:
            if handle.combine_buffer is None:
                wanted = "wanted a buffer of get_next_low_latency_combine_buffer(handle)"
                raise self._rejected(where, f"argument `zero_copy`: {wanted}, got none")
            x = handle.combine_buffer
        if out is None:
            out = torch.empty(handle.routing.num_tokens, x.shape[-1], dtype=x.dtype, device=x.device)
        weights = topk_weights.masked_fill(is_left_out, 0)
        ep, members = handle.routing.ep, handle.members
        rows = x if members.is_whole else x[:, : ep.size * handle.max_tokens]
        with _waiting(members, combine_wait_recv_cost_stats):
            sent = ep.combine(rows, handle.routing, weights, out=out, split=return_recv_hook)
        handle.combined()
        if not return_recv_hook:
            return out, event_of(async_finish), None

        def hook() -> None:
            with _waiting(members, combine_wait_recv_cost_stats):
                sent.finish()

        return out, event_of(async_finish), hook

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Memory [local experts, size * max tokens, hidden] that the combine of this handle reads in place.

        Raises ConfigError before the rows of the handle's dispatch have arrived.
        """
        if handle.bound is None:
            wanted = "argument `handle`: wanted one whose receive hook was called, got one that was not"
            raise self._rejected("get_next_low_latency_combine_buffer", wanted)
        buffer = output_rows(handle.routing.ep, handle.routing, handle.bound, False)
        if not handle.members.is_whole:  # it has other rows
            buffer = buffer.new_empty(len(buffer), handle.num_rows, buffer.shape[2])
        handle.combine_buffer = buffer
        return buffer

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Does nothing: epcomm's modes share no memory."""

    def _quantizer(self, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> Float8 | None:
        if not use_fp8:
            return None
        if use_ue8m0 and not round_scale:
            text = "argument `round_scale`: wanted True with `use_ue8m0`, got False"
            raise self._rejected("low_latency_dispatch", text)
        return Float8(round_scales_to_power_of_two=round_scale, packed_ue8m0=use_ue8m0, scale_layout="column")


@contextmanager
def _waiting(members: Members, stats: torch.Tensor | None) -> Iterator[None]:
    """Adds to `stats`, if there are any, how long each rank is waited for."""
    before = None if stats is None else members.communicator.waited
    yield
    if stats is not None:
        waited = torch.tensor(members.communicator.waited) - torch.tensor(before)
        stats[list(members.ranks)] += waited.to(stats)


def _rows_for(handle: LowLatencyHandle, x: torch.Tensor, quantize: Float8 | None, expected: Any) -> Any:
    """What a dispatch of x returns: rows where they arrive, if that is known and has all that there are, or memory.

    Scales arrive row by row: column-major they have memory of their own.
    """
    num_experts = len(handle.routing.ep.local_expert_ids)
    codes, scales = (x, None) if quantize is None else quantize.result_like(x)
    if expected is not None and handle.members.is_whole:
        rows = expected.rows_in_block()[0]
    else:
        rows = torch.empty(num_experts, handle.num_rows, codes.shape[1], dtype=codes.dtype, device=x.device)
    if quantize is None or scales is None:
        return rows
    laid_out = quantize.delivered(scales.new_empty(num_experts, handle.num_rows, scales.shape[1]))
    return rows, torch.empty_strided(laid_out.shape, laid_out.stride(), dtype=scales.dtype, device=x.device)
