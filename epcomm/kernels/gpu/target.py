"""The GPU target's kernels by operation, and the target that interprets them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton

from epcomm.device.gpu import interpreter
from epcomm.device.gpu.compile import Kernel
from epcomm.device.gpu.dtypes import triton_dtype
from epcomm.device.gpu.multimem import EMULATED_BASE
from epcomm.heap.cpu import Mapping, SymmetricSegment, owned_array
from epcomm.heap.private import MirroredMemory
from epcomm.kernels.gpu.allreduce_multimem import allreduce_multimem
from epcomm.kernels.gpu.allreduce_one_shot import allreduce_one_shot
from epcomm.kernels.gpu.allreduce_two_shot import allreduce_two_shot
from epcomm.kernels.gpu.barrier import barrier
from epcomm.kernels.gpu.combine import combine
from epcomm.kernels.gpu.counts import exchange_counts
from epcomm.kernels.gpu.dispatch import dispatch
from epcomm.kernels.gpu.exchange import NO_REDUCTION, exchange
from epcomm.kernels.gpu.point_to_point import recv, send
from epcomm.kernels.gpu.reduction import reduction_constants
from epcomm.kernels.gpu.route import route
from epcomm.kernels.protocol.arithmetic import check_row_sum

_COPY_ENGINE_BYTES = 64 << 10  # so that little data is several pieces
_REDUCTIONS = {"one_shot": allreduce_one_shot, "two_shot": allreduce_two_shot, "multimem": allreduce_multimem}


class GpuKernels:
    """The part of `kernels.target.Target` that says which arm of which kernel an operation is."""

    def barrier(self) -> Kernel:
        return barrier

    def reduce(self, args: np.ndarray, algorithm: str, dtype: torch.dtype, op: str) -> Kernel:
        return _REDUCTIONS[algorithm].made_for(**reduction_constants(dtype, op))

    def exchange(self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None) -> Kernel:
        return exchange.made_for(**(NO_REDUCTION if reduction is None else reduction_constants(*reduction)))

    def send(self) -> Kernel:
        return send

    def recv(self) -> Kernel:
        return recv

    def route(self) -> Kernel:
        return route

    def exchange_counts(self, num_experts: int, size: int) -> Kernel:
        return exchange_counts.made_for(**_extents(num_experts, size))

    def dispatch(self, num_experts: int, size: int) -> Kernel:
        return dispatch.made_for(**_extents(num_experts, size), X=None, SCALES=None)

    def quantized_dispatch(self, num_experts: int, size: int, dtype: torch.dtype, scales: str) -> Kernel:
        return dispatch.made_for(**_extents(num_experts, size), X=triton_dtype(dtype), SCALES=scales)

    def combine(
        self, records: np.ndarray, dtypes: Sequence[tuple[torch.dtype, torch.dtype]], size: int
    ) -> Kernel:
        for pair in dtypes:
            check_row_sum(*pair)
        rows, results = zip(*dtypes)
        dtypes_of = {"IN": tuple(map(triton_dtype, rows)), "OUT": tuple(map(triton_dtype, results))}
        return combine.made_for(**dtypes_of, RANKS=triton.next_power_of_2(size))


class InterpretedTarget(GpuKernels):
    """Runs the kernels by Triton's interpreter, on CPU memory. Rows and channels are shared out among `num_programs`.

    Its private memory is mirrored as a GPU's is, so that a word which was not published is missed here already.
    With `multicast` it emulates NVLink's switch, with an `sm_budget` of 0 it copies without kernels; all ranks must.
    """

    name, transport, device = "interpreter", "shared_memory", torch.device("cpu")
    runs_on_threads, shares_control = False, True
    segment, owned_memory = SymmetricSegment, staticmethod(owned_array)

    def __init__(self, num_programs: int = 2, *, multicast: bool = False, sm_budget: int | None = None):
        interpreter.require_interpreter()
        self._num_programs, self._multicast = num_programs, EMULATED_BASE if multicast else 0
        self.copy_engine_bytes = _COPY_ENGINE_BYTES if sm_budget == 0 else 0
        self.kind = "cpu" + " with multicast" * multicast + " with sm_budget=0" * (sm_budget == 0)

    def multicast(self, segment: SymmetricSegment) -> int:
        return self._multicast

    def default_num_programs(self, size: int) -> int:
        return max(1, len(os.sched_getaffinity(0)) // size)  # as its Numba peers: they share out the same channels

    def start(self, num_programs: int, control_regions: Sequence[Mapping], num_bytes: int) -> None:
        pass

    def private(self, num_bytes: int) -> MirroredMemory:
        return MirroredMemory(num_bytes, torch.device("cpu"))

    def prepare(self, kernel: Kernel) -> None:
        pass  # it is interpreted

    def launch(self, ctx: MirroredMemory, kernel: Kernel, args: MirroredMemory, fingerprint: int, a: int = 0,
               b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0) -> int:  # fmt: skip
        return interpreter.launch(ctx, kernel, args, fingerprint, (a, b, c, d, e, f), self._num_programs)

    def bind(self, ctx: MirroredMemory, kernel: Kernel, args: MirroredMemory, fingerprint: int,
             values: Sequence[int]) -> Callable[[], int]:  # fmt: skip
        return functools.partial(self.launch, ctx, kernel, args, fingerprint, *values)


def _extents(num_experts: int, size: int) -> dict[str, int]:
    """Tiles that hold something for each expert, and for each rank."""
    return {"EXPERTS": triton.next_power_of_2(num_experts), "RANKS": triton.next_power_of_2(size)}
