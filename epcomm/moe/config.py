"""The arguments of `Communicator.expert_parallel`, validated, with what follows from them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.checks import check_integer
from epcomm.moe.placement import Placement
from epcomm.moe.wire import cheaper_wire

LAYOUTS = {"contiguous": protocol.CONTIGUOUS, "padded": protocol.PADDED, "flat": protocol.FLAT}
WIRES = ("expert", "rank")
_DEFAULT_LAYOUT = {"throughput": "contiguous", "latency": "padded"}
_MAX_BLOCKS = protocol.PAYLOAD_MASK
_MOST_ROWS = 1 << 31  # rows are numbered in 32 bits; byte offsets have 64


@dataclass(frozen=True)
class Config:
    """What all ranks must agree on. Experts that the router knows are logical; each is one or more physical ones."""

    size: int
    num_experts: int
    topk: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    mode: str
    layout: str
    alignment: int
    owner: tuple[int, ...]  # the rank of each physical expert
    placement: Placement | None  # where physical numbers aren't the logical ones
    max_recv_rows: int | None
    blocks: int
    wire: str  # "expert" or "rank"
    host_sync: bool  # the host waits for what only the device knows: how many rows there are
    graph_blocks: int
    overflow: str  # "raise" or "drop"
    zero_tail: bool
    track_load: bool
    capacity: int = 0  # rows of a receive block: the worst case of the handle's first placement, or `max_recv_rows`
    most_physical: int = 0  # physical experts that its memory has room for

    @property
    def text(self) -> str:
        """Names every value that must agree."""
        is_even = self.placement is None and self.owner == even_owner(self.num_experts, self.size)
        placement = "" if is_even else f", placement={self.placement_text}"
        load = ", track_load=True" if self.track_load else ""
        return (
            f"expert_parallel(num_experts={self.num_experts}, topk={self.topk}, hidden={self.hidden}, "
            f"max_tokens={self.max_tokens}, dtype={self.dtype}, mode={self.mode}, layout={self.layout}, "
            f"alignment={self.alignment}, max_recv_rows={self.max_recv_rows}, blocks={self.blocks}, "
            f"wire={self.wire}, host_sync={self.host_sync}, graph_blocks={self.graph_blocks}, "
            f"overflow={self.overflow}, zero_tail={self.zero_tail}{load}{placement})"
        )

    @property
    def placement_text(self) -> str:
        """Tells the placement from any other."""
        return str(self.owner) if self.placement is None else self.placement.text

    @property
    def num_physical(self) -> int:
        """Physical experts on all ranks: what kernels number, and counts are of."""
        return len(self.owner)

    def physical_of(self, rank: int) -> list[int]:
        """Physical ids of a rank's experts, by local number."""
        return [expert for expert, owner in enumerate(self.owner) if owner == rank]

    def experts_of(self, rank: int) -> list[int]:
        """Logical ids of a rank's experts, by local number."""
        return self.physical_of(rank) if self.placement is None else list(self.placement.experts[rank])

    def with_placement(self, where: str, placement: Any) -> Config:
        """The same with another placement, for the same memory; `ConfigError` if it doesn't fit in there."""
        if placement is None:
            raise ConfigError(f"{where}: argument `placement`: wanted a Placement or a rank per expert, got None")
        owner, mapped = _placed(where, placement, self.num_experts, self.size)
        config = replace(self, owner=owner, placement=mapped)
        if config.num_physical > self.most_physical:
            raise ConfigError(
                f"{where}: argument `placement`: wanted at most {self.most_physical} physical experts, as the handle "
                f"was made for, got {config.num_physical}; make the handle with a placement that has as many"
            )
        if config._worst_rows > self.capacity:
            advice = "" if self.layout == "padded" else f", or with max_recv_rows={config._worst_rows}"
            raise ConfigError(
                f"{where}: argument `placement`: wanted at most the {self.capacity} rows per rank that the handle was "
                f"made for, got {config._worst_rows} (with {config._most_local} experts on a rank); make the handle "
                f"with a placement that has as many on a rank{advice}"
            )
        return config

    @property
    def _most_local(self) -> int:
        return max(Counter(self.owner).values())

    @property
    def _worst_rows(self) -> int:
        """Rows that a receive block needs with this placement."""
        most_local = self._most_local
        if self.layout == "padded":
            return most_local * self.size * self.max_tokens
        if self.max_recv_rows is not None:
            return self.max_recv_rows
        if self.layout == "flat":
            return self.most_arrivals
        # a token names different logical experts, or one row serves its slots; and a rank's experts differ, too
        return self.size * self.max_tokens * min(self.topk, most_local) + most_local * (self.alignment - 1)

    @property
    def row_bytes(self) -> int:
        """What a row of all tensors together may have. Weights and their gradients travel, too: one per row or slot."""
        weights = 4 * self.topk if self.layout == "flat" else 8
        return max(self.hidden * self.dtype.itemsize, weights)

    @property
    def has_fixed_rows(self) -> bool:
        """The shape of what is received doesn't depend on the routing."""
        return self.layout == "padded" or not self.host_sync

    @property
    def tail(self) -> str:
        """What the rows past the last one are, where the shape has such: "marked" or "zero"."""
        if self.layout == "padded" or self.host_sync:
            return ""
        return "zero" if self.zero_tail else "marked"

    @property
    def is_by_rank(self) -> bool:
        """Rows travel once per (token, rank)."""
        return self.wire == "rank"

    @property
    def is_expanded(self) -> bool:
        """Rows that travel by rank are copied to their experts' places where they arrive."""
        return self.is_by_rank and self.layout != "flat"

    @property
    def most_arrivals(self) -> int:
        """Rows that can reach a rank if they travel once per (token, rank)."""
        return self.size * self.max_tokens

    def rows_between_nodes(self, nodes: Sequence[int]) -> tuple[int, int]:
        """The most rows that any rank sends to other nodes, and that come back from there."""
        by_rank = self.max_tokens * min(self.topk, self.size - min(Counter(nodes).values()))
        by_expert = self.max_tokens * self.topk
        return by_rank if self.is_by_rank else by_expert, by_rank if self.layout == "flat" else by_expert

    @property
    def balanced_rows(self) -> int:
        """Rows of a receive block under an even load."""
        tokens = self.max_tokens
        rows = tokens * min(self.size, self.topk) if self.layout == "flat" else tokens * self.topk
        return min(rows, self.capacity)


