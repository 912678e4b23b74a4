"""Segments as NCCL's windows, for its GPU-initiated networking. HAS NOT BEEN RUN YET: written from nccl4py 0.6.0.

Kernels get the device's half of a communicator, ncclDevComm, as an address: a copy of its bytes in device memory, with
what the shim can't ask NCCL for in the `PREFIX` bytes before it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from epcomm.device.gpu.bitcode import installed, libraries, require_version, version_text
from epcomm.device.gpu.gin import PREFIX
from epcomm.errors import UnsupportedError
from epcomm.heap.cuda import CudaMapping
from epcomm.heap.network import Exchange, NetworkSegment, agreed, require_processes, zeroed

_WHAT = "NCCL's GIN can't be used"
_MAGIC = 0xCAFEBEEF  # of all structs that NCCL versions


def require_gin() -> None:
    """Raises UnsupportedError with the reason unless kernels can be linked with NCCL here, and the host call it."""
    libraries("gin", "sm_90")  # one for all
    core, bindings = _core(), _bindings()
    try:
        loaded = version_text(int(bindings.get_version()))
    except Exception as error:  # the loader's own errors
        raise UnsupportedError(f"nccl4py can't load NCCL: {error}") from error
    require_version(installed("nccl")[0], loaded)
    written_for = str(core.get_version().nccl_bindings)
    if written_for.split(".")[:2] != loaded.split(".")[:2]:
        raise UnsupportedError(
            f"nccl4py {core.__version__} is written for NCCL {written_for}, the NCCL that is loaded is {loaded}: "
            "install the nccl4py of that NCCL"
        )


def _core() -> Any:
    try:
        import nccl.core
    except ImportError as error:
        raise UnsupportedError(f"NCCL's GIN needs nccl4py: pip install nccl4py ({error})") from error
    return nccl.core


def _bindings() -> Any:
    """The calls of NCCL's library as they are; `_core` says what is missing if they can't be imported."""
    import nccl.bindings.nccl

    return nccl.bindings.nccl


class NcclNetwork:
    """See `heap.network.Network`. Collective to make."""

    name = "gin"

    def __init__(self, rank: int, device: torch.device, exchange: Exchange, needs_gin: bool = True):
        self._device, self._exchange = device, exchange
        self._windows: list[tuple[Any, Any]] = []
        agreed(_WHAT, exchange, _check)
        require_processes(_WHAT, exchange)
        size = len(exchange(b""))
        mine = agreed(_WHAT, exchange, lambda: bytes(_core().get_unique_id().as_bytes) if rank == 0 else b"")
        shared = exchange(mine)[0]

        def initialize() -> Any:
            with torch.cuda.device(device):
                return _core().Communicator.init(size, rank, _unique_id(shared))

        self._communicator = agreed(_WHAT, exchange, initialize)
        if needs_gin:
            agreed(_WHAT, exchange, self._require_network)
        self._for_kernels = agreed(_WHAT, exchange, lambda: self._communicator.create_dev_comm(requirements(needs_gin)))
        self._copy = agreed(_WHAT, exchange, self._copy_to_device)
        self.context = self._copy.data_ptr() + PREFIX.value

    def _require_network(self) -> None:
        properties = self._communicator.properties
        if not properties.device_api_support:
            raise UnsupportedError("this NCCL communicator has no device API")
        widest = _core().NcclGinConnectionType
        if properties.gin_connection_type not in (None, widest.FULL):
            raise UnsupportedError(f"wanted GIN between all ranks, NCCL offers {properties.gin_connection_type!r}")
        if properties.gin_type == _core().NcclGinType.NONE:
            raise UnsupportedError("NCCL finds no network adapter for GIN on this machine")

    def _copy_to_device(self) -> torch.Tensor:
        host = self._for_kernels.dev_comm
        num_bytes = _bindings().dev_comm_dtype.itemsize
        found = _Versioned.from_address(host.ptr)
        if found.magic != _MAGIC:
            raise UnsupportedError(f"NCCL's ncclDevComm doesn't begin with {_MAGIC:#x} but with {found.magic:#x}")
        require_version(installed("nccl")[0], version_text(found.version))
        expected = self._communicator.properties.dev_comm_runtime_version_size
        if expected not in (None, num_bytes):
            raise UnsupportedError(f"NCCL's ncclDevComm has {expected} bytes, that of nccl4py {num_bytes}")
        text = prefixed(ctypes.string_at(host.ptr, num_bytes), int(host.gin_context_count))
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)

    def segment(self, num_bytes: int) -> NetworkSegment:
        def allocate() -> tuple[Any, torch.Tensor]:
            memory = _core().mem_alloc(num_bytes, self._device.index)
            return memory, zeroed(int(memory.handle), num_bytes, self._device, memory)

        memory, tensor = agreed(_WHAT, self._exchange, allocate)

        def register() -> Any:
            with torch.cuda.device(self._device):
                window = self._communicator.register_window(memory, _core().WindowFlag.COLL_SYMMETRIC)
            if not window.handle:
                raise UnsupportedError("NCCL registers no windows here")
            return window

        window = agreed(_WHAT, self._exchange, register)
        self._windows.append((window, tensor))
        bases = [window.get_peer_device_pointer(rank) or 0 for rank in range(self._communicator.nranks)]
        return NetworkSegment(CudaMapping(tensor), np.array(bases, dtype=np.int64), int(window.handle))

    def prepare(self, module: int) -> None:
        """NCCL keeps nothing in modules."""

    def close(self) -> None:
        self._windows.clear()
        self._communicator.destroy()  # closes windows and the device's half as well


class _Versioned(ctypes.Structure):
    """How ncclDevComm begins."""

    _fields_ = [("magic", ctypes.c_uint32), ("version", ctypes.c_uint32)]


def _check() -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError(f"NCCL needs a GPU: torch {torch.__version__} finds no CUDA GPU or driver")
    require_gin()


def requirements(needs_gin: bool = True) -> Any:
    """What kernels need of a device communicator: every rank by GIN, and signals in windows, after all earlier puts."""
    core = _core()
    connection = core.NcclGinConnectionType.FULL if needs_gin else core.NcclGinConnectionType.NONE
    return core.NCCLDevCommRequirements(
        gin_connection_type=connection,
        gin_strong_signals_required=needs_gin,
        gin_va_signals_required=needs_gin,
    )


def prefixed(communicator: bytes, num_contexts: int) -> bytes:
    """The bytes of an ncclDevComm after what `gin` reads before them."""
    return num_contexts.to_bytes(8, "little").ljust(PREFIX.value, b"\0") + communicator


def _unique_id(payload: bytes) -> Any:
    from nccl.core.utils import UniqueId

    return UniqueId.from_bytes(payload)
