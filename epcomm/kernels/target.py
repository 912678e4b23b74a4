"""What runs a rank's kernels. The layers above bind operations through this and don't know which target it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np
import torch

from epcomm.heap.cpu import Allgather, Mapping
from epcomm.heap.private import PrivateMemory, Stream


class Kernel(Protocol):
    """A kernel of some target; `address` is what its launch takes, `is_single` that a pool of threads can sleep on."""

    @property
    def address(self) -> Any: ...

    @property
    def is_single(self) -> bool: ...


class Target(Protocol):
    """Kernels by operation, and their launch.

    A method that gets ``args`` (words of a parameter block) writes there what its kernel looks up at run time.
    """

    name: str
    device: torch.device  # of the tensors
    kind: str  # of device, the same on all ranks
    transport: str  # among ranks of one host, or by a network of this target
    between_hosts: str  # as wanted, where the target has no network: see `hosts.transport`
    defers: bool  # a launch may return before its kernel has run: what is wrong may be known later
    runs_on_threads: bool  # programs are run by threads of the rank's pool
    shares_control: bool  # the control region's segment can hold the collectives' regions too
    link_speed: float  # bytes per second that a rank sends its peers, as a share of what its memory moves
    copy_engine_bytes: int  # staging of data movement by copies; 0: kernels move data

    @property
    def stream(self) -> Stream:
        """Where this rank's work is enqueued, and perhaps captured."""

    def default_num_programs(self, size: int) -> int:
        """How many programs each of `size` ranks on this machine runs if nobody says."""

    def start(self, num_programs: int, control_regions: Sequence[Mapping], num_bytes: int) -> None:
        """Called once all ranks' control regions are mapped: `num_bytes` of each, in host memory."""

    def connect(self, rank: int, hosts: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> Any:
        """Collective: the way to ranks that load and store don't reach, with `nodes` and the methods of `proxy.Proxy`.

        None: those are the ranks on other hosts (`hosts`: by rank), and the proxy is the way. Called once, before all
        else; then `transport` is known. Raises UnsupportedError, on all ranks, if there is no way.
        """

    def segment(
        self, rank: int, num_bytes: int, word_bytes: int, prefault: Sequence[tuple[int, int]], allgather: Allgather
    ) -> Any:
        """Collective: a symmetric segment, with ``own``, ``bases``, and ``network``, the words of a window after those.

        All words that other ranks raise are in its first `word_bytes`, a line each.
        """

    def multicast(self, segment: Any) -> int:
        """Address at which kernels reach a place in all ranks' parts of a segment through NVLink's switch.

        0 if there is none; it is 0 on all ranks or on none. No memory is there: it is for `device.gpu.multimem`.
        """

    def owned_memory(self, num_bytes: int) -> Any:
        """Memory of a result that lends nothing, with the interface of what is lent."""

    def private(self, num_bytes: int) -> PrivateMemory:
        """Zeroed private memory for blocks of words."""

    def prepare(self, kernel: Any) -> None:
        """Compiles and loads what launches of a kernel need, before anyone waits for this rank."""

    def launch(self, ctx: Any, kernel: Any, args: Any, fingerprint: int, a: int, b: int, c: int, d: int, e: int,
               f: int) -> int:  # fmt: skip
        """Runs a kernel as the next operation of the context; the numbers are its call words. Returns a status.

        ``ctx`` and ``args`` are handles of private memory. A fingerprint of 0 marks an operation outside of the
        sequence.
        """

    def bind(self, ctx: Any, kernel: Any, args: Any, fingerprint: int, values: Sequence[int]) -> Callable[[], int]:
        """`launch` with everything resolved, for hot loops."""

    def barrier(self) -> Kernel: ...

    def reduce(self, args: np.ndarray, algorithm: str, dtype: torch.dtype, op: str) -> Kernel:
        """Allreduce or reduce by "one_shot" or "two_shot"; allreduce by "multimem" where there is `multicast`.

        Among ranks on several hosts by "rails"; a reduce-scatter, too: of its result a rank keeps KEPT_BYTES.
        """

    def exchange(self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None, spans_hosts: bool) -> Kernel:
        """Data movement, or with a reduction a reduce-scatter.

        Where ``args`` has a ROOT that rank's bytes go to all, as the table says, too.
        """

    def plan_workers(self, num_programs: int) -> int:
        """How many programs run a plan where `num_programs` run other operations: those must run side by side."""

    def moves_whole_lines(self, segment: Any) -> bool:
        """True if messages of the protocol "ll128" are right in a segment, on all ranks: see `protocol.lines`."""

    def execute_plan(
        self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None, protocol: str, is_wide: bool
    ) -> Kernel:
        """What runs plans of a protocol, with a reduction or without; `is_wide`: with partial sums in float32."""

    def send(self) -> Kernel: ...

    def recv(self) -> Kernel: ...

    def route(self) -> Kernel: ...

    def exchange_counts(self, num_experts: int, size: int) -> Kernel: ...

    def waited_for(self, kernel: Any, is_waited_for: bool) -> Kernel:
        """The kernel, whose launch returns only when its status is known, or before (if the target `defers`)."""

    def failure_before(self, ctx: Any) -> int:
        """Why the next launch in a context would fail; OK if nothing is known that would stop it."""

    def dispatch(self, num_experts: int, size: int, is_expanded: bool) -> Kernel:
        """`is_expanded`: rows travel by rank and are copied to their experts' places where they arrive."""

    def quantized_dispatch(
        self, records: np.ndarray, num_experts: int, size: int, is_expanded: bool, dtype: torch.dtype, form: str,
        argument: int,
    ) -> Kernel | None:  # fmt: skip
        """A dispatch that quantises rows of `dtype` in a form, which may take an argument, as it sends them.

        `records`, one of the codes and one of the scales, are written to; the first has the address, the stride and the
        number of what is to be quantised. None: rows are quantised before they are dispatched, as two tensors.
        """

    def dispatch_receive(self, kernel: Any) -> Kernel:
        """The second half of a dispatch that only sent; `kernel` is its first half."""

    def combine(
        self, records: np.ndarray, dtypes: Sequence[tuple[torch.dtype, torch.dtype]], size: int, is_summed_here: bool,
        form: str | None,
    ) -> Kernel:  # fmt: skip
        """`records` describe the tensors (see the protocol), whose dtypes are (expert outputs, results).

        `is_summed_here`: a token's rows are summed where its experts are, before they travel back. `form`: rows travel
        quantised, in "float32" or "power_of_two", of one tensor.
        """

    def combine_receive(self, kernel: Any) -> Kernel:
        """The second half of a combine that only sent; `kernel` is its first half."""


#: makes the target of new communicators; None: the CPU's
make_target: ContextVar[Callable[[], Target] | None] = ContextVar("epcomm_make_target", default=None)
