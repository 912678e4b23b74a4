"""What adapters share: the communicator of a process group, and expert-parallel handles that grow with the batch."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from epcomm.communicator import Communicator
from epcomm.initialize import init
from epcomm.moe.expert_parallel import ExpertParallel

_LEAST_TOKENS = 128  # of a handle; below this a handle of its own saves no memory worth having

_handles: weakref.WeakKeyDictionary[Any, Handles] = weakref.WeakKeyDictionary()


class Handles:
    """Collective throughout: the handles of one process group, by shape, made when a batch first needs them.

    The layers of a model share them: a routing keeps what its backward pass needs, and a result whose memory is lent
    is never overwritten. A batch that is larger than any before gets a handle of twice the size; the smaller one stays
    open, because a backward pass may still need it, which costs at most as much memory again.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._by_shape: dict[tuple[int, int, int, torch.dtype], tuple[int, ExpertParallel]] = {}
        self._most = torch.zeros(1, dtype=torch.int64)

    def of(self, num_tokens: int, *, num_experts: int, topk: int, hidden: int, dtype: torch.dtype) -> ExpertParallel:
        """Collective: a handle for as many tokens as any rank has (they may differ)."""
        most = int(self.comm.allreduce(self._most.fill_(num_tokens).to(self.comm.device), "max"))
        shape = (num_experts, topk, hidden, dtype)
        room, handle = self._by_shape.get(shape, (0, None))
        if handle is None or room < most:
            room = max(_LEAST_TOKENS, 1 << (most - 1).bit_length())
            handle = self.comm.expert_parallel(
                num_experts=num_experts, topk=topk, hidden=hidden, max_tokens=room, dtype=dtype
            )
            self._by_shape[shape] = room, handle
        return handle


def handles_of(group: Any, device: Any = None) -> Handles:
    """Collective at the first call for a `torch.distributed.ProcessGroup`: its handles, on a communicator of its ranks.

    They live as long as the group.
    """
    handles = _handles.get(group)
    if handles is None or handles.comm.closed:
        handles = _handles[group] = Handles(init(group, device=device))
    return handles
