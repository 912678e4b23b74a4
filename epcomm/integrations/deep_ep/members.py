"""Which ranks take part in low-latency calls: all of a group, or those that are left when some have been masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from epcomm.communicator import Communicator
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.initialize import init
from epcomm.integrations.deep_ep.connection import ConnectedBuffer
from epcomm.integrations.deep_ep.handles import BufferHandles
from epcomm.moe.config import even_owner


@dataclass(frozen=True)
class Members:
    """Some of a group's ranks with a communicator of their own, and the experts that they have between them."""

    communicator: Communicator
    handles: BufferHandles
    ranks: Sequence[int]
    group_size: int

    @cached_property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.group_size

    def placement(self, num_experts: int) -> dict[str, Any]:
        """The options of a handle for the experts among `num_experts` that are left, numbered anew in their order."""
        if self.is_whole:
            return dict(num_experts=num_experts)
        owner = [self.ranks.index(rank) for rank in even_owner(num_experts, self.group_size) if rank in self.ranks]
        return dict(num_experts=len(owner), placement=tuple(owner))

    def index(self, topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
        """`topk_idx` in that numbering: -1 for experts that nobody has any more."""
        if self.is_whole:
            return topk_idx
        is_left = torch.tensor([rank in self.ranks for rank in even_owner(num_experts, self.group_size)] + [False])
        numbers = torch.where(is_left, is_left.cumsum(dim=0) - 1, -1).to(topk_idx)
        return numbers[topk_idx.long()]


class Membership:
    """The masks of a group, and the `Members` that they leave, connected when they are first needed."""

    def __init__(self, group: Any, communicator: Communicator, handles: BufferHandles):
        self._group, self._device = group, communicator.device
        self._size, self._rank = communicator.size, communicator.rank
        everyone = tuple(range(self._size))
        self._known = {everyone: Members(communicator, handles, everyone, self._size)}
        self.masked: frozenset[int] = frozenset()

    def require_maskable(self, where: str) -> None:
        """Raises UnsupportedError if ranks that are left would have no way to meet."""
        if not hasattr(self._group, "get_group_store"):
            wanted = "wanted a buffer of a torch.distributed process group, through whose store ranks meet"
            raise UnsupportedError(f"{where}: {wanted}, got {type(self._group).__name__}")

    def current(self) -> Members:
        """Collective among the ranks that are not masked, the first time that these are left."""
        ranks = tuple(rank for rank in range(self._size) if rank not in self.masked)
        found = self._known.get(ranks)
        if found is None or found.communicator.closed:
            name = "epcomm/deep_ep/" + "-".join(map(str, ranks))
            store = dist.PrefixStore(name, self._group.get_group_store())
            place = ranks.index(self._rank)
            made = init(store=store, rank=place, world_size=len(ranks), device=self._device)
            found = self._known[ranks] = Members(made, BufferHandles(made), ranks, self._size)
        return found

    def close(self) -> None:
        """Collective among the ranks that are not masked: frees what they have used without the others."""
        members = self.current()
        if not members.is_whole:
            members.communicator.close()


class MaskableBuffer(ConnectedBuffer):
    """A buffer whose low-latency calls can go on without some ranks, if it was made with ``enable_shrink``.

    From the next call on those that are left have a communicator of their own. All of them mask the same ranks, between
    the same calls. What masked ranks would send, and their experts, are left out; shapes stay. A rank that died is not
    masked by itself: calls raise `PeerLostError`, which names it, and whoever catches that may mask it and go on.
    """

    def __init__(self, group: Any, comm: Any, device: Any, enable_shrink: bool):
        super().__init__(group, comm, device)
        self.enable_shrink = enable_shrink
        self._membership = Membership(group, self.communicator, self._handles)

    def destroy(self) -> None:
        """Collective among the ranks that are not masked: frees the buffer's memory. What was received stays valid."""
        self._membership.close()
        if not self._membership.masked:
            super().destroy()

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Local: from the next low-latency call on, `rank_to_mask` takes part in them, or with `mask` it doesn't."""
        where = "low_latency_update_mask_buffer"
        self._require_shrink(where)
        if not 0 <= rank_to_mask < self.communicator.size or (mask and rank_to_mask == self.communicator.rank):
            wanted = f"argument `rank_to_mask`: wanted another rank of {self.communicator.size}"
            raise ConfigError(f"rank {self.communicator.rank}: {where}: {wanted}, got {rank_to_mask}")
        others = self._membership.masked - {rank_to_mask}
        self._membership.masked = others | {rank_to_mask} if mask else others

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Local: writes 1 for each masked rank, and 0 for the others, to int32 [size]."""
        self._require_shrink("low_latency_query_mask_buffer")
        mask_status.zero_()
        mask_status[list(self._membership.masked)] = 1

    def low_latency_clean_mask_buffer(self) -> None:
        """Local: masks no rank any more."""
        self._require_shrink("low_latency_clean_mask_buffer")
        self._membership.masked = frozenset()

    def _require_shrink(self, operation: str) -> None:
        where = f"rank {self.communicator.rank}: {operation}"
        if not self.enable_shrink:
            raise ConfigError(f"{where}: wanted a buffer made with enable_shrink=True, got enable_shrink=False")
        self._membership.require_maskable(where)