def even_owner(num_experts: int, size: int) -> tuple[int, ...]:
    """The rank of each expert by default: contiguous blocks whose sizes differ by at most 1, the larger ones first."""
    each, more = divmod(num_experts, size)
    return tuple(rank for rank in range(size) for _ in range(each + (rank < more)))


def _placed(where: str, placement: Any, num_experts: int, size: int) -> tuple[tuple[int, ...], Placement | None]:
    """(the rank of each physical expert, the placement if it takes one to find a logical expert)."""
    if isinstance(placement, Placement):
        for name, wanted, got in (
            ("num_experts", num_experts, placement.num_experts),
            ("size", size, placement.size),
        ):
            if wanted != got:
                raise ConfigError(f"{where}: argument `placement`: wanted one with {name}={wanted}, got {name}={got}")
        return placement.owner, None if placement.is_identity else placement
    try:
        owner = tuple(map(operator.index, placement))
    except TypeError:
        raise ConfigError(
            f"{where}: argument `placement`: wanted a Placement or a rank per expert, got {placement!r}"
        ) from None
    if len(owner) != num_experts or not all(0 <= rank < size for rank in owner):
        raise ConfigError(
            f"{where}: argument `placement`: wanted {num_experts} ranks from 0 to {size - 1}, got {list(owner)}"
        )
    return owner, None


