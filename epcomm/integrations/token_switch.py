"""torch's `TokenSwitch` (torch >= 2.14) on epcomm: routing once, then dispatch and combine, with torch's autograd."""

from __future__ import annotations

from typing import Any

import torch

from epcomm.errors import ConfigError, UnsupportedError
from epcomm.integrations.groups import handles_of
from epcomm.moe.expert_parallel import ExpertParallel

try:
    from torch.distributed._token_switch import Routing, TokenSwitch
except ImportError:  # an older torch: constructing one says so
    Routing, TokenSwitch = None, object


class TokenSwitchEpcomm(TokenSwitch):  # type: ignore[misc, valid-type]
    """A switch of flat layout: one row per token and rank, whatever number of that rank's experts it goes to.

    Collective: the constructor and all methods. Args are those of `TokenSwitchNCCL`:
        process_group: a `torch.distributed.ProcessGroup` of the ranks that experts are spread over, evenly.
        num_experts: of all ranks.
        max_dispatch_tokens_per_rank, max_recv_tokens_per_rank: limits of what a rank sends and receives.
        max_token_bytes: of a token's row.

    Raises UnsupportedError with an older torch; `ConfigError` and `CapacityError` as epcomm's own calls do.
    """

    def __init__(
        self,
        process_group: Any,
        num_experts: int,
        max_dispatch_tokens_per_rank: int,
        max_recv_tokens_per_rank: int,
        max_token_bytes: int,
    ):
        if Routing is None:
            raise UnsupportedError(
                f"TokenSwitchEpcomm: wanted torch >= 2.14, which has TokenSwitch, got {torch.__version__}"
            )
        self._comm = handles_of(process_group).comm
        self._max_recv_tokens_per_rank = max_recv_tokens_per_rank  # torch's backward pass reads it
        self._sizes: dict[str, Any] = dict(
            num_experts=num_experts,
            max_tokens=max_dispatch_tokens_per_rank,
            max_recv_rows=max_recv_tokens_per_rank,
            hidden=-(-max_token_bytes // 2),
            dtype=torch.bfloat16,
        )
        self._ep: ExpertParallel | None = None

    def create_routing(self, topk_idx: torch.Tensor, per_expert_token_counts: torch.Tensor | None = None) -> Any:
        """Where tokens go. The first one fixes how many experts a token has at most.

        Args:
            topk_idx: int64 [num_tokens, topk]: global numbers of experts, -1 for none.
            per_expert_token_counts: int32 [at least local experts], which gets how many tokens each will receive.
        """
        if self._ep is None:
            self._ep = self._comm.expert_parallel(topk=topk_idx.shape[1], layout="flat", **self._sizes)
        handle = self._ep.route(topk_idx)
        if per_expert_token_counts is not None:
            counts = handle.received_counts().sum(dim=0)
            per_expert_token_counts[: len(counts)] = counts
        return Routing(handle=handle, topk_idx=topk_idx)

    def _dispatch(
        self,
        routing: Any,
        tokens: torch.Tensor,
        topk_weights: torch.Tensor,
        out_tokens: torch.Tensor,
        out_topk_weights: torch.Tensor,
        out_topk_idx: torch.Tensor,
    ) -> None:
        """The rows, their weights and local experts (-1: another rank's, or no row) into the caller's tensors."""
        assert self._ep is not None
        received = self._ep.dispatch(tokens, routing.handle, topk_weights)
        num_rows = len(received.x)
        if num_rows > len(out_tokens):
            raise ConfigError(
                f"TokenSwitchEpcomm.dispatch: rank {self._comm.rank}: argument `out` or `max_recv_tokens`: wanted room "
                f"for {num_rows} rows, got {len(out_tokens)}"
            )
        out_tokens[:num_rows] = received.x
        out_topk_weights[:num_rows] = received.topk_weights
        out_topk_idx[:num_rows] = received.topk_idx
        out_topk_idx[num_rows:] = -1

    def _combine(self, routing: Any, expert_tokens: torch.Tensor, out_tokens: torch.Tensor) -> None:
        """The sums of a token's rows, into the caller's tensor."""
        assert self._ep is not None
        num_rows = routing.handle.rows_shape[0]
        self._ep.combine(expert_tokens[:num_rows], routing.handle, out=out_tokens)
