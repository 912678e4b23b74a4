"""Collectives by plans: a plan that is given, or made by the algorithm that is named; proven, lowered, bound once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.bind import Binder, private_words
from epcomm.collectives.checks import check_op
from epcomm.collectives.plan import Plan
from epcomm.collectives.plan.conditions import REDUCTIONS, ROOTED
from epcomm.collectives.plan.fifos import FifoMemory
from epcomm.collectives.plan.lower import lower, prove, scratch_bytes
from epcomm.collectives.selection import ALGORITHMS as KERNELS
from epcomm.device.control import GENERATION_SHIFT, LINE
from epcomm.device.cpu.memory import STREAMING_BYTES
from epcomm.errors import ConfigError, PlanError, UnsupportedError
from epcomm.kernels.protocol import collectives as protocol
from epcomm.kernels.protocol.arithmetic import has_finish, partial_scale
from epcomm.kernels.protocol.lines import LL, LL128, MAX_FLAG, PROTOCOLS, SIMPLE, STAGE_BYTES
from epcomm.kernels.protocol.plans import MAX_CHANNELS, WIDE
from epcomm.operation import Operation

_MOST_CHANNELS = 8  # of plans made here; more would leave their FIFOs little memory
#: Bytes per rank from which they have two pieces, so that one is computed while another is awaited. On 2 busy cores
#: rings of 2 and 4 ranks were 1 to 20 % faster so with 1 and 16 MiB; four or eight pieces were no better on the whole.
_TWO_PIECES_BYTES = 128 << 10


def named_plan(name: str, kind: str, size: int, root: int, unit_bytes: int, num_channels: int) -> Plan:
    """What a communicator of `size` ranks with so many channels makes of an algorithm's name.

    `unit_bytes`: of the collective's unit. ConfigError if the algorithm can't do that.
    """
    pieces = 2 if unit_bytes // size >= _TWO_PIECES_BYTES else 1
    return _made_plan(name, kind, size, root, min(num_channels, _MOST_CHANNELS), pieces)


@functools.lru_cache(maxsize=256)
def _made_plan(name: str, kind: str, size: int, root: int, channels: int, pieces: int) -> Plan:
    return ALGORITHMS[name].plan(kind, size, root=root, channels=channels, pieces=pieces)


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A plan bound to a shape, dtype and reduction: the operation that runs it, and how it may lie in memory.

    `first_output` is where the output begins, in bytes from the input's beginning, when it works in place.
    """

    operation: Operation
    plan: Plan
    first_output: int

    def call_words(self, where: str, x: torch.Tensor, out: torch.Tensor | None) -> tuple[int, ...]:
        """The operation's, for these tensors; `out` is None where there is no output.

        ConfigError unless the plan is meant to run in place, or out of place, as they lie.
        """
        source, num_input = x.data_ptr(), x.nbytes
        to, num_output = (0, 0) if out is None else (out.data_ptr(), out.nbytes)
        if num_input and num_output:
            self._check_placement(where, source, num_input, to, num_output)
        return source, to, num_input, num_output > STREAMING_BYTES

    def _check_placement(self, where: str, x: int, num_input: int, out: int, num_output: int) -> None:
        plan = f"{where}: argument `out`: plan {self.plan.name}"
        if out == x + self.first_output:
            if not self.plan.in_place:
                raise ConfigError(f"{plan} works out of place only: wanted memory of its own, got `x`'s")
        elif x < out + num_output and out < x + num_input:
            raise ConfigError(f"{plan}: shares memory with `x`, but not as in place")
        elif not self.plan.out_of_place:
            raise ConfigError(f"{plan} works in place only: wanted `x`'s memory, got other")


