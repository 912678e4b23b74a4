"""epcomm's handles behind a buffer. DeepEP's calls tell only as they come how many experts and slots there are."""

from __future__ import annotations

from typing import Any

import torch

from epcomm.communicator import Communicator
from epcomm.integrations.groups import Handles
from epcomm.moe.autograd import flat
from epcomm.moe.expert_parallel import ExpertParallel


class BufferHandles(Handles):
    """The handles of one buffer, made when a call of their kind comes for the first time."""

    def __init__(self, comm: Communicator):
        super().__init__(comm)
        self._lanes: list[BufferHandles] = [self]

    def unused(self, **arguments: Any) -> ExpertParallel:
        """Like `handle`, but another one while a split operation of the first is unfinished; any number may be."""
        for lane in self._lanes:
            ep = lane.handle(**arguments)
            if not ep.has_unfinished:
                return ep
        self._lanes.append(BufferHandles(self.comm))
        return self._lanes[-1].handle(**arguments)

    def close(self) -> None:
        """Collective: frees them all."""
        for lane in self._lanes:
            for ep in lane._by_arguments.values():
                ep.close()


def room_for(x: Any, topk: int) -> dict[str, Any]:
    """The arguments of a handle that say what a row may have: x, or 16 bits per column, and `topk` weights."""
    tensors = flat(x)
    moved = sum(tensor.shape[-1] * tensor.element_size() for tensor in tensors)
    return dict(topk=topk, hidden=max(moved, 2 * tensors[0].shape[-1]) + 4 * topk, dtype=torch.uint8)
