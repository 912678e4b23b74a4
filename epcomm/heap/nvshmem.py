"""Segments on NVSHMEM's symmetric heap. HAS NOT BEEN RUN YET: written from the sources of nvshmem4py 0.4.1.

NVSHMEM exists once per process, so its ranks are those of one communicator at a time.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from epcomm.device.gpu.bitcode import libraries
from epcomm.errors import UnsupportedError
from epcomm.heap.cuda import CudaMapping
from epcomm.heap.network import Exchange, NetworkSegment, agreed, require_processes, zeroed

_WHAT = "NVSHMEM can't be used"


def require_nvshmem(arch: str) -> None:
    """Raises UnsupportedError with the reason unless kernels can be linked with NVSHMEM here, and the host call it."""
    libraries("nvshmem", arch)
    _core()
    _bindings()


def _core() -> Any:
    try:
        import nvshmem.core
    except ImportError as error:
        raise UnsupportedError(f"NVSHMEM needs nvshmem4py: pip install nvshmem4py-cu12 ({error})") from error
    return nvshmem.core


def _bindings() -> Any:
    """The calls of NVSHMEM's library as they are; `_core` says what is missing if they can't be imported."""
    import nvshmem.bindings

    return nvshmem.bindings


class NvshmemNetwork:
    """See `heap.network.Network`. Collective to make."""

    name = "nvshmem"
    context = 0

    _is_in_use = False  # of the process

    def __init__(self, rank: int, device: torch.device, exchange: Exchange):
        self._device, self._exchange = device, exchange
        self._addresses: list[int] = []
        self._modules: set[int] = set()
        agreed(_WHAT, exchange, self._check)
        require_processes(_WHAT, exchange)
        agreed(_WHAT, exchange, lambda: self._device_of_cuda_core())
        size = len(exchange(b""))
        mine = agreed(_WHAT, exchange, lambda: _unique_id() if rank == 0 else b"")
        shared = exchange(mine)[0]
        agreed(_WHAT, exchange, lambda: self._initialize(rank, size, shared))
        NvshmemNetwork._is_in_use = True

    def _check(self) -> None:
        if NvshmemNetwork._is_in_use:
            raise UnsupportedError("this process is in a communicator that uses NVSHMEM: close() that one first")
        if not torch.cuda.is_available():
            raise UnsupportedError(f"NVSHMEM needs a GPU: torch {torch.__version__} finds no CUDA GPU or driver")
        major, minor = torch.cuda.get_device_capability(self._device)
        require_nvshmem(f"sm_{major}{minor}")

    def _device_of_cuda_core(self) -> Any:
        from cuda.core import Device

        torch.cuda.current_stream(self._device).synchronize()  # torch's context of the device is the current one now
        found = Device(self._device.index)
        found.set_current()
        return found

    def _initialize(self, rank: int, size: int, shared: bytes) -> None:
        unique_id = _core().get_unique_id(empty=True)
        ctypes.memmove(unique_id.ptr, shared, len(shared))
        _core().init(
            device=self._device_of_cuda_core(), uid=unique_id, rank=rank, nranks=size, initializer_method="uid"
        )

    def segment(self, num_bytes: int) -> NetworkSegment:
        def allocate() -> tuple[int, torch.Tensor]:
            with torch.cuda.device(self._device):
                address = int(_bindings().malloc(num_bytes))
            if not address:
                raise UnsupportedError(f"no room for {num_bytes} bytes; the environment's NVSHMEM_SYMMETRIC_SIZE is it")
            self._addresses.append(address)
            return address, zeroed(address, num_bytes, self._device, self)

        address, memory = agreed(_WHAT, self._exchange, allocate)
        size = len(self._exchange(b""))
        bases = [int(_bindings().ptr(address, rank) or 0) for rank in range(size)]
        return NetworkSegment(CudaMapping(memory), np.array(bases, dtype=np.int64), address)

    def prepare(self, module: int) -> None:
        """Fills in the state that NVSHMEM's device functions look up in the module."""
        if module not in self._modules:
            _bindings().cumodule_init(module)
            self._modules.add(module)

    def close(self) -> None:
        for module in self._modules:
            _bindings().cumodule_finalize(module)
        for address in self._addresses:
            _bindings().free(address)
        self._modules.clear()
        self._addresses.clear()
        _core().finalize()
        NvshmemNetwork._is_in_use = False


def _unique_id() -> bytes:
    """What ranks find each other by."""
    return ctypes.string_at(_core().get_unique_id().ptr, _bindings().uniqueid_dtype.itemsize)