def make_config(
    where: str,
    size: int,
    *,
    num_experts: int,
    topk: int,
    hidden: int,
    max_tokens: int,
    dtype: torch.dtype,
    mode: str,
    layout: str | None,
    alignment: int,
    placement: Placement | Sequence[int] | None,
    max_recv_rows: int | None,
    blocks: int,
    wire: str,
    host_sync: bool | None,
    graph_blocks: int,
    overflow: str,
    zero_tail: bool,
    track_load: bool,
    link_speed: float,
) -> Config:
    """Validates; raises `ConfigError` naming argument, wanted and got."""
    num_experts = check_integer(where, "num_experts", num_experts, 1)
    topk = check_integer(where, "topk", topk, 1)
    hidden = check_integer(where, "hidden", hidden, 1)
    max_tokens = check_integer(where, "max_tokens", max_tokens, 0)
    alignment = check_integer(where, "alignment", alignment, 1)
    blocks = check_integer(where, "blocks", blocks, 1)
    graph_blocks = check_integer(where, "graph_blocks", graph_blocks, 1)
    if max_recv_rows is not None:
        max_recv_rows = check_integer(where, "max_recv_rows", max_recv_rows, 1)
    if topk > num_experts:
        raise ConfigError(f"{where}: argument `topk`: wanted at most num_experts={num_experts}, got {topk}")
    if blocks + graph_blocks > _MAX_BLOCKS:
        raise ConfigError(
            f"{where}: argument `blocks`: wanted at most {_MAX_BLOCKS} with graph_blocks={graph_blocks}, got {blocks}"
        )
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{where}: argument `dtype`: wanted a torch dtype, got {dtype!r}")
    if mode not in _DEFAULT_LAYOUT:
        raise ConfigError(f"{where}: argument `mode`: wanted one of {tuple(_DEFAULT_LAYOUT)}, got {mode!r}")
    layout = layout or _DEFAULT_LAYOUT[mode]
    if layout not in LAYOUTS:
        raise ConfigError(f"{where}: argument `layout`: wanted one of {tuple(LAYOUTS)}, got {layout!r}")
    if alignment > 1 and layout != "contiguous":
        raise ConfigError(f"{where}: argument `alignment`: wanted 1 unless the layout is contiguous, got {alignment}")
    owner, mapped = even_owner(num_experts, size), None
    if placement is not None:
        owner, mapped = _placed(where, placement, num_experts, size)
    if wire not in ("auto", *WIRES):
        raise ConfigError(f"{where}: argument `wire`: wanted 'auto' or one of {WIRES}, got {wire!r}")
    if layout == "flat":
        if wire == "expert":
            raise ConfigError(f"{where}: argument `wire`: wanted 'auto' or 'rank' in the flat layout, got 'expert'")
        wire = "rank"
    elif wire == "auto":
        # what a row's detour costs is time that latency mode doesn't have
        wire = "expert" if mode == "latency" else cheaper_wire(size, len(owner), topk, owner, link_speed)
    if host_sync is None:
        host_sync = mode == "throughput" or layout != "padded"
    if not isinstance(host_sync, bool):
        raise ConfigError(f"{where}: argument `host_sync`: wanted None, True or False, got {host_sync!r}")
    if host_sync:
        graph_blocks = 0  # a captured call can't ask the device how many rows there are
    if overflow not in ("raise", "drop"):
        raise ConfigError(f"{where}: argument `overflow`: wanted 'raise' or 'drop', got {overflow!r}")
    if overflow == "drop" and layout == "padded":
        raise ConfigError(f"{where}: argument `overflow`: wanted 'raise' in the padded layout, got 'drop'")
    if zero_tail not in (True, False) or (zero_tail and (host_sync or layout == "padded")):
        raise ConfigError(
            f"{where}: argument `zero_tail`: wanted True only with host_sync=False and not in the padded layout, got "
            f"{zero_tail!r}"
        )
    if track_load not in (True, False):
        raise ConfigError(f"{where}: argument `track_load`: wanted True or False, got {track_load!r}")
    config = Config(
        size, num_experts, topk, hidden, max_tokens, dtype, mode, layout, alignment, owner, mapped, max_recv_rows,
        blocks, wire, host_sync, graph_blocks, overflow, zero_tail, track_load,
    )  # fmt: skip
    config = replace(config, capacity=config._worst_rows, most_physical=config.num_physical)
    if config.capacity >= _MOST_ROWS:
        raise ConfigError(
            f"{where}: argument `max_tokens`: wanted fewer than {_MOST_ROWS} rows per receive block, got "
            f"{config.capacity}; a smaller max_recv_rows bounds them in the contiguous and flat layouts"
        )
    return config
