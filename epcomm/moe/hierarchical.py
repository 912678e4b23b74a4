"""Hierarchical dispatch and combine: a row goes once to each node with experts of its token, and is forwarded there.

Ranks are grouped into nodes. For each node a rank has one *carrier* there: the rank with the same number in its node
(its rail peer; on its own node it is itself). Two handles do all of it:

    route      rows by (token, node), to carriers; the carriers learn the tokens' experts, and route what they carry
    dispatch   to the carriers, in flat layout; from there to the experts, on the carriers' nodes only
    combine    from the experts to the carriers, weighted; from there to the tokens: a row per (token, node)

So between nodes a token crosses once per node, however many of its experts are there; with a gate that limits a token
to some nodes, that bounds what crosses. combine rounds twice: a node's sum to y's dtype, and the sum of those.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.moe.config import Config
from epcomm.moe.placement import Placement
from epcomm.moe.received import Received
from epcomm.moe.routing import Routing


class HierarchicalRouting:
    """Where the rows of `num_tokens` tokens go: to carriers (``first``), and from this carrier on (``second``)."""

    def __init__(self, ep: HierarchicalExpertParallel, first: Routing, second: Routing, origin: torch.Tensor):
        self.ep, self.first, self.second = ep, first, second
        self.num_tokens, self.topk, self.requires_grad = first.num_tokens, first.topk, first.requires_grad
        self.origin = origin  # int32 [..., 2]: source rank and source token of each received row, where there is one

    @property
    def send_counts(self) -> torch.Tensor:
        """int32 [size]: tokens that this rank sends to each carrier."""
        return self.first.send_counts[0]


class HierarchicalReceived:
    """What arrives at this rank's experts: the fields of `Received`. Rows are in the order of carriers, not sources."""

    def __init__(self, routing: HierarchicalRouting, carried: Received, delivered: Received, like: torch.Tensor | None):
        self.ep, self.routing, self.delivered, self._like = routing.ep, routing, delivered, like
        # combine needs no rows of what was carried, but the graph that they are part of
        self.carried = routing.first if carried.anchor is None else carried

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["delivered"], name)  # x, topk_idx, topk_weights, expert_counts, ...

    def output_buffer(self) -> Any:
        """See `Received.output_buffer`; ordinary memory if x was quantised."""
        if self._like is None:
            return self.delivered.output_buffer()
        rows = self.delivered.x[0]
        return torch.empty(rows.shape[:-1] + self._like.shape[-1:], dtype=self._like.dtype, device=rows.device)

    @cached_property
    def source_rank(self) -> torch.Tensor:
        """int32: each row's source rank; -1 where there is no row."""
        return torch.where(self.delivered.is_real, self.routing.origin[..., 0], -1)

    @cached_property
    def source_token(self) -> torch.Tensor:
        """int32: each row's token number on its source rank; -1 where there is no row."""
        return torch.where(self.delivered.is_real, self.routing.origin[..., 1], -1)


