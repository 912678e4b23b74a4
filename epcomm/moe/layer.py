"""An expert-parallel MoE layer: router, dispatch, this rank's experts, combine, and a shared expert if there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from epcomm.errors import ConfigError
from epcomm.moe.checks import describe
from epcomm.moe.experts import Activation, Experts, grouped_mm_works
from epcomm.moe.received import Received
from epcomm.moe.replicas import copy_replicas
from epcomm.moe.router import Router, check_sizes, settings_of
from epcomm.moe.state_dict import DenseBlock

LAYOUTS = (None, "contiguous", "padded")


class MoELayer(nn.Module):
    """What a dense MoE block computes, with its experts spread over the ranks of a communicator.

    Construction and forward are collective: all ranks call them alike, with as many tokens as each has, or none.
    Router and shared expert are the same on all ranks (a new layer gets those of rank 0); whoever trains them has to
    average their gradients over the ranks, as for any replicated parameter. Experts belong to one rank each, and their
    gradients are sums over the tokens of all ranks already: don't average those over these ranks. (If the placement has
    replicas of an expert, each has the gradient of the tokens that it got: add those up.)

    Args:
        comm: the `Communicator`. The layer makes an expert-parallel handle on it; `close` frees that.
        hidden, intermediate, num_experts, topk: sizes; intermediate is that of one expert.
        max_tokens: per rank and call.
        dtype: of tokens and weights. A router whose model computes its logits in float32 keeps its weight in that.
        router: a model whose routing is wanted (`epcomm.moe.router.MODELS`), or settings of `Router`, such as
            ``{**MODELS["deepseek_v3"], "num_groups": 4, "topk_groups": 2}``.
        activation, expert_bias: see `Experts`; gpt-oss has "clamped_swiglu" and True.
        shared_intermediate: of the expert that every token goes to; 0: there is none. It has no bias.
        shared_gate: the shared expert's output is multiplied by ``sigmoid(shared_gate(x))``, as in Qwen's models.
        weights_on_input: the routing weight multiplies the expert's input instead of its output, as in Llama 4; topk=1.
        device: of the weights: "meta" for weights that come later; default: the communicator's.
        handle: further arguments of `Communicator.expert_parallel`: mode (latency is for decoding), layout (contiguous
            or padded), placement, wire, nodes, ...

    Attributes: ``ep`` (the handle), ``router``, ``experts``, ``shared_expert`` and ``shared_gate`` (or None).

    Raises:
        ConfigError: an argument is wrong; the peers raise `PeerFailedError`.
        MismatchError: ranks passed different ones.
    """

    def __init__(
        self,
        comm: Any,
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        max_tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        router: str | Mapping[str, Any] = "mixtral",
        activation: str | Activation = "silu",
        expert_bias: bool = False,
        shared_intermediate: int = 0,
        shared_gate: bool = False,
        weights_on_input: bool = False,
        device: Any = None,
        **handle: Any,
    ):
        super().__init__()
        self._comm, self.hidden, self.dtype, self.weights_on_input = comm, hidden, dtype, weights_on_input
        made: dict[str, Any] = dict(dtype=dtype, device=comm.device if device is None else torch.device(device))
        with _peers_learn(comm):
            _check(intermediate, topk, handle.get("layout"), shared_intermediate, shared_gate, weights_on_input)
            grouped_mm_works(dtype, comm.device)  # where weights will be that come later
            settings = settings_of(router)
            router_dtype = torch.promote_types(dtype, torch.float32) if settings.get("float32_logits") else dtype
            self.router = Router(hidden, num_experts, topk, **{**made, "dtype": router_dtype, **settings})
            self.shared_expert = self.shared_gate = None
            if shared_intermediate:
                self.shared_expert = Experts(1, hidden, shared_intermediate, activation=activation, **made)
            if shared_gate:
                self.shared_gate = nn.Linear(hidden, 1, bias=False, **made)
        sizes: dict[str, Any] = dict(num_experts=num_experts, topk=topk, hidden=hidden, max_tokens=max_tokens)
        self.ep = comm.expert_parallel(**sizes, dtype=dtype, **handle)
        num_local = len(self.ep.local_expert_ids)
        with _peers_learn(comm):
            self.experts = Experts(num_local, hidden, intermediate, activation=activation, bias=expert_bias, **made)
        if made["device"].type != "meta" and comm.size > 1:
            for tensor in self._replicated():
                comm.broadcast(tensor, out=tensor)
            copy_replicas(comm, self.ep.placement, self.experts)

    @classmethod
    def from_state_dict(
        cls,
        comm: Any,
        state_dict: Mapping[str, torch.Tensor],
        *,
        topk: int,
        max_tokens: int,
        router: str | Mapping[str, Any],
        prefix: str = "",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> MoELayer:
        """Collective: the layer of a dense block's weights; each rank takes its experts out of them.

        Args:
            state_dict, prefix: see `epcomm.moe.state_dict.DenseBlock`. A rank needs router, shared expert and its own
                experts; sizes, biases, shared expert and its gate are what is found there.
            dtype: default: that of the experts in the state dict.
            options: further ones of `MoELayer`: activation, weights_on_input, mode, placement, ...

        Raises:
            ConfigError: something is missing, or has another shape: the message names it. The peers raise
                `PeerFailedError`.
        """
        with _peers_learn(comm):
            block = DenseBlock(state_dict, prefix)
            found: dict[str, Any] = dict(
                hidden=block.hidden,
                intermediate=block.intermediate,
                num_experts=block.num_experts,
                dtype=dtype or block.dtype,
                expert_bias=block.has_expert_bias,
                shared_intermediate=block.shared_intermediate,
                shared_gate=block.has_shared_gate,
            )
        layer = cls(comm, topk=topk, max_tokens=max_tokens, router=router, device="meta", **found, **options)
        with _peers_learn(comm):
            layer._load(block)
        comm.barrier()  # a peer that misses a weight of its own is heard of here, not in the first forward
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Collective: the layer's output for this rank's tokens.

        Args:
            x: [..., hidden] of the layer's dtype, up to max_tokens tokens; 0 are possible.

        Returns: like x.

        Raises:
            ConfigError, CapacityError: x is wrong; the peers raise `PeerFailedError`.
            CapacityError: some rank would receive more than `max_recv_rows`.
        """
        with _peers_learn(self._comm):
            self._check_tokens(x)
        tokens = x.reshape(-1, self.hidden)
        topk_idx, weights = self.router(tokens)
        # whatever this rank's tokens and weights need: a peer may have a backward pass
        routing = self.ep.route(topk_idx, requires_grad=torch.is_grad_enabled())
        if self.weights_on_input:
            received = self.ep.dispatch(tokens * weights.to(tokens.dtype), routing)
            out = self.ep.combine(self._apply_experts(received), received)
        else:
            received = self.ep.dispatch(tokens, routing)
            out = self.ep.combine(self._apply_experts(received), received, weights)
        if self.shared_expert is not None:
            out = out + self._shared(tokens)
        return out.reshape(x.shape)

    def close(self) -> None:
        """Collective: frees the handle. Idempotent."""
        self.ep.close()

    # ---- details

    def _apply_experts(self, received: Received) -> torch.Tensor:
        """The experts' outputs for the received rows, where it can be in memory that combine reads in place."""
        rows = received.x
        out = received.output_buffer() if self.experts.takes_out(rows) else None
        if rows.dim() == 3:
            return self.experts(rows, expert_counts=received.expert_counts_list, out=out)
        return self.experts(rows, received.expert_offsets, out=out)

    def _shared(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None
        result = self.shared_expert(tokens, [0, len(tokens)])
        return result if self.shared_gate is None else torch.sigmoid(self.shared_gate(tokens)) * result

    def _replicated(self) -> Iterator[torch.Tensor]:
        for module in (self.router, self.shared_expert, self.shared_gate):
            if module is not None:
                yield from (tensor.detach() for tensor in (*module.parameters(), *module.buffers()))

    def _load(self, block: DenseBlock) -> None:
        """Takes the weights that this rank needs; parameters become these tensors, nothing is copied twice."""
        to = dict(dtype=self.dtype, device=self._comm.device)
        gate, own = block.router(), self.router.state_dict()
        for name, setting, key in (
            ("bias", "logits_bias", "gate.bias"),
            ("correction_bias", "correction_bias", "gate.e_score_correction_bias"),
        ):
            if (name in gate) != (name in own):
                has = "has" if name in gate else "lacks"
                raise ConfigError(
                    f"MoELayer: argument `router`: wanted {setting}={name in gate}, as the state dict {has} "
                    f"`{block.prefix}{key}`, got {name in own}"
                )
        parts = {
            "router": {
                name: tensor.to(dtype=own[name].dtype, device=to["device"], copy=True) for name, tensor in gate.items()
            },
            "experts": block.experts(self.ep.local_expert_ids, **to),
            "shared_expert": block.shared_expert(**to),
            "shared_gate": block.shared_gate(**to),
        }
        tensors = {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}
        self.load_state_dict(tensors, assign=True)

    def _check_tokens(self, x: Any) -> None:
        device = self.experts.gate_up_proj.device
        if (
            not isinstance(x, torch.Tensor)
            or x.dim() == 0
            or x.shape[-1] != self.hidden
            or x.dtype != self.dtype
            or x.device != device
        ):
            wanted = f"[..., {self.hidden}] of {self.dtype} on {device}"
            raise ConfigError(f"MoELayer: argument `x`: wanted {wanted}, got {describe(x)}")


@contextmanager
def _peers_learn(comm: Any) -> Iterator[None]:
    """Fails the communicator if an argument is wrong, so that peers, who may already be waiting, raise too."""
    try:
        yield
    except ConfigError as error:
        named = ConfigError(f"rank {comm.rank}: {error}")
        if comm.size > 1:
            comm.abort(f"{type(named).__name__}: {named}")
        raise named from error


def _check(
    intermediate: int, topk: int, layout: str | None, shared_intermediate: int, shared_gate: bool, on_input: bool
) -> None:
    check_sizes("MoELayer", intermediate=intermediate)
    if type(shared_intermediate) is not int or shared_intermediate < 0:
        wanted = "an integer >= 0"
        raise ConfigError(f"MoELayer: argument `shared_intermediate`: wanted {wanted}, got {shared_intermediate!r}")
    if layout not in LAYOUTS:
        raise ConfigError(f"MoELayer: argument `layout`: wanted one of {LAYOUTS}, got {layout!r}")
    if shared_gate and not shared_intermediate:
        raise ConfigError("MoELayer: argument `shared_gate`: wanted False without a shared expert, got True")
    if on_input and topk != 1:
        raise ConfigError(f"MoELayer: argument `weights_on_input`: wanted topk=1 with it, got topk={topk}")
