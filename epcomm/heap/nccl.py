"""Segments as NCCL's windows, for its GPU-initiated networking. HAS NOT BEEN RUN YET: written from nccl4py 0.6.0.

Kernels get the device's half of a communicator, ncclDevComm, as an address: a copy of its bytes in device memory, with
what the shim can't ask NCCL for in the `PREFIX` bytes before it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from epcomm.device.control import LINE
from epcomm.device.gpu.bitcode import installed, libraries, require_version, version_text
from epcomm.device.gpu.gin import PREFIX
from epcomm.errors import UnsupportedError
from epcomm.heap.cuda import CudaMapping
from epcomm.heap.network import Exchange, Network, NetworkSegment, bindings, zeroed

_MAGIC = 0xCAFEBEEF  # of all structs that NCCL versions


class NcclNetwork(Network):
    """See `heap.network.Network`. Without `needs_gin` it is NCCL's windows and device communicator alone."""

    name, title, package = "gin", "NCCL's GIN", "nccl4py"
    modules = "nccl.core", "nccl.bindings.nccl"

    def __init__(self, rank: int, device: torch.device, exchange: Exchange, needs_gin: bool = True):
        self._needs_gin = needs_gin
        self._windows: list[tuple[Any, Any]] = []
        super().__init__(rank, device, exchange)

    @classmethod
    def require_library(cls, arch: str) -> None:
        libraries("gin", arch)  # one for all
        core = cls.core()
        try:
            loaded = version_text(int(cls.calls().get_version()))
        except Exception as error:  # the loader's own errors
            raise UnsupportedError(f"nccl4py can't load NCCL: {error}") from error
        require_version(installed("nccl")[0], loaded)
        written_for = str(core.get_version().nccl_bindings)
        if written_for.split(".")[:2] != loaded.split(".")[:2]:
            raise UnsupportedError(
                f"nccl4py {core.__version__} is written for NCCL {written_for}, the NCCL that is loaded is {loaded}: "
                "install the nccl4py of that NCCL"
            )

    @classmethod
    def _unique_id(cls) -> bytes:
        return bytes(cls.core().get_unique_id().as_bytes)

    def _start(self, rank: int, size: int, shared: bytes, agree: Callable[[Callable[[], Any]], Any]) -> None:
        def initialize() -> Any:
            unique_id = bindings("nccl.core.utils", self.title, self.package).UniqueId.from_bytes(shared)
            with torch.cuda.device(self._device):
                return self.core().Communicator.init(size, rank, unique_id)

        self._communicator = agree(initialize)
        if self._needs_gin:
            agree(self._require_network)
        self._for_kernels = agree(lambda: self._communicator.create_dev_comm(requirements(self._needs_gin)))
        self._copy = agree(self._copy_to_device)
        self.address = self._copy.data_ptr() + PREFIX.value

    def _require_network(self) -> None:
        properties = self._communicator.properties
        if not properties.device_api_support:
            raise UnsupportedError("this NCCL communicator has no device API")
        widest = self.core().NcclGinConnectionType
        if properties.gin_connection_type not in (None, widest.FULL):
            raise UnsupportedError(f"wanted GIN between all ranks, NCCL offers {properties.gin_connection_type!r}")
        if properties.gin_type == self.core().NcclGinType.NONE:
            raise UnsupportedError("NCCL finds no network adapter for GIN on this machine")

    def _copy_to_device(self) -> torch.Tensor:
        host = self._for_kernels.dev_comm
        num_bytes = self.calls().dev_comm_dtype.itemsize
        found = _Versioned.from_address(host.ptr)
        if found.magic != _MAGIC:
            raise UnsupportedError(f"NCCL's ncclDevComm doesn't begin with {_MAGIC:#x} but with {found.magic:#x}")
        require_version(installed("nccl")[0], version_text(found.version))
        expected = self._communicator.properties.dev_comm_runtime_version_size
        if expected not in (None, num_bytes):
            raise UnsupportedError(f"NCCL's ncclDevComm has {expected} bytes, that of nccl4py {num_bytes}")
        text = prefixed(ctypes.string_at(host.ptr, num_bytes), int(host.gin_context_count))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)

    def segment(self, num_bytes: int, word_bytes: int, exchange: Exchange) -> NetworkSegment:
        def allocate() -> tuple[Any, torch.Tensor]:
            memory = self.core().mem_alloc(num_bytes, self._device.index)
            return memory, zeroed(int(memory.handle), num_bytes, self._device, memory)

        def register() -> Any:
            with torch.cuda.device(self._device):
                window = self._communicator.register_window(memory, self.core().WindowFlag.COLL_SYMMETRIC)
            if not window.handle:
                raise UnsupportedError("NCCL registers no windows here")
            return window

        memory, tensor = self._agree(exchange, allocate)
        window = self._agree(exchange, register)
        self._windows.append((window, tensor))
        size = self._communicator.nranks
        bases = np.array([window.get_peer_device_pointer(rank) or 0 for rank in range(size)], dtype=np.int64)
        raised = self._agree(exchange, lambda: raised_table(size, word_bytes, self._device))
        words = int(window.handle), raised.data_ptr(), raised.shape[1]
        return NetworkSegment(CudaMapping(tensor), bases, words, keep=raised)

    def _release(self) -> None:
        self._windows.clear()
        self._communicator.destroy()  # closes windows and the device's half as well


def raised_table(size: int, word_bytes: int, device: torch.device) -> torch.Tensor:
    """int64 [size, lines] of zeros: by rank, what this rank has raised the first word of each line there to."""
    return torch.zeros((size, -(-word_bytes // LINE)), dtype=torch.int64, device=device)


class _Versioned(ctypes.Structure):
    """How ncclDevComm begins."""

    _fields_ = [("magic", ctypes.c_uint32), ("version", ctypes.c_uint32)]


def requirements(needs_gin: bool = True) -> Any:
    """What kernels need of a device communicator: every rank by GIN, and signals in windows, after all earlier puts."""
    core = NcclNetwork.core()
    connection = core.NcclGinConnectionType.FULL if needs_gin else core.NcclGinConnectionType.NONE
    return core.NCCLDevCommRequirements(
        gin_connection_type=connection,
        gin_strong_signals_required=needs_gin,
        gin_va_signals_required=needs_gin,
    )


def prefixed(communicator: bytes, num_contexts: int) -> bytes:
    """The bytes of an ncclDevComm after what `gin` reads before them."""
    return num_contexts.to_bytes(8, "little").ljust(PREFIX.value, b"\0") + communicator