class HierarchicalExpertParallel:
    """`ExpertParallel` by way of carriers. Made by ``Communicator.expert_parallel(nodes=...)``; all ranks call alike.

    Attributes: ``nodes`` (of each rank), ``carriers`` (this rank's on the node of each rank), ``to_carriers`` and
    ``to_experts`` (the two handles), ``local_experts`` and ``local_expert_ids`` as in `ExpertParallel`.
    """

    def __init__(self, comm: Any, nodes: Sequence[int], options: dict[str, Any]):
        self.rank, self.size, self.nodes = comm.rank, comm.size, nodes
        members = {node: [rank for rank, of in enumerate(self.nodes) if of == node] for node in set(self.nodes)}
        number = members[self.nodes[self.rank]].index(self.rank)
        self.carriers = [members[node][number % len(members[node])] for node in self.nodes]
        carried = max(self._most_carried(members, rank) for rank in range(self.size)) * options["max_tokens"]
        bounds = _bounds(options, members, carried)
        self.to_experts = comm.expert_parallel(**{**options, "max_tokens": carried, **bounds})
        # to dispatch to a rank is to dispatch to an expert there; more experts than ranks, if a token has more slots
        targets = [*range(self.size), *[0] * (options["topk"] - self.size)]
        same = {name: options[name] for name in ("topk", "hidden", "max_tokens", "dtype", "blocks")}
        self.to_carriers = comm.expert_parallel(num_experts=len(targets), placement=targets, layout="flat", **same)
        self.local_experts, self.local_expert_ids = self.to_experts.local_experts, self.to_experts.local_expert_ids
        self.config = self.to_experts.config
        owner = torch.tensor(self.config.owner)
        self._carrier_of = torch.tensor(self.carriers)[owner].to(comm.device)  # of each expert
        self._is_on_node = (torch.tensor(self.nodes)[owner] == self.nodes[self.rank]).to(comm.device)

    def _most_carried(self, members: dict[int, list[int]], rank: int) -> int:
        """How many ranks have `rank` as a carrier."""
        own = members[self.nodes[rank]]
        return sum(
            own[ranks.index(source) % len(own)] == rank for ranks in members.values() for source in ranks
        )

    @property
    def placement(self) -> Placement:
        """Which experts are on which rank, by local number."""
        return self.to_experts.placement

    def memory(self) -> dict[str, int]:
        """Bytes of both handles' segments, by region."""
        return {
            f"{part}: {name}": num_bytes
            for part, ep in (("to carriers", self.to_carriers), ("to experts", self.to_experts))
            for name, num_bytes in ep.memory().items()
        }

    def close(self) -> None:
        """Collective: frees the handles. Idempotent."""
        self.to_carriers.close()
        self.to_experts.close()

    def route(self, topk_idx: torch.Tensor, *, requires_grad: bool = False) -> HierarchicalRouting:
        """Collective: see `ExpertParallel.route`."""
        index = self.to_experts.checked_indices(topk_idx)
        carriers = torch.where(index >= 0, self._carrier_of[index.clamp(min=0).long()], -1)
        with torch.no_grad():
            first = self.to_carriers.route(carriers, requires_grad=requires_grad)
            carried = self.to_carriers.dispatch((index.int(),), first, copy=True)
            experts = carried.x[0].long()
            is_here = (experts >= 0) & self._is_on_node[experts.clamp(min=0)]
            here = torch.where(is_here, experts, -1).to(index.dtype)
            second = self.to_experts.route(here, requires_grad=first.requires_grad)
            source = torch.stack([carried.source_rank, carried.source_token], dim=1)
            origin = self.to_experts.dispatch((source,), second, copy=True).x[0]
        return HierarchicalRouting(self, first, second, origin)

    def dispatch(
        self, x: Any, routing: HierarchicalRouting, topk_weights: torch.Tensor | None = None, *, quantize: Any = None
    ) -> HierarchicalReceived:
        """Collective: see `ExpertParallel.dispatch`. What crosses between nodes is quantised, too."""
        weights = self._at_carriers("dispatch", topk_weights, routing)
        carried = self.to_carriers.dispatch(x, routing.first, quantize=quantize)
        delivered = self.to_experts.dispatch(carried.x, routing.second, weights)
        if quantize is not None:
            rows, scales = delivered.x
            delivered.__dict__["x"] = rows, quantize.delivered(scales)
        return HierarchicalReceived(routing, carried, delivered, None if quantize is None else x)

    def combine(
        self,
        y: Any,
        received: HierarchicalReceived | HierarchicalRouting,
        topk_weights: torch.Tensor | None = None,
        *,
        bias: Any = None,
        out: Any = None,
    ) -> Any:
        """Collective: see `ExpertParallel.combine`."""
        routing: HierarchicalRouting
        delivered: Received | Routing
        carried: Received | Routing
        if isinstance(received, HierarchicalReceived):
            routing, delivered, carried = received.routing, received.delivered, received.carried
        else:
            routing, delivered, carried = received, received.second, received.first
        weights = self._at_carriers("combine", topk_weights, routing)
        sums = self.to_experts.combine(y, delivered, weights)
        return self.to_carriers.combine(sums, carried, bias=bias, out=out)

    def _at_carriers(self, operation: str, weights: Any, routing: HierarchicalRouting) -> torch.Tensor | None:
        """The weights of the tokens that this rank carries, float32 [rows, topk]."""
        if weights is None:
            return None
        checked = self.to_carriers.checked_weights(operation, weights, routing.first)
        return self.to_carriers.dispatch((checked,), routing.first).x[0]


def check_nodes(where: str, nodes: Any, config: Config) -> list[int]:
    """The node of each rank; `config` is of the handle that they are wanted for. Raises `ConfigError`."""
    try:
        checked = [operator.index(node) for node in nodes]
    except TypeError:
        checked = []
    if len(checked) != config.size:
        raise ConfigError(f"{where}: argument `nodes`: wanted a node per rank, {config.size} integers, got {nodes!r}")
    usual = {"mode": "throughput", "host_sync": True, "overflow": "raise", "track_load": False, "placement": None}
    for name, wanted in usual.items():
        got = getattr(config, name)
        if got != wanted:
            text = "a rank per expert" if name == "placement" else repr(wanted)
            raise ConfigError(f"{where}: argument `{name}`: wanted {text} with nodes, got {got!r}")
    return checked


def _bounds(options: dict[str, Any], members: dict[int, list[int]], carried: int) -> dict[str, int]:
    """Only the carriers of a node send there: the worst case is that of its ranks, not of all."""
    if options["max_recv_rows"] is not None or options["layout"] == "padded" or options["placement"] is not None:
        return {}
    rows = max(map(len, members.values())) * carried
    if options["layout"] != "flat":
        most_local = -(-options["num_experts"] // sum(map(len, members.values())))
        rows = rows * min(options["topk"], most_local) + most_local * (options["alignment"] - 1)
    return {"max_recv_rows": max(1, rows)}
