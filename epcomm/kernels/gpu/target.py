"""The GPU target's kernels by operation, whoever runs them: see `cuda` and `interpreted`."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from epcomm.device.gpu.compile import Kernel, all_programs
from epcomm.device.gpu.dtypes import triton_dtype
from epcomm.device.gpu.launch import status_before
from epcomm.heap.network import Exchange
from epcomm.kernels.gpu.allreduce_multimem import allreduce_multimem
from epcomm.kernels.gpu.allreduce_one_shot import allreduce_one_shot
from epcomm.kernels.gpu.allreduce_rails import allreduce_rails
from epcomm.kernels.gpu.allreduce_two_shot import allreduce_two_shot
from epcomm.kernels.gpu.barrier import barrier
from epcomm.kernels.gpu.broadcast_network import broadcast_network
from epcomm.kernels.gpu.combine import combine
from epcomm.kernels.gpu.combine_receive import combine_receive
from epcomm.kernels.gpu.counts import exchange_counts
from epcomm.kernels.gpu.dispatch import dispatch
from epcomm.kernels.gpu.dispatch_receive import dispatch_receive
from epcomm.kernels.gpu.exchange import NO_REDUCTION, exchange
from epcomm.kernels.gpu.exchange_network import exchange_network
from epcomm.kernels.gpu.execute_plan import execute_plan
from epcomm.kernels.gpu.point_to_point import recv, send
from epcomm.kernels.gpu.quantized_rows import FORMS
from epcomm.kernels.gpu.reduction import partial_constants, reduction_constants
from epcomm.kernels.gpu.route import route
from epcomm.kernels.protocol import collectives
from epcomm.kernels.protocol.arithmetic import check_row_sum, has_finish

_REDUCTIONS = {"one_shot": allreduce_one_shot, "two_shot": allreduce_two_shot, "multimem": allreduce_multimem}


class GpuKernels:
    """The part of `kernels.target.Target` that says which arm of which kernel an operation is."""

    network = "none"  # see `device.gpu.network`

    def barrier(self) -> Kernel:
        return barrier.made_for(NETWORK=self.network)

    def reduce(self, args: np.ndarray, algorithm: str, dtype: torch.dtype, op: str) -> Kernel:
        if algorithm == "rails":
            constants = partial_constants(dtype, op, bool(args[collectives.ARE_ALONE]))
            return allreduce_rails.made_for(**constants, NETWORK=self.network)
        return _REDUCTIONS[algorithm].made_for(**reduction_constants(dtype, op))

    def exchange(self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None, spans_hosts: bool) -> Kernel:
        constants = NO_REDUCTION if reduction is None else reduction_constants(*reduction)
        if spans_hosts and args[collectives.ROOT] >= 0:
            return broadcast_network.made_for(NETWORK=self.network)
        if spans_hosts:
            return exchange_network.made_for(**constants, NETWORK=self.network)
        return exchange.made_for(**constants)

    def plan_workers(self, num_programs: int) -> int:
        return num_programs

    def execute_plan(
        self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None, protocol: str, is_wide: bool
    ) -> Kernel:
        constants = NO_REDUCTION if reduction is None else reduction_constants(*reduction)
        finishes = reduction is not None and has_finish(reduction[1]) and not is_wide
        partial = tl.float32 if is_wide else None
        return execute_plan.made_for(
            **constants, FINISHES=finishes, PARTIAL=partial, PROTOCOL=protocol, NETWORK=self.network
        )

    def send(self) -> Kernel:
        return send.made_for(NETWORK=self.network)

    def recv(self) -> Kernel:
        return recv.made_for(NETWORK=self.network)

    def route(self) -> Kernel:
        return route

    def exchange_counts(self, num_experts: int, size: int) -> Kernel:
        return exchange_counts.made_for(**_extents(num_experts, size), NETWORK=self.network)

    def waited_for(self, kernel: Kernel, is_waited_for: bool) -> Kernel:
        return kernel.reporting(is_waited_for)

    def dispatch(self, num_experts: int, size: int, is_expanded: bool) -> Kernel:
        return self._dispatch(num_experts, size, is_expanded, X=None, SCALES=None)

    def quantized_dispatch(
        self, records: np.ndarray, num_experts: int, size: int, is_expanded: bool, dtype: torch.dtype, form: str,
        argument: int,
    ) -> Kernel | None:  # fmt: skip
        if form not in FORMS:
            return None
        return self._dispatch(num_experts, size, is_expanded, X=triton_dtype(dtype), SCALES=form)

    def _dispatch(self, num_experts: int, size: int, is_expanded: bool, **rows: Any) -> Kernel:
        arm = dispatch.made_for(**_extents(num_experts, size), **rows, EXPANDED=is_expanded, NETWORK=self.network)
        return arm.on_programs(lambda shares: 2 * shares + 1) if is_expanded else arm

    def dispatch_receive(self, kernel: Kernel) -> Kernel:
        arm = dispatch_receive.made_for(**{name: kernel.constants[name] for name in ("RANKS", "EXPANDED")})
        return arm.on_programs(all_programs) if kernel.constants["EXPANDED"] else arm

    def combine(
        self, records: np.ndarray, dtypes: Sequence[tuple[torch.dtype, torch.dtype]], size: int, is_summed_here: bool,
        form: str | None,
    ) -> Kernel:  # fmt: skip
        for pair in dtypes:
            check_row_sum(*pair)
        rows, results = zip(*dtypes)
        dtypes_of = {"IN": tuple(map(triton_dtype, rows)), "OUT": tuple(map(triton_dtype, results))}
        ranks = triton.next_power_of_2(size)
        arm = combine.made_for(**dtypes_of, RANKS=ranks, SUMMED_HERE=is_summed_here, SCALES=form, NETWORK=self.network)
        return arm.on_programs(lambda shares: 3 * shares) if is_summed_here else arm

    def combine_receive(self, kernel: Kernel) -> Kernel:
        names = "IN", "OUT", "RANKS", "SCALES", "NETWORK"
        return combine_receive.made_for(**{name: kernel.constants[name] for name in names})


class GpuTarget(GpuKernels, ABC):
    """What targets with these kernels have in common."""

    between_hosts = "auto"

    @abstractmethod
    def launch(self, ctx: Any, kernel: Kernel, args: Any, fingerprint: int, *words: int) -> int:
        """See `kernels.target.Target`; words that are not given are 0."""

    def connect(self, rank: int, hosts: Sequence[int], exchange: Exchange) -> Any:
        return None

    def failure_before(self, ctx: Any) -> int:
        return status_before(ctx)

    def bind(self, ctx: Any, kernel: Kernel, args: Any, fingerprint: int, values: Sequence[int]) -> Callable[[], int]:
        return functools.partial(self.launch, ctx, kernel, args, fingerprint, *values)


def _extents(num_experts: int, size: int) -> dict[str, int]:
    """Tiles that hold something for each expert, and for each rank."""
    return {"EXPERTS": triton.next_power_of_2(num_experts), "RANKS": triton.next_power_of_2(size)}
