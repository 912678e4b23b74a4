"""What NVSHMEM's and NCCL's networks have in common: how ranks meet, segments, and what keeps one from being used.

HAS NOT BEEN RUN YET: see `nvshmem` and `nccl`.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from epcomm.device.control import LINE
from epcomm.errors import UnsupportedError
from epcomm.heap.choice import Exchange, agreed, refusal
from epcomm.heap.cuda import CudaMapping

T = TypeVar("T")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROBE_BYTES = 4096
_ASSUMED_ARCH = "sm_90"  # where there is no GPU, to tell whether kernels could be linked
#: of CUDA's device attribute: the GPU itself need not flush what a network card wrote before it reads it
_ORDERED_FOR_OWNER = 100


@dataclass
class NetworkSegment:
    """A segment; ``bases`` holds 0 for ranks that load and store don't reach.

    ``network``: the words of a window after the bases (see `control`); ``keep`` owns what they point to.
    """

    own: CudaMapping
    bases: np.ndarray
    network: tuple[int, int, int]
    keep: Any = None
    multicast = 0  # see `cuda_symmetric`


class Network(ABC):
    """The ranks of a communicator, as a network's library knows them. Collective to make; raises UnsupportedError.

    To the runtime it is what `proxy.Proxy` is. ``address`` is for `control.NETWORK`; ``nodes``, by rank, numbers those
    that load and store in each other's memory.
    """

    name: str  # as in `device.gpu.network`
    title: str
    package: str  # of Python's bindings, and two modules of it: for users, and the library's functions as they are
    modules: tuple[str, str]
    transport, address = "", 0  # see `proxy.NoProxy`

    def __init__(self, rank: int, device: torch.device, exchange: Exchange):
        self._device, self._what = device, f"{self.title} can't be used"
        self._agree(exchange, self._check)
        require_processes(self._what, exchange)
        shared = exchange(self._agree(exchange, lambda: self._unique_id() if rank == 0 else b""))
        self._start(rank, len(shared), shared[0], functools.partial(self._agree, exchange))
        probe = self.segment(_PROBE_BYTES, LINE, exchange)
        self.nodes = nodes_of([pickle.loads(row) for row in exchange(pickle.dumps((probe.bases != 0).tolist()))])

    def _agree(self, exchange: Exchange, attempt: Callable[[], T]) -> T:
        return agreed(self._what, exchange, attempt)

    def _check(self) -> None:
        if reasons := self.refusals(self._device):
            raise UnsupportedError("; ".join(reasons))

    # ---- what keeps it from being used

    @classmethod
    def refusals(cls, device: torch.device) -> list[str]:
        """What keeps this process from using the network, as far as it can tell before ranks meet; [] if nothing."""
        arch = architecture(device) if torch.cuda.is_available() else _ASSUMED_ARCH
        checks = (lambda: cls._require_gpu(device), cls.require_free, lambda: cls.require_library(arch))
        return [reason for check in checks if (reason := refusal(check))]

    @classmethod
    def _require_gpu(cls, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UnsupportedError(f"{cls.title} needs a GPU: torch {torch.__version__} finds no CUDA GPU or driver")
        require_ordered_writes(device)

    @classmethod
    def require_free(cls) -> None:
        """Raises UnsupportedError if the process can't be in one more communicator with this network."""
        return  # most can be in any number

    @classmethod
    @abstractmethod
    def require_library(cls, arch: str) -> None:
        """Raises UnsupportedError with the reason unless kernels can be linked with it, and the host call it."""

    @classmethod
    def core(cls) -> Any:
        """What the library's Python bindings offer."""
        return bindings(cls.modules[0], cls.title, cls.package)

    @classmethod
    def calls(cls) -> Any:
        """The functions of the library as they are."""
        return bindings(cls.modules[1], cls.title, cls.package)

    # ---- meeting

    @classmethod
    @abstractmethod
    def _unique_id(cls) -> bytes:
        """What ranks find each other by."""

    @abstractmethod
    def _start(self, rank: int, size: int, shared: bytes, agree: Callable[[Callable[[], T]], T]) -> None:
        """Collective: connects all ranks, which know what rank 0's `_unique_id` was."""

    # ---- what the runtime calls

    @abstractmethod
    def segment(self, num_bytes: int, word_bytes: int, exchange: Exchange) -> NetworkSegment:
        """Collective: a segment of zeros; all words that are raised are in the first `word_bytes`, a line each."""

    def register(self, segment: Any) -> None:
        """See `proxy.Proxy`. A segment is known to the network since it was made."""
        return

    def settle(self, generation: int, timeout: float) -> None:
        """See `proxy.Proxy`. What was put arrives before the words of the barrier with which a reset ends."""
        return

    def prepare(self, module: int) -> None:
        """Called with each CUmodule that was loaded with kernels of this network, before their first launch."""
        return  # a library may have nothing to set up there

    def close(self, is_together: bool = False) -> None:
        """Collective: gives everything back, tensors in its memory included. No rank can do that alone.

        So if not all ranks are here, nothing is done: the library keeps what it has until the process ends.
        """
        if is_together:
            torch.cuda.synchronize(self._device)
            self._release()

    @abstractmethod
    def _release(self) -> None:
        """Collective: gives everything back; no kernel is running."""


# ---- what can be said without a network


def architecture(device: torch.device) -> str:
    """A GPU's architecture: "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def bindings(module: str, title: str, package: str) -> Any:
    """A module of a library's Python bindings. UnsupportedError says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(f"{title} needs {package}: pip install {package} ({error})") from error


def require_ordered_writes(device: torch.device) -> None:
    """Raises UnsupportedError unless a GPU that sees a card's signal sees what the card wrote before, without a flush.

    Kernels wait by load-acquire on all transports. CUDA's attribute `cudaDevAttrGPUDirectRDMAWritesOrdering` says it.
    """
    runtime = bindings("cuda.bindings.runtime", "a network of GPUs", "cuda-bindings")
    attribute = runtime.cudaDeviceAttr.cudaDevAttrGPUDirectRDMAWritesOrdering
    status, ordering = runtime.cudaDeviceGetAttribute(attribute, device.index)
    if int(status):
        raise UnsupportedError(f"{device} doesn't tell its GPUDirect RDMA writes ordering: CUDA error {int(status)}")
    if ordering < _ORDERED_FOR_OWNER:
        found = f"GPUDirect RDMA writes ordering {ordering}"
        raise UnsupportedError(f"{device} would have to flush what a network card wrote before it reads it: {found}")


def nodes_of(reach: Sequence[Sequence[bool]]) -> list[int]:
    """The node of each rank, 0, 1, ... by first appearance, from who reaches whom by load and store.

    Raises UnsupportedError unless those who reach each other all reach the same ranks.
    """
    firsts = [row.index(True) if True in row else -1 for row in reach]
    if any(first < 0 or list(reach[first]) != list(row) for first, row in zip(firsts, reach, strict=True)):
        raise UnsupportedError(f"wanted ranks that reach each other by load and store, or not at all, got {reach}")
    numbers = {first: number for number, first in enumerate(dict.fromkeys(firsts))}
    return [numbers[first] for first in firsts]


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


def require_processes(what: str, exchange: Exchange) -> None:
    """Collective: raises unless each rank is a process of its own."""
    boot = _BOOT_ID.read_text(encoding="ascii").strip()  # tells machines apart
    processes = exchange(pickle.dumps((boot, os.getpid())))
    if len(set(processes)) < len(processes):
        raise UnsupportedError(f"{what}: each rank must be a process of its own, got threads of one")
