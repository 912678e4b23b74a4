"""What the heaps of NVSHMEM and NCCL have in common: segments, collective set-up, and which of them a transport is."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from epcomm.errors import ConfigError, UnsupportedError
from epcomm.heap.cuda import CudaMapping

T = TypeVar("T")

#: sends a payload to all ranks and returns everyone's, by rank
Exchange = Callable[[bytes], list[bytes]]

#: what a user can ask for; "auto" is a network only between machines
TRANSPORTS = ("auto", "peer_memory", "nvshmem", "gin")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class NetworkSegment:
    """A segment; ``bases`` holds 0 for ranks that load and store don't reach, ``handle`` is for the network's puts."""

    own: CudaMapping
    bases: np.ndarray
    handle: int
    multicast = 0  # see `cuda_symmetric`


class Network(Protocol):
    """The ranks of a communicator, as a network knows them."""

    name: str  # as in `device.gpu.network`
    context: int  # for `control.NETWORK`

    def segment(self, num_bytes: int) -> NetworkSegment:
        """Collective: a segment of zeros."""

    def prepare(self, module: int) -> None:
        """Called with each CUmodule that was loaded with kernels of this network, before their first launch."""

    def close(self) -> None:
        """Collective: gives everything back; no kernel may be running."""


class _Memory:
    """Device memory that torch hasn't allocated; a tensor on it keeps this, and with it its owner."""

    def __init__(self, address: int, num_bytes: int, owner: Any):
        self._owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


def zeroed(address: int, num_bytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """The bytes of a device allocation as a tensor, zeroed; `owner` lives as long as it."""
    memory = torch.as_tensor(_Memory(address, num_bytes, owner), device=device)
    memory.zero_()
    torch.cuda.current_stream(device).synchronize()
    return memory


def window_words(segment: NetworkSegment, raised: int = 0, num_lines: int = 0) -> list[int]:
    """The words that describe a segment to kernels; `raised` is the address of int64 [rank, num_lines] of zeros."""
    return [*map(int, segment.bases), segment.handle, raised, num_lines]


def agreed(what: str, exchange: Exchange, attempt: Callable[[], T]) -> T:
    """Collective: what `attempt` returns; UnsupportedError on all ranks, with the reason, if it fails on one."""
    result: T | None = None
    failure = ""
    try:
        result = attempt()
    except Exception as error:  # it isn't documented what the networks' bindings raise
        failure = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
    failures = [pickle.loads(payload) for payload in exchange(pickle.dumps(failure))]
    for rank, message in enumerate(failures):
        if message:
            raise UnsupportedError(f"{what}: rank {rank}: {message}")
    return result  # type: ignore[return-value]


def require_processes(what: str, exchange: Exchange) -> None:
    """Collective: raises unless each rank is a process of its own."""
    processes = exchange(pickle.dumps((_boot_id(), os.getpid())))
    if len(set(processes)) < len(processes):
        raise UnsupportedError(f"{what}: each rank must be a process of its own, got threads of one")


def connect(transport: str, rank: int, device: torch.device, exchange: Exchange) -> Network | None:
    """Collective: the network that a transport is, None for "peer_memory", and for "auto" if all ranks share a machine.

    Between machines "auto" is NCCL's GIN where all ranks have it, else NVSHMEM.
    """
    from epcomm.heap.nccl import NcclNetwork
    from epcomm.heap.nvshmem import NvshmemNetwork

    wanted, machines = zip(*map(pickle.loads, exchange(pickle.dumps((transport, _boot_id())))), strict=True)
    if len(set(wanted)) > 1:
        found = ", ".join(map(repr, sorted(set(wanted))))
        raise ConfigError(f"init: argument `transport`: wanted the same on all ranks, got {found}")
    if transport == "gin":
        return NcclNetwork(rank, device, exchange)
    if transport == "nvshmem":
        return NvshmemNetwork(rank, device, exchange)
    if transport == "peer_memory" or len(set(machines)) == 1:
        return None
    try:
        return NcclNetwork(rank, device, exchange)
    except UnsupportedError as reason:
        try:
            return NvshmemNetwork(rank, device, exchange)
        except UnsupportedError as other:
            raise UnsupportedError(f"init: the ranks are on several machines: {reason}; {other}") from None


def _boot_id() -> str:
    """Tells machines apart."""
    return _BOOT_ID.read_text(encoding="ascii").strip()
