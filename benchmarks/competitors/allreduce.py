"""Allreduce as people run it today: gloo in place on a tensor, MPI on prebuilt numpy buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def gloo_allreduce(tensor: torch.Tensor) -> Callable[[], Any]:
    """A call that sums `tensor` over the ranks of the default group, in place, its native form."""
    return lambda: dist.all_reduce(tensor)


def mpi_allreduce(communicator: Any, source: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    """A call that sums float32 `source` into `out` with everything about the buffers resolved beforehand."""
    from mpi4py import MPI

    if source.dtype != torch.float32:
        raise TypeError(f"MPI reduces no {source.dtype}")
    sent = [source.numpy(), source.numel(), MPI.FLOAT]
    received = [out.numpy(), out.numel(), MPI.FLOAT]
    call = communicator.Allreduce
    return lambda: call(sent, received)
