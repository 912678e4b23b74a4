"""The interpreted target: Triton kernels on CPU memory, one program after the other. Logic without a GPU.

The interpreter keeps its state in globals, so a process can be one interpreted rank, and one operation runs at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from epcomm.device.cpu.launch import CALL_WORDS
from epcomm.device.gpu.compile import Kernel, one
from epcomm.device.gpu.launch import launch
from epcomm.device.gpu.machine import INTERPRETED
from epcomm.device.gpu.multimem import EMULATED_BASE
from epcomm.device.gpu.remote import RemoteNetwork
from epcomm.errors import UnsupportedError
from epcomm.heap.cpu import Allgather, Mapping, SymmetricSegment, owned_array
from epcomm.heap.network import Exchange
from epcomm.heap.private import MirroredMemory
from epcomm.kernels.gpu.replay import ReplayStream
from epcomm.kernels.gpu.target import GpuTarget

_COPY_ENGINE_BYTES = 64 << 10  # so that little data is several pieces


class InterpretedTarget(GpuTarget):
    """Runs the kernels by Triton's interpreter, on CPU memory. Rows and channels are shared out among `num_programs`.

    Its private memory is mirrored as a GPU's is, so that a word which was not published is missed here already.
    With `multicast` it emulates NVLink's switch, with an `sm_budget` of 0 it copies without kernels; all ranks must.
    With the `network` "remote" ranks reach those on the same of `nodes` by load and store, others by `RemoteNetwork`.
    """

    name, transport, device = "interpreter", "shared_memory", torch.device("cpu")
    runs_on_threads, link_speed = False, 1.0
    defers = True
    owned_memory = staticmethod(owned_array)

    def __init__(self, num_programs: int = 2, *, multicast: bool = False, sm_budget: int | None = None,
                 network: str = "none", nodes: Sequence[int] = ()):  # fmt: skip
        if not INTERPRETED:
            raise UnsupportedError("Triton was imported as a compiler: set TRITON_INTERPRET=1 before its first import")
        self.stream = ReplayStream()
        self._num_programs, self._multicast = num_programs, EMULATED_BASE if multicast else 0
        self.copy_engine_bytes = _COPY_ENGINE_BYTES if sm_budget == 0 else 0
        self.network, self._nodes = network, nodes
        self._remote: RemoteNetwork | None = None
        self.shares_control = network == "none"  # the host reaches all ranks' control regions
        self.kind = "cpu" + " with multicast" * multicast + " with sm_budget=0" * (sm_budget == 0)

    def connect(self, rank: int, hosts: Sequence[int], exchange: Exchange) -> RemoteNetwork | None:
        self._remote = RemoteNetwork(rank, self._nodes) if self.network == "remote" else None
        return self._remote

    def segment(
        self, rank: int, num_bytes: int, word_bytes: int, prefault: Any, allgather: Allgather
    ) -> SymmetricSegment:
        segment = SymmetricSegment(rank, num_bytes, prefault, allgather)
        if self._remote is not None:
            self._remote.add(segment, word_bytes)
        return segment

    def multicast(self, segment: SymmetricSegment) -> int:
        return self._multicast

    def default_num_programs(self, size: int) -> int:
        return max(1, len(os.sched_getaffinity(0)) // size)  # as its Numba peers: they share out the same channels

    def plan_workers(self, num_programs: int) -> int:
        return 1  # programs run one after the other, and those of a plan wait for each other: one does all, in order

    def moves_whole_lines(self, segment: SymmetricSegment) -> bool:
        return True  # flags are stored after the data: see `flagged_lines`

    def execute_plan(
        self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None, protocol: str, is_wide: bool
    ) -> Kernel:
        return super().execute_plan(args, reduction, protocol, is_wide).on_programs(one)

    def start(self, num_programs: int, control_regions: Sequence[Mapping], num_bytes: int) -> None:
        pass

    def private(self, num_bytes: int) -> MirroredMemory:
        return MirroredMemory(num_bytes, torch.device("cpu"), self.stream)

    def prepare(self, kernel: Kernel) -> None:
        pass  # it is interpreted

    def launch(self, ctx: MirroredMemory, kernel: Kernel, args: MirroredMemory, fingerprint: int, *words: int) -> int:
        numbers = (ctx.address, args.address, fingerprint, *map(int, words), *[0] * (CALL_WORDS - len(words)))
        grid = (kernel.programs(self._num_programs),)

        def run() -> None:
            self.stream.enqueue(lambda: kernel.function[grid](*numbers, **kernel.constants))

        return launch(ctx, args, fingerprint, self.stream.is_capturing(), run)
