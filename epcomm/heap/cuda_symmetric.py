"""CUDA segments made by torch's symmetric memory, which NVLink's switch can multicast to. HAS NOT BEEN RUN YET.

It is written from the sources of torch 2.13 (`torch.distributed._symmetric_memory`), without a GPU. It is used where
each rank is a process with a GPU of its own; whatever torch refuses there, on any rank, all ranks fall back to
`CudaSegment`, which has no multicast address.
"""

from __future__ import annotations

import os
import pickle
import uuid
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from epcomm.heap.cuda import CudaMapping

_STORE_TIMEOUT = timedelta(seconds=60)  # a rank whose rendezvous failed is missed by its peers this long

#: sends a payload to all ranks and returns everyone's, by rank
Exchange = Callable[[bytes], list[bytes]]


class SymmetricCudaSegment:
    """Like `CudaSegment`; ``multicast`` is the address of all ranks' parts at once, 0 if there is none."""

    network = (0, 0, 0)

    def __init__(self, num_bytes: int, device: torch.device, group_name: str):
        from torch._C._distributed_c10d import _SymmetricMemory

        memory = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, group_name)
        memory.zero_()
        torch.cuda.synchronize(device)
        self._handle = _SymmetricMemory.rendezvous(memory, group_name)
        self.own = CudaMapping(memory)
        self.bases = np.array(self._handle.buffer_ptrs, dtype=np.int64)
        self.multicast: int = self._handle.multicast_ptr


class SymmetricGroup:
    """The ranks of a communicator, as torch's symmetric memory knows them. Collective to make.

    `is_one_gpu`: they share one.
    """

    def __init__(self, rank: int, device: torch.device, exchange: Exchange):
        self._device = device
        own = os.getpid(), str(torch.cuda.get_device_properties(device).uuid)
        processes, gpus = zip(*map(pickle.loads, exchange(pickle.dumps(own))), strict=True)
        self.is_one_gpu = len(set(gpus)) == 1
        self._is_usable = len(gpus) > 1 and len(set(processes)) == len(set(gpus)) == len(gpus)
        self._name = ""
        if self._is_usable:
            try:
                self._name = register_group(rank, len(gpus), exchange)
            except Exception as error:  # peers learn of it with the first segment
                _warn(error)

    def segment(self, num_bytes: int, exchange: Exchange) -> SymmetricCudaSegment | None:
        """Collective: a segment, or None on all ranks if one of them can't have it."""
        if not self._is_usable:
            return None
        found: SymmetricCudaSegment | None = None
        try:
            if self._name:
                found = SymmetricCudaSegment(num_bytes, self._device, self._name)
        except Exception as error:  # it isn't documented what torch raises
            _warn(error)
        own = None if found is None else found.multicast != 0
        outcomes = [pickle.loads(outcome) for outcome in exchange(pickle.dumps(own))]
        self._is_usable = None not in outcomes
        if found is not None and not all(outcomes):
            found.multicast = 0  # on all ranks or on none
        return found if self._is_usable else None


def _warn(error: Exception) -> None:
    message = f"torch's symmetric memory can't be used, so NVLink's switch can't either: {error}"
    warnings.warn(message, stacklevel=3)


def register_group(rank: int, size: int, exchange: Exchange) -> str:
    """Collective: makes a store of these ranks and a group of torch's symmetric memory; returns its name."""
    from torch._C._distributed_c10d import _SymmetricMemory

    def connect(port: int) -> Any:
        return torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0, _STORE_TIMEOUT, wait_for_workers=False)

    store = connect(0) if rank == 0 else None
    offer = None if store is None else (f"epcomm-{uuid.uuid4().hex}", store.port)
    name, port = pickle.loads(exchange(pickle.dumps(offer))[0])
    _SymmetricMemory.set_group_info(name, rank, size, connect(port) if store is None else store)
    return name