class PlanBinder:
    """The memory that all plans of a communicator share, and operations that run them."""

    def __init__(self, binder: Binder):
        self._binder, self._runtime, regions = binder, binder.runtime, binder.regions
        target, size = self._runtime.target, self._runtime.size
        self._num_workers = workers = target.plan_workers(binder.num_channels)
        self._first_flag_count = 2 * MAX_CHANNELS * size
        self._memory = FifoMemory(
            tuple(self._runtime.nodes),
            regions.plan_words,
            slots={SIMPLE: regions.fifos, LL: regions.ll, LL128: regions.ll128},
            num_bytes={SIMPLE: regions.fifo_bytes, LL: regions.lines_bytes, LL128: regions.lines_bytes},
            departures=regions.departures,
            departure_bytes=regions.departures_bytes,
            flag_counts={way: self._first_flag_count + at * workers for at, way in enumerate(PROTOCOLS)},
        )
        self._counts = target.private(8 * (self._first_flag_count + len(PROTOCOLS) * workers))
        self._done = target.private(LINE * workers)
        self._stages = target.private(STAGE_BYTES * workers)
        self.start_generation(self._runtime.generation)
        self._runtime.on_reset(self)

    def start_generation(self, generation: int) -> None:
        """FIFOs count from above all that earlier generations counted; no step is done; no flags are left.

        In a first generation no flag was used, and memory is zero.
        """
        counts = self._counts.array.view(np.int64)
        counts[: self._first_flag_count] = generation << GENERATION_SHIFT
        counts[self._first_flag_count :] = 0 if generation == 1 else MAX_FLAG
        self._counts.publish()
        self._done.refresh()
        self._done.array[:] = 0
        self._done.publish()

    def bound(
        self, where: str, kind: str, algorithm: Plan | str, x: torch.Tensor, op: str = "", root: int = 0
    ) -> PlannedCollective:
        """A plan, bound when first asked for. `op` is empty where nothing is reduced.

        ConfigError if the plan is wrong or isn't one of this collective among these ranks.
        """
        key = (kind, x.shape, x.dtype, op, root, algorithm)
        return self._binder.cached(key, lambda: self._bind(where, kind, algorithm, x, op, root))

    def _bind(
        self, where: str, kind: str, algorithm: Plan | str, x: torch.Tensor, op: str, root: int
    ) -> PlannedCollective:
        if kind in REDUCTIONS:
            check_op(where, x.dtype, op)
        runtime = self._runtime
        unit_bytes = x.nbytes // (runtime.size if kind in ("reduce_scatter", "alltoall") else 1)
        plan = self._plan(where, kind, algorithm, root, unit_bytes)
        is_wide = plan.wide_sums and kind in REDUCTIONS and partial_scale(x.dtype, op) == WIDE
        try:
            proven = prove(plan)
            table = lower(
                proven, runtime.rank, self._num_workers, unit_bytes, self._memory, has_finish(op), is_wide
            )  # fmt: skip
        except (PlanError, ConfigError) as error:
            raise ConfigError(f"{where}: argument `algorithm`: {error}") from error
        if plan.protocol == LL128 and not runtime.target.moves_whole_lines(runtime.collectives):
            wanted = "wanted ranks on one GPU, or on GPUs that NVLink's switch joins; ll and simple work on any"
            raise UnsupportedError(f"{where}: argument `algorithm`: plan {plan.name}: protocol ll128: {wanted}")
        args = self._binder.block()
        words = private_words(runtime.target, table)
        num_scratch = scratch_bytes(proven, runtime.rank, unit_bytes, is_wide)
        scratch = torch.empty(num_scratch, dtype=torch.uint8, device=runtime.target.device)
        args.words[protocol.TABLE] = words.address
        args.words[protocol.COUNTS], args.words[protocol.DONE] = self._counts.address, self._done.address
        args.words[protocol.SCRATCH], args.words[protocol.STAGES] = scratch.data_ptr(), self._stages.address
        kernel = runtime.target.execute_plan(args.words, (x.dtype, op) if op else None, plan.protocol, is_wide)
        more = f", op={op}" if op else ""
        more += f", root={root}" if kind in ROOTED else ""
        more += f", algorithm=plan {plan.name} {proven.fingerprint}, {plan.protocol}"
        more += ", partial sums in float32" if is_wide else ""
        text = f"{kind}(x={x.dtype} {tuple(x.shape)}{more})"
        keep = (self._counts, self._done, self._stages, words, scratch, plan)
        operation = self._binder.operation(kernel, args, text, keep)
        input_at, output_at = plan.collective.overlay(runtime.rank)  # in chunks, of which a block is whole
        first_output = (output_at - input_at) // plan.collective.num_chunks * unit_bytes
        return PlannedCollective(operation, plan, first_output)

    def _plan(self, where: str, kind: str, algorithm: Plan | str, root: int, unit_bytes: int) -> Plan:
        size = self._runtime.size
        if not isinstance(algorithm, Plan):
            if algorithm not in ALGORITHMS:
                known = [*KERNELS] if kind == "allreduce" else ["auto"]
                known += [name for name, made in ALGORITHMS.items() if kind in made.forms and name not in known]
                wanted = f"wanted a plan or one of {', '.join(known)}"
                raise ConfigError(f"{where}: argument `algorithm`: {wanted}, got {algorithm!r}")
            try:
                return named_plan(algorithm, kind, size, root, unit_bytes, self._binder.num_channels)
            except ConfigError as error:
                raise ConfigError(f"{where}: argument `algorithm`: {error}") from None
        collective = algorithm.collective
        wanted_root = root if kind in ROOTED else collective.root
        if (collective.kind, collective.num_ranks, collective.root) != (kind, size, wanted_root):
            wanted = f"{kind} of {size} ranks" + (f", root {root}" if kind in ROOTED else "")
            raise ConfigError(f"{where}: argument `algorithm`: wanted a plan of {wanted}, got one of {collective}")
        return algorithm
