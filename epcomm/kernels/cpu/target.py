"""The CPU target: Numba kernels, run by the calling thread and the rank's pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np
import torch

from epcomm.device import control
from epcomm.device.cpu.compile import Kernel
from epcomm.device.cpu.launch import BOUND_WORDS, load_run, load_run_bound
from epcomm.heap.cpu import Allgather, Mapping, SymmetricSegment, owned_array
from epcomm.heap.private import HostMemory, HostStream
from epcomm.kernels.cpu.allreduce_one_shot import allreduce_one_shot
from epcomm.kernels.cpu.allreduce_rails import allreduce_rails
from epcomm.kernels.cpu.allreduce_two_shot import allreduce_two_shot
from epcomm.kernels.cpu.barrier import barrier
from epcomm.kernels.cpu.broadcast_network import broadcast_network
from epcomm.kernels.cpu.combine import combine
from epcomm.kernels.cpu.combine_receive import combine_receive
from epcomm.kernels.cpu.counts import exchange_counts
from epcomm.kernels.cpu.dispatch import dispatch
from epcomm.kernels.cpu.dispatch_receive import dispatch_receive
from epcomm.kernels.cpu.exchange import exchange
from epcomm.kernels.cpu.exchange_network import exchange_network
from epcomm.kernels.cpu.execute_plan import execute_plan
from epcomm.kernels.cpu.float8_row_sum import float8_row_sum
from epcomm.kernels.cpu.point_to_point import recv, send
from epcomm.kernels.cpu.quantize_rows import quantize_row
from epcomm.kernels.cpu.reduction import WIDTHS, final_reduction, partial_reduction, reduction, reduction_of_two
from epcomm.kernels.cpu.route import route
from epcomm.kernels.cpu.row_sum import row_sum
from epcomm.kernels.protocol import collectives, expert_parallel
from epcomm.kernels.protocol.arithmetic import has_finish, sum_of


class _BoundCall:
    """A block of words and the compiled function that runs it."""

    __slots__ = ("_address", "_block", "_run")

    def __init__(self, values: Sequence[int]):
        self._block = np.zeros(BOUND_WORDS, dtype=np.int64)
        self._block[: len(values)] = values
        self._address, self._run = self._block.ctypes.data, load_run_bound()

    def __call__(self) -> int:
        return self._run(self._address)


class CpuTarget:
    """See `kernels.target.Target`."""

    name, kind, transport, device = "cpu", "cpu", "shared_memory", torch.device("cpu")
    runs_on_threads = shares_control = True
    defers = False
    copy_engine_bytes, link_speed = 0, 1.0
    stream = HostStream()
    private, owned_memory = HostMemory, staticmethod(owned_array)

    def __init__(self, between_hosts: str = "auto") -> None:
        self.launch, self.between_hosts = load_run(), between_hosts

    def default_num_programs(self, size: int) -> int:
        return max(1, len(os.sched_getaffinity(0)) // size)

    def start(self, num_programs: int, control_regions: Sequence[Mapping], num_bytes: int) -> None:
        pass  # the pool is the runtime's

    def prepare(self, kernel: Kernel) -> None:
        kernel.address  # noqa: B018  # compiled when first asked for

    def failure_before(self, ctx: int) -> int:
        return control.OK  # every launch told its own

    def bind(self, ctx: int, kernel: int, args: int, fingerprint: int, values: Sequence[int]) -> Callable[[], int]:
        return _BoundCall((ctx, kernel, args, fingerprint, *values))

    def connect(self, rank: int, hosts: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> None:
        return None

    def segment(
        self, rank: int, num_bytes: int, word_bytes: int, prefault: Sequence[tuple[int, int]], allgather: Allgather
    ) -> SymmetricSegment:
        return SymmetricSegment(rank, num_bytes, prefault, allgather)

    def multicast(self, segment: SymmetricSegment) -> int:
        return 0

    def moves_whole_lines(self, segment: SymmetricSegment) -> bool:
        return True

    def barrier(self) -> Kernel:
        return barrier

    def reduce(self, args: np.ndarray, algorithm: str, dtype: torch.dtype, op: str) -> Kernel:
        if algorithm == "rails":
            is_partial = not args[collectives.ARE_ALONE]
            args[collectives.REDUCE] = partial_reduction(dtype, op).address if is_partial else 0
            args[collectives.FINISH] = (final_reduction if is_partial else reduction)(dtype, op).address
            return allreduce_rails
        args[collectives.REDUCE] = reduction(dtype, op).address
        return {"one_shot": allreduce_one_shot, "two_shot": allreduce_two_shot}[algorithm]

    def exchange(
        self, args: np.ndarray, reduction_of: tuple[torch.dtype, str] | None, spans_hosts: bool
    ) -> Kernel:
        args[collectives.REDUCE] = 0 if reduction_of is None else reduction(*reduction_of).address
        if not spans_hosts:
            return exchange
        return exchange_network if args[collectives.ROOT] < 0 else broadcast_network

    def plan_workers(self, num_programs: int) -> int:
        return num_programs

    def execute_plan(
        self, args: np.ndarray, reduction_of: tuple[torch.dtype, str] | None, protocol: str, is_wide: bool
    ) -> Kernel:
        if reduction_of is not None and is_wide:
            args[collectives.SUMS :] = [reduction_of_two(*reduction_of, *widths).address for widths in WIDTHS]
        elif reduction_of is not None:
            dtype, op = reduction_of
            args[collectives.SUMS] = reduction(dtype, sum_of(op)).address
            args[collectives.FINISH] = reduction(dtype, op).address if has_finish(op) else 0
        return execute_plan

    def send(self) -> Kernel:
        return send

    def recv(self) -> Kernel:
        return recv

    def route(self) -> Kernel:
        return route

    def exchange_counts(self, num_experts: int, size: int) -> Kernel:
        return exchange_counts

    def waited_for(self, kernel: Kernel, is_waited_for: bool) -> Kernel:
        return kernel

    def dispatch(self, num_experts: int, size: int, is_expanded: bool) -> Kernel:
        return dispatch

    def quantized_dispatch(
        self, records: np.ndarray, num_experts: int, size: int, is_expanded: bool, dtype: torch.dtype, form: str,
        argument: int,
    ) -> Kernel:  # fmt: skip
        records[0, expert_parallel.T_QUANTIZE] = quantize_row(dtype, form).address
        records[0, expert_parallel.T_QUANTIZE_ARGUMENT] = argument
        return dispatch

    def dispatch_receive(self, kernel: Kernel) -> Kernel:
        return dispatch_receive

    def combine(
        self, records: np.ndarray, dtypes: Sequence[tuple[torch.dtype, torch.dtype]], size: int, is_summed_here: bool,
        form: str | None,
    ) -> Kernel:  # fmt: skip
        for record, (rows, result) in zip(records, dtypes, strict=True):
            sums = rows if form is None else torch.float32
            if form is not None:
                record[expert_parallel.T_QUANTIZE] = quantize_row(sums if is_summed_here else rows, form).address
            total = row_sum(rows, result) if form is None else float8_row_sum(result)
            record[expert_parallel.T_ROW_SUM] = total.address
            if is_summed_here:
                record[expert_parallel.T_PARTIAL_SUM] = row_sum(rows, sums).address
        return combine

    def combine_receive(self, kernel: Kernel) -> Kernel:
        return combine_receive
