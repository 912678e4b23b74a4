"""Expert parallelism of Hugging Face transformers through epcomm.

After `register()`, models take it by name:

    AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(
        fsdp_size=world_size, ep_size=world_size, ep_implementation="epcomm"))

Written for transformers 5.24, whose registry of `EPImplementation`s this serves.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from epcomm.integrations.groups import handles_of


def register(name: str = "epcomm") -> None:
    """Makes `ep_implementation=name` mean epcomm in this process. All ranks of a model take the same one."""
    EPImplementationInterface.register(name, EpcommExperts)


class EpcommExperts(EPImplementation):
    """Tokens to the experts' ranks and back for one experts module, whose own forward runs on the rows that arrive.

    Batches may differ between ranks, and be empty. The ranks of a tensor-parallel group, which hold the same batch,
    take a share of it each. Routing weights are applied where the token came from, in float32.
    """

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Collective over the expert-parallel group.

        Args:
            hidden_states: [num_tokens, hidden].
            top_k_index: integers [num_tokens, topk]: global numbers of experts.
            top_k_weights: [num_tokens, topk].

        Returns [num_tokens, hidden]: the weighted sums of the experts' outputs.
        """
        num_tokens = len(hidden_states)
        if self.tp_mesh.size() > 1:
            hidden_states, top_k_index, top_k_weights = (
                DTensor.from_local(whole, self.tp_mesh, [Replicate()], run_check=False)
                .redistribute(self.tp_mesh, [Shard(0)])
                .to_local()
                for whole in (hidden_states, top_k_index, top_k_weights)
            )
        ep = handles_of(self.ep_mesh.get_group(), hidden_states.device).for_batch(
            len(hidden_states),
            num_experts=self.ep_mesh.size() * cast(int, self.num_local_experts),
            topk=top_k_index.shape[1],
            hidden=hidden_states.shape[1],
            dtype=hidden_states.dtype,
        )
        # a peer may have a backward pass where nothing here needs a gradient
        routing = ep.route(top_k_index, requires_grad=torch.is_grad_enabled())
        received = ep.dispatch(hidden_states, routing)
        outputs = self._apply_experts(received.x, received.topk_idx)
        mine = ep.combine(outputs, received, top_k_weights.float())
        if self.tp_mesh.size() == 1:
            return mine
        shape = torch.Size((num_tokens, mine.shape[1]))
        shares = DTensor.from_local(mine, self.tp_mesh, [Shard(0)], shape=shape, stride=(shape[1], 1))
        return shares.full_tensor()

    def _apply_experts(self, rows: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """The module's own forward, one expert per row and with no weights of its own.

        Without rows it runs on one of zeros, so that the experts' weights are part of the graph on all ranks, which
        FSDP's reductions count on.
        """
        num_rows = len(rows)
        if not num_rows:
            rows, expert = rows.sum(dim=0, keepdim=True), expert.new_zeros(1)
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return self.experts_forward(rows, expert[:, None].long(), ones)[:num_rows]
