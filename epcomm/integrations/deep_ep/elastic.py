"""DeepEP's `ElasticBuffer`: one dispatch for all sizes, with rows per (token, rank) or per (token, expert).

These are epcomm's flat and contiguous layouts in throughput mode, with or without waiting for counts on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from epcomm.integrations.deep_ep.connection import ConnectedBuffer
from epcomm.integrations.deep_ep.events import EventHandle, EventOverlap, event_of, wait_for
from epcomm.integrations.deep_ep.handles import room_for
from epcomm.integrations.deep_ep.high_throughput import Bias, combine_with_bias
from epcomm.moe.checks import describe
from epcomm.moe.quantize.float8 import column_major

_SIZE_ALIGNMENT = 2 << 20


class EPHandle:
    """What `ElasticBuffer.dispatch` returns for `combine`, and for a later dispatch along the same routing.

    Attributes: what was asked for: ``do_expand``, ``num_experts``, ``expert_alignment``, ``num_max_tokens_per_rank``,
    ``num_sms``, ``topk_idx``; and what came:

    * ``psum_num_recv_tokens_per_scaleup_rank`` int32 [size]: where the tokens of each source rank end, each counted
      once.
    * ``psum_num_recv_tokens_per_expert`` int32 [local experts]: where the real rows of each expert end; without
      `do_expand` the same of selections, each count rounded up to `expert_alignment`.
    * ``num_unaligned_recv_tokens_per_expert`` int32 [local experts]: real rows, or selections.
    * ``num_recv_tokens_per_expert_list``: these on the host, rounded up; empty where the host didn't wait.
    * ``num_recv_tokens``, ``num_expanded_tokens``: received tokens, and rows; where the host didn't wait, those that
      there is room for.
    """

    def __init__(self, received: Any, topk_idx: torch.Tensor, expert_alignment: int, num_sms: int):
        self.routing, self.topk_idx = received.routing, topk_idx
        self.ep, config = received.ep, received.ep.config
        self.do_expand = config.layout == "contiguous"
        self.num_experts, self.num_max_tokens_per_rank = config.num_experts, config.max_tokens
        self.expert_alignment, self.num_sms = expert_alignment, num_sms
        tokens = self.routing.received_tokens().cumsum(dim=0)
        counts = received.expert_counts
        aligned = -(-counts // expert_alignment) * expert_alignment
        ends = aligned.cumsum(dim=0)
        self.psum_num_recv_tokens_per_scaleup_rank = tokens.int()
        self.psum_num_recv_tokens_per_expert = (ends - aligned + counts if self.do_expand else ends).int()
        self.num_unaligned_recv_tokens_per_expert = counts
        self.num_recv_tokens_per_expert_list: list[int] = aligned.tolist() if config.host_sync else []
        self.num_recv_tokens = int(tokens[-1]) if config.host_sync else config.most_arrivals
        self.num_expanded_tokens = self.routing.rows_shape[0] if self.do_expand else 0


class ElasticBuffer(ConnectedBuffer):
    """Dispatch and combine with the arguments and results of DeepEP's second version.

    Attributes: ``rank_idx``, ``num_ranks``, ``num_bytes``, ``num_max_tokens_per_rank``, ``num_scaleup_ranks`` (all),
    ``num_scaleout_ranks`` (1), ``num_rdma_ranks`` (nodes), ``num_nvlink_ranks`` (the first node's ranks).
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        device: Any = None,
    ):
        """Collective: see `ConnectedBuffer` for `group` and `device`.

        Args:
            num_max_tokens_per_rank: what dispatches have that don't say otherwise.
            allow_multiple_reduction: a token's expanded rows may be summed, and rounded, per rank first. The same on
                all ranks.

        The others are kept as attributes where clients look for them. Order and sums are always deterministic.
        """
        super().__init__(group, device=device)
        comm = self.communicator
        self.rank_idx, self.num_ranks = comm.rank, comm.size
        sizes = num_max_tokens_per_rank, hidden, num_topk
        self.num_bytes = self.get_buffer_size_hint(comm, *sizes) if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic, self.explicitly_destroy = deterministic, explicitly_destroy
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute, self.num_allocated_qps = prefer_overlap_with_compute, num_allocated_qps
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, comm.rank
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of a receive and an output block for rows of 16 bits from all ranks, in multiples of 2 MiB."""
        size = group.size() if callable(group.size) else group.size
        num_bytes = 2 * size * num_max_tokens_per_rank * (2 * hidden + 12 * num_topk)
        return -(-num_bytes // _SIZE_ALIGNMENT) * _SIZE_ALIGNMENT

    @staticmethod
    def capture() -> EventHandle:
        """An event of the current stream."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Collective: returns once every rank has called it."""
        self.communicator.barrier()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of the first one); ranks of a node share memory."""
        nodes = self.communicator.nodes
        return len(set(nodes)), nodes.count(nodes[0])

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(1, ranks): no rank forwards what others have sent."""
        return 1, self.communicator.size

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int, *bandwidths: Any, **more: Any) -> int:
        """How many multiprocessors (threads) an operation may keep busy, rounded up to an even number."""
        return -(-self.communicator.num_programs // 2) * 2

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """1: operations don't depend on queues."""
        return 1

    @torch.no_grad()
    def dispatch(
        self,
        x: Any,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Collective: sends each token once to each rank, or once to each expert.

        Args:
            x: [num_tokens, hidden] of any dtype, or a tuple (rows, scales).
            topk_idx, topk_weights: [num_tokens, topk]; `topk_idx` is None with `handle`.
            cumulative_local_expert_recv_stats: int32 [local experts], to which the counts are added.
            num_experts, num_max_tokens_per_rank, expert_alignment: the same on all ranks.
            handle: of an earlier dispatch, whose routing it takes.
            do_handle_copy: the handle has a copy of `topk_idx`.
            do_cpu_sync: whether the host waits to learn how many rows there are; default: yes. Without, there are
                always as many rows as there may be in the worst case.
            do_expand: rows per (token, expert), grouped by expert, each group padded with zero rows to a multiple of
                `expert_alignment` (so `do_zero_padding` is always done). The same as the handle's.
            use_tma_aligned_col_major_sf: scales are column-major, as `moe.quantize.float8.column_major` has them.

        Returns: rows like `x`, ordered by source rank and token (with `do_expand` by local expert first); indices
        [rows, topk] as local numbers, -1 for experts elsewhere and in rows past the last one (None with `do_expand`);
        weights float32 [rows, topk], 0 there ([rows] with `do_expand`), or None; a handle; an event.

        Raises ConfigError, CapacityError (more than `num_max_tokens_per_rank` tokens).
        """
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        if handle is None:
            most_tokens = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            alignment = 1 if expert_alignment is None else expert_alignment
            if topk_idx is None or num_experts is None:
                raise self._rejected("dispatch", "wanted `topk_idx` and `num_experts`, or `handle`, got none of them")
            ep = self._handles.handle(
                num_experts=num_experts, max_tokens=most_tokens, host_sync=do_cpu_sync is not False,
                **room_for(x, topk_idx.shape[1]), **self._layout(do_expand, alignment),
            )  # fmt: skip
            received = ep.dispatch(x, ep.route(topk_idx), topk_weights)
            num_sms = num_sms or self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
            handle = EPHandle(received, topk_idx.clone() if do_handle_copy else topk_idx, alignment, num_sms)
        else:
            self._check_cached(handle, topk_idx=topk_idx, do_cpu_sync=do_cpu_sync or None, num_experts=num_experts,
                               num_max_tokens_per_rank=num_max_tokens_per_rank, expert_alignment=expert_alignment,
                               do_expand=do_expand)  # fmt: skip
            received = handle.ep.dispatch(x, handle.routing, topk_weights)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats.add_(handle.num_unaligned_recv_tokens_per_expert)
        rows = received.x
        if use_tma_aligned_col_major_sf and isinstance(rows, tuple):
            rows = rows[0], column_major(rows[1])
        index = None if handle.do_expand else received.topk_idx
        return rows, index, received.topk_weights, handle, event_of(async_with_compute_stream)

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Collective: brings rows back and adds them up, without weights.

        Args:
            x: floats [rows, hidden], rows as they were received.
            handle: what `dispatch` returned.
            topk_weights: float32 [rows, topk] ([rows] of an expanded handle), which are brought back, too.
            bias: one or two tensors [num_tokens, hidden] of x's dtype to be added.

        Returns: [num_tokens, hidden] of x's dtype, summed in float32; weights float32 [num_tokens, topk], or None; an
        event.
        """
        wait_for(previous_event)
        wait_for(previous_event_before_epilogue)
        of_rows = None if handle.do_expand else topk_weights
        combined, weights = combine_with_bias(handle.ep, x, handle.routing, of_rows, bias)
        if handle.do_expand and topk_weights is not None:
            weights = handle.ep.combine(topk_weights[:, None], handle.routing, reduce=False)[..., 0]
        return combined, weights, event_of(async_with_compute_stream)

    def _layout(self, do_expand: bool, alignment: int) -> dict[str, Any]:
        """The part of a handle's options that says how rows lie and travel."""
        if not do_expand:
            return dict(layout="flat")
        wire = "auto" if self.allow_multiple_reduction else "expert"
        return dict(layout="contiguous", alignment=alignment, wire=wire)

    def _check_cached(self, handle: EPHandle, **given: Any) -> None:
        """What is given along with a handle must be what it was made with; what only a new one needs isn't given."""
        for name, value in given.items():
            wanted = None if name in ("topk_idx", "do_cpu_sync") else getattr(handle, name)
            if value is not None and (isinstance(value, torch.Tensor) or value != wanted):
                got = describe(value) if isinstance(value, torch.Tensor) else value
                raise self._rejected("dispatch", f"argument `{name}`: wanted {wanted} with this `handle`, got {got}")
