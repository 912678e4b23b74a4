"""Weights of experts that are on several ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from epcomm.moe.placement import Placement


def copy_replicas(comm: Any, placement: Placement, experts: nn.Module) -> None:
    """Collective: all replicas of an expert get the weights of its first one.

    Parameters and buffers of `experts` are [local experts, ...], of the same shapes behind that on all ranks.
    """
    owner = placement.owner
    for expert, replicas in enumerate(placement.logical_to_physical.tolist()):
        if len(replicas) == 1 or replicas[1] < 0:
            continue
        held = placement.experts[comm.rank]
        for tensor in (*experts.parameters(), *experts.buffers()):
            values = tensor.detach()
            # every rank takes part in a broadcast; those without the expert let go of it
            weights = values[held.index(expert)] if expert in held else values.new_empty(values.shape[1:])
            comm.broadcast(weights, owner[replicas[0]], out=weights)
