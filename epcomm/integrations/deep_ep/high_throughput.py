"""The high-throughput half of DeepEP's `Buffer`: one row per (token, rank), which is epcomm's flat layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epcomm.integrations.deep_ep.config import Config
from epcomm.integrations.deep_ep.connection import ConnectedBuffer
from epcomm.integrations.deep_ep.events import EventOverlap, event_of, wait_for
from epcomm.integrations.deep_ep.handles import room_for
from epcomm.moe.autograd import flat
from epcomm.moe.checks import describe
from epcomm.moe.config import even_owner

Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class DispatchHandle:
    """What `dispatch` returns for `combine`, and for a later dispatch along the same routing."""

    ep: Any
    routing: Any


class HighThroughput(ConnectedBuffer):
    """`get_dispatch_layout`, `dispatch` and `combine`."""

    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Local: how many tokens go where.

        Args:
            topk_idx: int32 or int64 [num_tokens, topk], -1 for no expert.
            num_experts: of all ranks; experts are placed in contiguous blocks, whose sizes may differ by 1.

        Returns: int32 [size] tokens for each rank; int32 tokens for each node (None where there is one); int32
        [num_experts] selections of each expert; bool [num_tokens, size], whether a token goes to a rank; an event.

        Raises ConfigError for what is no index.
        """
        comm = self.communicator
        wait_for(previous_event)
        if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64):
            wanted = "argument `topk_idx`: wanted int32 or int64 [num_tokens, topk]"
            raise self._rejected("get_dispatch_layout", f"{wanted}, got {describe(topk_idx)}")
        bad = (topk_idx < -1) | (topk_idx >= num_experts)
        if comm.device.type == "cpu" and bad.any():
            wanted = f"argument `topk_idx`: wanted -1 or 0 to {num_experts - 1}"
            raise self._rejected("get_dispatch_layout", f"{wanted}, got {topk_idx[bad][0].item()}")
        # one more than there are: -1 counts there
        owner = torch.tensor([*even_owner(num_experts, comm.size), comm.size], device=topk_idx.device)
        experts = topk_idx.long() % (num_experts + 1)
        is_token_in_rank = _marked(owner[experts], comm.size)
        per_node = None
        if len(set(comm.nodes)) > 1:
            nodes = torch.tensor([*comm.nodes, max(comm.nodes) + 1], device=topk_idx.device)
            per_node = _marked(nodes[owner[experts]], max(comm.nodes) + 1).sum(dim=0, dtype=torch.int32)
        per_expert = torch.bincount(experts.flatten(), minlength=num_experts + 1)[:-1].int()
        per_rank = is_token_in_rank.sum(dim=0, dtype=torch.int32)
        return per_rank, per_node, per_expert, is_token_in_rank, event_of(async_finish)

    @torch.no_grad()
    def dispatch(
        self,
        x: Any,
        handle: DispatchHandle | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, list[int] | None, DispatchHandle | None, EventOverlap]:
        """Collective: sends each token once to each rank that has experts of it.

        Args:
            x: [num_tokens, hidden] of any dtype, or a tuple (rows, scales).
            handle: of an earlier dispatch, whose routing it takes; what follows, up to `config`, is then not used.
            num_tokens_per_expert: as `get_dispatch_layout` returned it. Its length says how many experts there are.
            is_token_in_rank: likewise. It routes where there is no `topk_idx`, which else does.
            topk_idx, topk_weights: [num_tokens, topk]; delivered with the rows.
            expert_alignment: what the returned counts are rounded up to.
            num_worst_tokens: if not 0, how many rows are returned, whatever arrives, without waiting for counts. The
                same on all ranks.

        Returns: rows like `x` [rows, hidden], in the order of source rank and token; `topk_idx` [rows, topk] as local
        numbers, -1 for experts elsewhere (and in rows past the last one); weights float32 [rows, topk], 0 there; counts
        of selections per local expert (empty with `num_worst_tokens`); a handle; an event. With `handle`: rows, event,
        and None for the others.

        Raises ConfigError, CapacityError (more rows than `num_worst_tokens`).
        """
        wait_for(previous_event)
        if handle is not None:
            return handle.ep.dispatch(x, handle.routing).x, None, None, None, None, event_of(async_finish)
        if num_tokens_per_expert is None or is_token_in_rank is None:
            wanted = "wanted `num_tokens_per_expert` and `is_token_in_rank`, or `handle`, got none of them"
            raise self._rejected("dispatch", wanted)
        index, num_experts = topk_idx, len(num_tokens_per_expert)
        if index is None:  # to go to a rank is to go to an expert there
            num_experts = self.communicator.size
            index = torch.where(is_token_in_rank, torch.arange(num_experts, device=is_token_in_rank.device), -1)
        ep = self._flat(x, num_experts, index.shape[1], num_worst_tokens)
        received = ep.dispatch(x, ep.route(index), topk_weights)
        counts: list[int] = []
        if not num_worst_tokens:
            counts = received.expert_counts_list if topk_idx is not None else self._own_share(num_tokens_per_expert)
        aligned = [-(-count // expert_alignment) * expert_alignment for count in counts]
        local_idx = None if topk_idx is None else received.topk_idx
        made = DispatchHandle(ep, received.routing)
        return received.x, local_idx, received.topk_weights, aligned, made, event_of(async_finish)

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: DispatchHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Collective: brings rows back and adds them up, without weights.

        Args:
            x: floats [rows, hidden], a row for each that was received.
            handle: what `dispatch` returned.
            topk_weights: float32 [rows, topk], which are brought back and added up, too.
            bias: one or two tensors [num_tokens, hidden] of x's dtype to be added.

        Returns: [num_tokens, hidden] of x's dtype, summed in float32 (float64: in float64) and rounded once; the summed
        weights float32 [num_tokens, topk], or None; an event.
        """
        wait_for(previous_event)
        combined, weights = combine_with_bias(handle.ep, x, handle.routing, topk_weights, bias)
        return combined, weights, event_of(async_finish)

    def _flat(self, x: Any, num_experts: int, topk: int, num_worst_tokens: int) -> Any:
        """The handle for a dispatch that is not along an earlier routing."""
        arguments = dict(num_experts=num_experts, layout="flat", **room_for(x, topk))
        if num_worst_tokens:  # says all that has to be known, so nothing is exchanged
            most = dict(max_tokens=num_worst_tokens, max_recv_rows=num_worst_tokens, host_sync=False)
            return self._handles.handle(**arguments, **most)
        return self._handles.for_batch(len(flat(x)[0]), **arguments)

    def _own_share(self, num_tokens_per_expert: torch.Tensor) -> list[int]:
        """What all ranks have for this rank's experts."""
        comm = self.communicator
        return comm.allreduce(num_tokens_per_expert).tensor_split(comm.size)[comm.rank].tolist()


def combine_with_bias(
    ep: Any, x: torch.Tensor, routing: Any, topk_weights: torch.Tensor | None, bias: Bias
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x, and per-slot weights if there are any, summed; with up to two addends, it is still rounded once."""
    rows = (x,) if topk_weights is None else (x, topk_weights)
    if bias is None:
        combined = ep.combine(rows, routing)
    else:
        wide = torch.float64 if x.dtype is torch.float64 else torch.float32
        sums = [torch.empty(routing.num_tokens, row.shape[-1], dtype=wide, device=row.device) for row in rows]
        combined = list(ep.combine(rows, routing, out=tuple(sums)))
        for addend in flat(bias):
            combined[0] += addend
        combined[0] = combined[0].to(x.dtype)
    return combined[0], None if topk_weights is None else combined[1]


def _marked(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """bool [rows, size]: which of 0 to size - 1 are in each row of `numbers`, where `size` stands for none."""
    marks = torch.zeros(len(numbers), size + 1, dtype=torch.bool, device=numbers.device)
    return marks.scatter_(1, numbers, True)[:, :size]
