"""CUDA segments: memory of one GPU that peers reach by load and store, as threads of one process or by CUDA's IPC.

Ranks may share a device. Memory that is lent to results is given to torch by the CUDA array interface: the storage
keeps the object that offers it, and with it the lease.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from epcomm.errors import UnsupportedError


class LentMemory:
    """Bytes of a segment, lent: a tensor's storage keeps this object, and this object the lease and the segment."""

    def __init__(self, memory: torch.Tensor, lease: Any):
        self._memory, self.lease = memory, lease
        self.__cuda_array_interface__ = memory.__cuda_array_interface__

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor on this memory at a byte offset; it keeps the memory lent."""
        count = 1
        for extent in shape:
            count *= extent
        memory = torch.as_tensor(self, device=self._memory.device)
        return memory[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


class _Part:
    """A range of the own segment, as `BlockPool` lends it."""

    def __init__(self, memory: torch.Tensor):
        self._memory = memory

    def lend(self, lease: Any) -> LentMemory:
        return LentMemory(self._memory, lease)


class CudaMapping:
    """This rank's part of a segment."""

    def __init__(self, memory: torch.Tensor):
        self._memory, self.address = memory, memory.data_ptr()

    def part(self, offset: int, num_bytes: int) -> _Part:
        """A range that can be lent."""
        return _Part(self._memory[offset : offset + num_bytes])


class CudaSegment:
    """A segment on GPUs; ``bases`` holds each rank's part as this rank's kernels address it.

    Collective to make: `exchange` sends a payload to all ranks and returns everyone's, by rank.
    """

    multicast = 0  # see `cuda_symmetric`
    network = (0, 0, 0)  # ranks that load and store don't reach are an error

    def __init__(self, num_bytes: int, device: torch.device, exchange: Callable[[bytes], list[bytes]]):
        memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()  # not the device: ranks of other threads may be waiting on it
        storage = memory.untyped_storage()
        processes = [pickle.loads(payload) for payload in exchange(pickle.dumps(os.getpid()))]
        is_shared = any(process != os.getpid() for process in processes)
        own = (memory.data_ptr(), device.index, storage._share_cuda_() if is_shared else None)
        self.own, self._storages = CudaMapping(memory), [storage]
        bases = []
        for process, payload in zip(processes, exchange(pickle.dumps(own)), strict=True):
            address, peer_device, handle = pickle.loads(payload)
            require_peer_access(device, peer_device)
            if process != os.getpid():
                opened = torch.UntypedStorage._new_shared_cuda(*handle)
                self._storages.append(opened)
                address = opened.data_ptr()
            bases.append(address)
        self.bases = np.array(bases, dtype=np.int64)


def require_peer_access(device: torch.device, peer: int) -> None:
    """Raises UnsupportedError unless kernels on `device` can load and store on device number `peer`; enables it."""
    if device.index == peer:
        return
    if not torch.cuda.can_device_access_peer(device.index, peer):
        raise UnsupportedError(
            f"cuda:{device.index} has no peer access to cuda:{peer} (no NVLink or PCIe path between them); ranks "
            "must be on GPUs that reach each other's memory"
        )
    torch.empty(1, device=device).copy_(torch.empty(1, device=f"cuda:{peer}"))  # torch enables access at the first copy


def register_host_memory(address: int, num_bytes: int) -> None:
    """Lets kernels read and write host memory at its own address (CUDA's unified addressing)."""
    portable_and_mapped = 1 | 2
    status = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, portable_and_mapped))
    if status != 0:
        raise UnsupportedError(f"init: cudaHostRegister refused the control region: CUDA error {status}")


def unregister_host_memory(addresses: Sequence[int]) -> None:
    """Undoes `register_host_memory`; errors of a process that ends are of no consequence."""
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)
