"""torchtitan's expert parallelism through epcomm.

Activate it where a model is configured: ``--override.imports epcomm.integrations.torchtitan.token_dispatcher``. Written
for torchtitan 0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh
from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from epcomm.integrations.groups import Handles, handles_of


class EpcommTokenDispatcher(BaseEPTokenDispatcher):
    """Tokens to the experts' ranks and back; scores are applied where the token came from, in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        pass

    _handles: Handles | None = None  # without expert parallelism

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        """Collective: the ranks that experts are spread over; None: every rank has all of them."""
        super().wire_meshes(ep_mesh=ep_mesh)
        self._handles = None if ep_mesh is None else handles_of(ep_mesh.get_group(), ep_mesh.device_type)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Collective: rows by local expert, their numbers (int32 [local experts]), and what `combine` needs."""
        if self._handles is None:
            return LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        ep = self._handles.for_batch(
            len(x_TD), num_experts=self.num_experts, topk=self.top_k, hidden=x_TD.shape[1], dtype=x_TD.dtype
        )
        received = ep.dispatch(x_TD, ep.route(topk_expert_ids_TK, requires_grad=torch.is_grad_enabled()))
        return received.x, received.expert_counts, (received, topk_scores_TK.float())

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """Collective: [num_tokens, dim]: the sums of the experts' outputs times their scores."""
        if self._handles is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        received, scores = metadata
        return received.ep.combine(routed_output_RD, received, scores)


@override(target=BaseEPTokenDispatcher.Config, description="Dispatch and combine by epcomm")
def token_dispatcher(config: BaseEPTokenDispatcher.Config) -> EpcommTokenDispatcher.Config:
    """For ``override.imports``: any expert-parallel dispatcher becomes epcomm's."""
    return derive(config, EpcommTokenDispatcher.Config)
