"""The arguments of `Communicator.expert_parallel`, validated, with what follows from them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.kernels.protocol import expert_parallel as protocol

LAYOUTS = {"contiguous": protocol.CONTIGUOUS, "padded": protocol.PADDED, "flat": protocol.FLAT}
_DEFAULT_LAYOUT = {"throughput": "contiguous", "latency": "padded"}
_MAX_BLOCKS = protocol.PAYLOAD_MASK
_MOST_ROWS = 1 << 31  # rows are numbered in 32 bits; byte offsets have 64


@dataclass(frozen=True)
class Config:
    """What all ranks must agree on. `owner[e]` is the rank of expert e."""

    size: int
    num_experts: int
    topk: int
    hidden: int
    max_tokens: int
    dtype: torch.dtype
    mode: str
    layout: str
    alignment: int
    owner: tuple[int, ...]
    max_recv_rows: int | None
    blocks: int

    @property
    def text(self) -> str:
        """Names every value that must agree."""
        placement = "" if self.owner == _even(self.num_experts, self.size) else f", placement={self.owner}"
        return (
            f"expert_parallel(num_experts={self.num_experts}, topk={self.topk}, hidden={self.hidden}, "
            f"max_tokens={self.max_tokens}, dtype={self.dtype}, mode={self.mode}, layout={self.layout}, "
            f"alignment={self.alignment}, max_recv_rows={self.max_recv_rows}, blocks={self.blocks}{placement})"
        )

    def experts_of(self, rank: int) -> list[int]:
        """Global ids of a rank's experts, by local number."""
        return [expert for expert, owner in enumerate(self.owner) if owner == rank]

    @property
    def capacity(self) -> int:
        """Rows of a receive block: the worst case, or `max_recv_rows`."""
        most_local = max(len(self.experts_of(rank)) for rank in range(self.size))
        if self.layout == "padded":
            return most_local * self.size * self.max_tokens
        if self.max_recv_rows is not None:
            return self.max_recv_rows
        if self.layout == "flat":
            return self.size * self.max_tokens
        return self.size * self.max_tokens * min(self.topk, most_local) + most_local * (self.alignment - 1)

    @property
    def balanced_rows(self) -> int:
        """Rows of a receive block under an even load."""
        tokens = self.max_tokens
        rows = tokens * min(self.size, self.topk) if self.layout == "flat" else tokens * self.topk
        return min(rows, self.capacity)


def _even(num_experts: int, size: int) -> tuple[int, ...]:
    """Contiguous blocks whose sizes differ by at most 1, the larger ones first."""
    each, more = divmod(num_experts, size)
    return tuple(rank for rank in range(size) for _ in range(each + (rank < more)))


def _integer(where: str, name: str, value: Any, least: int) -> int:
    """An integer of any type, numpy's included, that is >= `least`."""
    try:
        integer = operator.index(value)
    except TypeError:
        integer = least - 1
    if integer < least:
        raise ConfigError(f"{where}: argument `{name}`: wanted an integer >= {least}, got {value!r}")
    return integer


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
    placement: Sequence[int] | None,
    max_recv_rows: int | None,
    blocks: int,
) -> Config:
    """Validates; raises `ConfigError` naming argument, wanted and got."""
    num_experts = _integer(where, "num_experts", num_experts, 1)
    topk = _integer(where, "topk", topk, 1)
    hidden = _integer(where, "hidden", hidden, 1)
    max_tokens = _integer(where, "max_tokens", max_tokens, 0)
    alignment = _integer(where, "alignment", alignment, 1)
    blocks = _integer(where, "blocks", blocks, 1)
    if max_recv_rows is not None:
        max_recv_rows = _integer(where, "max_recv_rows", max_recv_rows, 1)
    if topk > num_experts:
        raise ConfigError(f"{where}: argument `topk`: wanted at most num_experts={num_experts}, got {topk}")
    if blocks > _MAX_BLOCKS:
        raise ConfigError(f"{where}: argument `blocks`: wanted at most {_MAX_BLOCKS}, got {blocks}")
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"{where}: argument `dtype`: wanted a torch dtype, got {dtype!r}")
    if mode not in _DEFAULT_LAYOUT:
        raise ConfigError(f"{where}: argument `mode`: wanted one of {tuple(_DEFAULT_LAYOUT)}, got {mode!r}")
    layout = layout or _DEFAULT_LAYOUT[mode]
    if layout not in LAYOUTS:
        raise ConfigError(f"{where}: argument `layout`: wanted one of {tuple(LAYOUTS)}, got {layout!r}")
    if alignment > 1 and layout != "contiguous":
        raise ConfigError(f"{where}: argument `alignment`: wanted 1 unless the layout is contiguous, got {alignment}")
    if placement is None:
        owner = _even(num_experts, size)
    else:
        try:
            owner = tuple(map(operator.index, placement))
        except TypeError:
            raise ConfigError(f"{where}: argument `placement`: wanted a rank per expert, got {placement!r}") from None
        if len(owner) != num_experts or not all(0 <= rank < size for rank in owner):
            raise ConfigError(
                f"{where}: argument `placement`: wanted {num_experts} ranks from 0 to {size - 1}, got {list(owner)}"
            )
    config = Config(
        size, num_experts, topk, hidden, max_tokens, dtype, mode, layout, alignment, owner, max_recv_rows, blocks
    )
    if config.capacity >= _MOST_ROWS:
        raise ConfigError(
            f"{where}: argument `max_tokens`: wanted fewer than {_MOST_ROWS} rows per receive block, got "
            f"{config.capacity}; a smaller max_recv_rows bounds them in the contiguous and flat layouts"
        )
    return config
