"""What adapters share: the communicator of a process group, and its expert-parallel handles, which layers share."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from epcomm.communicator import Communicator
from epcomm.initialize import init
from epcomm.moe.expert_parallel import ExpertParallel

_LEAST_TOKENS = 128  # that a growing handle has room for: below this a smaller one saves nothing worth having

_handles: weakref.WeakKeyDictionary[Any, Handles] = weakref.WeakKeyDictionary()


class Handles:
    """The handles of one process group's communicator. All ranks ask for the same ones in the same order.

    The layers of a model may share a handle: a routing keeps what its backward pass needs, and a result whose memory is
    lent is never overwritten.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._by_arguments: dict[tuple[tuple[str, Any], ...], ExpertParallel] = {}
        self._room: dict[tuple[tuple[str, Any], ...], int] = {}
        self._num_tokens = torch.zeros(1, dtype=torch.int64, device=comm.device)

    def handle(self, **arguments: Any) -> ExpertParallel:
        """Collective where it is new: the handle for arguments of `Communicator.expert_parallel`."""
        key = tuple(sorted(arguments.items()))
        handle = self._by_arguments.get(key)
        if handle is None:
            handle = self._by_arguments[key] = self.comm.expert_parallel(**arguments)
        return handle

    def for_batch(self, num_tokens: int, **arguments: Any) -> ExpertParallel:
        """Collective: a handle with room for as many tokens as any rank has in this batch.

        A batch that is larger than any before gets a handle of at least twice the size. The smaller one stays open,
        because a backward pass may still need it; all of them take less than twice the memory of the largest.
        """
        most = int(self.comm.allreduce(self._num_tokens.fill_(num_tokens), "max"))
        key = tuple(sorted(arguments.items()))
        room = max(self._room.get(key, _LEAST_TOKENS), 1 << (most - 1).bit_length() if most else 0)
        self._room[key] = room
        return self.handle(max_tokens=room, **arguments)


def handles_of(group: Any, device: Any = None) -> Handles:
    """Collective at the first call for a `torch.distributed.ProcessGroup`: its handles, on a communicator of its ranks.

    They live as long as the group.
    """
    handles = _handles.get(group)
    if handles is None or handles.comm.closed:
        handles = _handles[group] = Handles(init(group, device=device))
    return handles
