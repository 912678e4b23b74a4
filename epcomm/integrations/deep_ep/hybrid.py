"""DeepEP's `HybridEPBuffer`: routing by a map of experts, and rows that arrive permuted for grouped matrix products.

A map [num_tokens, experts] of which expert takes which token is an index with as many slots as there are experts: slot
e is expert e, or none. So probabilities, which lie like the map, are the slots' weights.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from epcomm.integrations.deep_ep.connection import ConnectedBuffer
from epcomm.integrations.deep_ep.handles import room_for
from epcomm.moe.checks import describe

_TOKEN_BLOCK = 16  # tokens by which `max_num_of_tokens_per_rank` grows, as in DeepEP


class DispatchedHandle(NamedTuple):
    """What `HybridEPBuffer.dispatch` returns for `combine`, in the order of DeepEP's handle.

    ``num_dispatched_tokens_tensor`` int32 [1]: received tokens; ``local_expert_routing_map`` bool [rows, local
    experts]. What is None has no counterpart here.
    """

    routing: Any
    rdma_to_attn_map: None
    attn_to_rdma_map: None
    num_dispatched_tokens_tensor: torch.Tensor
    local_expert_routing_map: torch.Tensor
    num_of_tokens_per_rank: int
    config: None


class PermutedHandle(NamedTuple):
    """What `dispatch_with_permute` returns for `combine_with_unpermute`, in the order of DeepEP's handle.

    ``tokens_per_expert`` int32 [local experts]: real rows, as far as there was room; ``overflow_flag`` bool [1]:
    whether rows for this rank were dropped.
    """

    routing: Any
    rdma_to_attn_map: None
    attn_to_rdma_map: None
    num_dispatched_tokens_tensor: torch.Tensor
    local_expert_routing_map: None
    dense_chunk_layout: None
    dense_to_expert_map: None
    tokens_per_expert: torch.Tensor
    num_of_tokens_per_rank: int
    config: None
    overflow_flag: torch.Tensor


class HybridEPBuffer(ConnectedBuffer):
    """Dispatch and combine with the arguments and results of DeepEP's hybrid-ep branch.

    Attributes: ``rank``, ``group_size``, ``local_rank`` (in its node), ``node_rank``, ``num_of_nodes``.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
        device: Any = None,
    ):
        """Collective: see `ConnectedBuffer` for `group` and `device`.

        `max_num_of_tokens_per_rank` bounds the tokens of calls that are `non_blocking`; larger ones need as many tokens
        on all ranks. The other sizes follow from the calls; what names multiprocessors, blocks or links has no effect.
        """
        super().__init__(group, device=device)
        comm = self.communicator
        self.rank, self.group_size = comm.rank, comm.size
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        self.node_rank, self.num_of_nodes = comm.nodes[comm.rank], len(set(comm.nodes))
        self.local_rank = comm.nodes[: comm.rank].count(self.node_rank)

    def empty_jit_cache(self) -> None:
        """Does nothing: no kernel is this buffer's own."""

    @torch.no_grad()
    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: DispatchedHandle | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, DispatchedHandle]:
        """Collective: sends each token once to each rank that has experts of it.

        Args:
            hidden, scaling_factor: [num_tokens, hidden] of any dtype, and rows that travel along.
            routing_map, probs: bool and float32 [num_tokens, experts]; or topk_idx, topk_weights [num_tokens, topk]
                with `num_of_experts`.
            handle: of an earlier dispatch, whose routing it takes.

        Returns: rows in the order of source rank and token; probs float32 [rows, experts], 0 for experts elsewhere; the
        scaling factors' rows; a handle.
        """
        if handle is not None:
            routing = handle.routing
        else:
            index, probs = self._index("dispatch", routing_map, probs, topk_idx, topk_weights, num_of_experts)
            routing = self._fitting(hidden, scaling_factor, index, layout="flat").route(index)
        received = routing.ep.dispatch(_tensors(hidden, scaling_factor), routing, probs)
        if handle is None:
            tokens = routing.received_tokens().sum(dim=0, keepdim=True, dtype=torch.int32)
            here = received.topk_idx[:, routing.ep.local_expert_ids] >= 0
            handle = DispatchedHandle(routing, None, None, tokens, here, routing.num_tokens, None)
        return received.x[0], received.topk_weights, _scales(received.x), handle

    @torch.no_grad()
    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: DispatchedHandle | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Collective: brings rows back and adds them up: [num_tokens, hidden], and probs [num_tokens, experts]."""
        if handle is None:
            raise self._rejected("combine", "argument `handle`: wanted what dispatch returned, got None")
        combined = handle.routing.ep.combine(_tensors(hidden, probs), handle.routing)
        return combined[0], None if probs is None else combined[1]

    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: PermutedHandle | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, PermutedHandle]:
        """Collective: sends each token to each of its experts.

        Args:
            hidden, scaling_factor, routing_map, probs, topk_idx, topk_weights, num_of_experts: see `dispatch`.
            pad_multiple: each expert's rows are padded with zero rows to a multiple of this.
            handle: of an earlier dispatch, whose routing it takes.
            non_blocking: the host doesn't wait to learn how many rows there are. There are `num_permuted_tokens`, the
                same on all ranks, zeros behind the last one; what doesn't fit is dropped, and the handle's overflow
                flag set.

        Returns: rows grouped by local expert, ordered by source rank and token; probs float32 [rows], 0 for padding;
        the scaling factors' rows; int32 [local experts], how many rows each expert has, with padding; a handle.
        """
        if handle is not None:
            routing = handle.routing
        else:
            index, probs = self._index(
                "dispatch_with_permute", routing_map, probs, topk_idx, topk_weights, num_of_experts
            )
            layout = dict(layout="contiguous", alignment=pad_multiple or 1)
            if non_blocking or use_host_meta is False:
                ep = self._bounded(hidden, scaling_factor, index, num_permuted_tokens, **layout)
            else:
                ep = self._fitting(hidden, scaling_factor, index, **layout)
            routing = ep.route(index)
        received = routing.ep.dispatch(_tensors(hidden, scaling_factor), routing, probs)
        if handle is None:
            tokens = routing.received_tokens().sum(dim=0, keepdim=True, dtype=torch.int32)
            overflow = (received.own_rows_needed > routing.ep.row_limit)[None]
            handle = PermutedHandle(routing, None, None, tokens, None, None, None, received.expert_counts,
                                    routing.num_tokens, None, overflow)  # fmt: skip
        return received.x[0], received.topk_weights, _scales(received.x), received.expert_offsets.diff(), handle

    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: PermutedHandle | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Collective: brings rows [rows, hidden] back and adds them up: [num_tokens, hidden].

        `probs`, float32 [rows], come back as [num_tokens, experts], 0 where the map was False.
        """
        if handle is None:
            text = "argument `handle`: wanted what dispatch_with_permute returned, got None"
            raise self._rejected("combine_with_unpermute", text)
        ep, routing = handle.routing.ep, handle.routing
        combined = ep.combine(hidden, routing)
        if probs is None:
            return combined, None
        return combined, ep.combine(probs.reshape(-1, 1), routing, reduce=False)[..., 0]

    def _index(
        self, operation: str, routing_map: Any, probs: Any, topk_idx: Any, topk_weights: Any, num_of_experts: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int32 [num_tokens, experts]: in slot e it is e, or -1; and the probabilities of the slots."""
        if routing_map is None:
            if topk_idx is None or num_of_experts is None:
                wanted = "wanted `routing_map`, or `topk_idx` with `num_of_experts`, or `handle`"
                raise self._rejected(operation, f"{wanted}, got none of them")
            columns = torch.where(topk_idx >= 0, topk_idx, num_of_experts).long()  # one for what is no expert
            empty = torch.zeros(len(topk_idx), num_of_experts + 1, device=topk_idx.device)
            routing_map = empty.bool().scatter_(1, columns, True)[:, :-1]
            probs = None if topk_weights is None else empty.scatter_(1, columns, topk_weights.float())[:, :-1]
        if routing_map.dtype is not torch.bool or routing_map.dim() != 2:
            wanted = "argument `routing_map`: wanted bool [num_tokens, experts]"
            raise self._rejected(operation, f"{wanted}, got {describe(routing_map)}")
        experts = torch.arange(routing_map.shape[1], dtype=torch.int32, device=routing_map.device)
        return torch.where(routing_map, experts, -1), probs

    def _fitting(self, hidden: torch.Tensor, scales: Any, index: torch.Tensor, **layout: Any) -> Any:
        """Collective: a handle for the most tokens that any rank has now."""
        num_experts = index.shape[1]
        room = room_for(_tensors(hidden, scales), num_experts)
        return self._handles.for_batch(len(hidden), num_experts=num_experts, **room, **layout)

    def _bounded(self, hidden: torch.Tensor, scales: Any, index: torch.Tensor, num_rows: Any, **layout: Any) -> Any:
        """A handle for results of a fixed size, about which nothing is exchanged."""
        if num_rows is None or num_rows % layout["alignment"]:
            wanted = f"a multiple of pad_multiple={layout['alignment']} with `non_blocking`"
            text = f"argument `num_permuted_tokens`: wanted {wanted}, got {num_rows}"
            raise self._rejected("dispatch_with_permute", text)
        blocks = -(-max(self.max_num_of_tokens_per_rank, len(hidden)) // _TOKEN_BLOCK)
        num_experts = index.shape[1]
        return self._handles.handle(
            num_experts=num_experts, max_tokens=blocks * _TOKEN_BLOCK, host_sync=False, max_recv_rows=int(num_rows),
            overflow="drop", zero_tail=True, **room_for(_tensors(hidden, scales), num_experts), **layout,
        )  # fmt: skip


def _tensors(first: torch.Tensor, second: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return (first,) if second is None else (first, second)


def _scales(received: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
    return received[1] if len(received) > 1 else None
