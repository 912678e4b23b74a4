"""The CUDA target: compiled kernels on the current stream of a device.

A launch returns before its kernel has run, unless the host needs what it found (`Kernel.reports`). What stops a kernel
is left in the rank's control region and raised by the next launch. A launch can be captured in a CUDA graph if the
same operation ran on the same tensors before: then nothing is compiled and nothing published. Kernels count epochs
themselves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton

from epcomm.device.cpu.launch import CALL_WORDS
from epcomm.device.gpu.compile import LEADING, Kernel
from epcomm.device.gpu.launch import launch
from epcomm.device.gpu.machine import INTERPRETED
from epcomm.errors import CapacityError, ConfigError, UnsupportedError
from epcomm.heap.cpu import Allgather, Mapping
from epcomm.heap.cuda import CudaSegment, LentMemory, register_host_memory, unregister_host_memory
from epcomm.heap.cuda_symmetric import SymmetricCudaSegment, SymmetricGroup
from epcomm.heap.layout import PAGE, align_up
from epcomm.heap.network import Exchange, Network, NetworkSegment, architecture
from epcomm.heap.private import MirroredMemory
from epcomm.heap.transport import connect
from epcomm.kernels.gpu.target import GpuTarget

_loading = threading.Lock()
_LEAST_TRITON, _LEAST_CAPABILITY = (3, 6), (8, 0)
_NVLINK_BYTES_PER_SECOND = 450e9  # per direction of a Hopper GPU, NVIDIA's data sheet
#: staging without kernels: its copies take 75 us at NVLink's speed, beside two barriers of some us each
_COPY_ENGINE_BYTES = 32 << 20
#: NVLink per direction and memory, bytes per second, by the first number of the compute capability: NVIDIA's data
#: sheets of A100 SXM 80 GB, H100 SXM and B200
_BANDWIDTHS = {8: (300e9, 2039e9), 9: (450e9, 3350e9), 10: (900e9, 8000e9)}
_KEPT_BYTES = 4 << 20  # of parameters of captured calls; a call has some hundred
_SM_BYTES_PER_SECOND = 20e9  # that one multiprocessor copies to a peer: DeepEP fills NVLink with 20 to 24 of them


def default_sm_budget(device: torch.device, size: int) -> int:
    """As many multiprocessors as fill a Hopper's NVLink, but no more than all ranks can have if they share one GPU."""
    enough = math.ceil(_NVLINK_BYTES_PER_SECOND / _SM_BYTES_PER_SECOND)
    return max(1, min(enough, torch.cuda.get_device_properties(device).multi_processor_count // size))


def require_cuda(device: torch.device) -> torch.device:
    """The device with its number, or an error that says what is missing and what works instead."""
    instead = "; ranks on a cpu work everywhere: init(device='cpu')"
    if not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds no CUDA GPU or driver"
        raise UnsupportedError(f"init: argument `device`: got {device}, but {found}{instead}")
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < _LEAST_TRITON:
        fix = "pip install -U triton"
        raise UnsupportedError(f"init: wanted Triton 3.6 or newer, got {triton.__version__}: {fix}{instead}")
    if INTERPRETED:
        raise UnsupportedError(f"init: Triton is an interpreter here (TRITON_INTERPRET is set){instead}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"init: argument `device`: wanted one of {torch.cuda.device_count()} GPUs, got {device}")
    capability = torch.cuda.get_device_capability(index)
    if capability < _LEAST_CAPABILITY:
        found = f"sm_{capability[0]}{capability[1]} ({torch.cuda.get_device_name(index)})"
        raise UnsupportedError(f"init: argument `device`: wanted sm_80 or newer, got {found}{instead}")
    return torch.device("cuda", index)


class CudaStream:
    """The current stream, whichever that is: see `heap.private.Stream`.

    What captured work reads is kept in pinned memory, made in advance: none can be allocated during a capture.
    """

    can_capture = True

    def __init__(self) -> None:
        self._memory = torch.empty(_KEPT_BYTES, dtype=torch.uint8, pin_memory=True)
        self._used = 0

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def enqueue(self, work: Callable[[], object]) -> None:
        work()

    def kept(self, part: np.ndarray) -> torch.Tensor:
        start = self._used
        if start + part.size > self._memory.numel():
            raise CapacityError(
                f"captures: wanted at most {_KEPT_BYTES} bytes of captured calls' parameters per communicator, got more"
            )
        self._used = align_up(start + part.size, 16)
        kept = self._memory[start : start + part.size]
        kept.numpy()[:] = part
        return kept


class CudaTarget(GpuTarget):
    """See `kernels.target.Target`."""

    name = "cuda"
    runs_on_threads = shares_control = False
    defers = True

    def __init__(self, device: torch.device, sm_budget: int | None = None, transport: str = "auto"):
        self.device = require_cuda(device)
        self.transport = transport  # as wanted, until the ranks have met
        self._connection: Network | None = None
        self.kind = torch.cuda.get_device_name(self.device) + " with sm_budget=0" * (sm_budget == 0)
        self.copy_engine_bytes = _COPY_ENGINE_BYTES if sm_budget == 0 else 0
        major, _ = torch.cuda.get_device_capability(self.device)
        self._arch = architecture(self.device)
        links, memory = _BANDWIDTHS.get(major, _BANDWIDTHS[max(_BANDWIDTHS)])
        self.link_speed = links / memory
        self.stream = CudaStream()
        self._num_programs = 1
        self._group: SymmetricGroup | None = None

    def default_num_programs(self, size: int) -> int:
        if self.copy_engine_bytes:
            return 1
        return default_sm_budget(self.device, size)

    def start(self, num_programs: int, control_regions: Sequence[Mapping], num_bytes: int) -> None:
        self._num_programs = num_programs
        addresses = [mapping.address for mapping in control_regions]
        for address in addresses:
            register_host_memory(address, align_up(num_bytes, PAGE))
        weakref.finalize(self, unregister_host_memory, addresses).atexit = False

    def private(self, num_bytes: int) -> MirroredMemory:
        return MirroredMemory(num_bytes, self.device, self.stream)

    def connect(self, rank: int, hosts: Sequence[int], exchange: Exchange) -> Network | None:
        self._connection = connect(self.transport, rank, hosts, self.device, exchange)
        self.transport = "peer_memory" if self._connection is None else self._connection.name
        if self._connection is not None and max(self._connection.nodes) > 0:
            self.network = self._connection.name  # else load and store reach everyone, and kernels do without
        return self._connection

    def segment(
        self, rank: int, num_bytes: int, word_bytes: int, prefault: Any, allgather: Allgather
    ) -> CudaSegment | SymmetricCudaSegment | NetworkSegment:
        def exchange(payload: bytes) -> list[bytes]:
            return [message for message, _ in allgather(payload, ())]

        if self._connection is not None:
            return self._connection.segment(num_bytes, word_bytes, exchange)
        if self._group is None:
            self._group = SymmetricGroup(rank, self.device, exchange)
        return self._group.segment(num_bytes, exchange) or CudaSegment(num_bytes, self.device, exchange)

    def multicast(self, segment: CudaSegment | SymmetricCudaSegment | NetworkSegment) -> int:
        return segment.multicast

    def moves_whole_lines(self, segment: CudaSegment | SymmetricCudaSegment | NetworkSegment) -> bool:
        """Where all ranks are on one GPU, or NVLink's switch joins them. (Whether links without one do isn't asked.)"""
        return segment.multicast != 0 or (self._group is not None and self._group.is_one_gpu)

    def owned_memory(self, num_bytes: int) -> LentMemory:
        return LentMemory(torch.empty(num_bytes, dtype=torch.uint8, device=self.device), None)

    def prepare(self, kernel: Kernel) -> None:
        """Ranks that are threads share what is loaded: only one loads, and no one while a peer's kernel waits for it.

        (Loading may wait for the kernels that run, and with it the rank that one of them waits for.)
        """
        with _loading, torch.cuda.device(self.device):
            numbers = [0] * (len(LEADING) + CALL_WORDS)
            options = kernel.options_for(self._arch)
            compiled = kernel.function.run(*numbers, grid=(1,), warmup=True, **options, **kernel.constants)
            compiled._init_handles()
            if self._connection is not None and kernel.network != "none":
                self._connection.prepare(compiled.module)

    def launch(self, ctx: MirroredMemory, kernel: Kernel, args: MirroredMemory, fingerprint: int, *words: int) -> int:
        numbers = (ctx.address, args.address, fingerprint, *map(int, words), *[0] * (CALL_WORDS - len(words)))

        is_captured = self.stream.is_capturing()

        def run() -> None:
            with torch.cuda.device(self.device):
                grid = (kernel.programs(self._num_programs),)
                kernel.function[grid](*numbers, **kernel.options_for(self._arch), **kernel.constants)
                if kernel.reports and not is_captured:
                    torch.cuda.current_stream().synchronize()

        return launch(ctx, args, fingerprint, is_captured, run)
