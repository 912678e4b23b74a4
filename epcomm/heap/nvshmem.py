"""Segments on NVSHMEM's symmetric heap. HAS NOT BEEN RUN YET: written from the sources of nvshmem4py 0.4.1.

NVSHMEM exists once per process, so its ranks are those of one communicator at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from epcomm.device.gpu.bitcode import libraries
from epcomm.errors import UnsupportedError
from epcomm.heap.cuda import CudaMapping
from epcomm.heap.network import Exchange, Network, NetworkSegment, bindings, zeroed


class NvshmemNetwork(Network):
    """See `heap.network.Network`."""

    name, title, package = "nvshmem", "NVSHMEM", "nvshmem4py-cu12"
    modules = "nvshmem.core", "nvshmem.bindings"

    _is_in_use = False  # of the process

    def __init__(self, rank: int, device: torch.device, exchange: Exchange):
        self._addresses: list[int] = []
        self._modules: set[int] = set()
        super().__init__(rank, device, exchange)

    @classmethod
    def require_free(cls) -> None:
        if NvshmemNetwork._is_in_use:
            raise UnsupportedError(
                "this process is in a communicator that uses NVSHMEM: close() that one first; if it failed, reset() it"
            )

    @classmethod
    def require_library(cls, arch: str) -> None:
        libraries("nvshmem", arch)
        cls.core()

    @classmethod
    def _unique_id(cls) -> bytes:
        return ctypes.string_at(cls.core().get_unique_id().ptr, cls.calls().uniqueid_dtype.itemsize)

    def _start(self, rank: int, size: int, shared: bytes, agree: Callable[[Callable[[], Any]], Any]) -> None:
        def initialize() -> None:
            unique_id = self.core().get_unique_id(empty=True)
            ctypes.memmove(unique_id.ptr, shared, len(shared))
            own = self._device_of_cuda_core()
            self.core().init(device=own, uid=unique_id, rank=rank, nranks=size, initializer_method="uid")

        agree(self._device_of_cuda_core)
        agree(initialize)
        NvshmemNetwork._is_in_use = True

    def _device_of_cuda_core(self) -> Any:
        torch.cuda.current_stream(self._device).synchronize()  # torch's context of the device is the current one now
        found = bindings("cuda.core", self.title, "cuda-core").Device(self._device.index)
        found.set_current()
        return found

    def segment(self, num_bytes: int, word_bytes: int, exchange: Exchange) -> NetworkSegment:
        def allocate() -> tuple[int, torch.Tensor]:
            with torch.cuda.device(self._device):
                address = int(self.calls().malloc(num_bytes))
            if not address:
                raise UnsupportedError(f"no room for {num_bytes} bytes; the environment's NVSHMEM_SYMMETRIC_SIZE is it")
            self._addresses.append(address)
            return address, zeroed(address, num_bytes, self._device, self)

        address, memory = self._agree(exchange, allocate)
        bases = [int(self.calls().ptr(address, rank) or 0) for rank in range(len(exchange(b"")))]
        return NetworkSegment(CudaMapping(memory), np.array(bases, dtype=np.int64), (address, 0, 0))

    def prepare(self, module: int) -> None:
        """Fills in the state that NVSHMEM's device functions look up in the module."""
        if module not in self._modules:
            self.calls().cumodule_init(module)
            self._modules.add(module)

    def _release(self) -> None:
        for module in self._modules:
            self.calls().cumodule_finalize(module)
        for address in self._addresses:
            self.calls().free(address)
        self._modules.clear()
        self._addresses.clear()
        self.core().finalize()
        NvshmemNetwork._is_in_use = False
