"""Declares Triton kernels: what they are called, how many programs they need, and which constants they are made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import triton
import triton.language as tl

from epcomm.device.gpu.bitcode import NETWORKS, libraries

#: names of a kernel's arguments, all int64, before its call words: the context, the parameter block, the fingerprint
LEADING = ("ctx", "args", "fingerprint")

_MOST_REGISTERS = 255  # that a thread can have
_REGISTERS_PER_WARP = 65536 // 32  # of a multiprocessor, if one warp had them all


@dataclass(frozen=True)
class Kernel:
    """A kernel, perhaps with constants: an *arm* of it. It takes LEADING, CALL_WORDS numbers, and its constants.

    ``programs`` says how many programs are launched when rows or channels are shared out among `n`. Each thread has at
    most ``max_registers``; with no limit the assembler spills a few to fit in more programs than are ever launched.
    Linked with a network's functions it may have all that a launch can: with fewer, it spills what it keeps over calls.
    It runs on ``oldest_arch`` and newer, ``oldest_because`` of what is not on older ones. A ``cooperative`` one's
    programs are all on the GPU at the same time, or the launch fails.
    """

    name: str
    function: Any
    programs: Callable[[int], int]
    num_warps: int
    max_registers: int
    reports: bool = False  # the host needs its status, or what it leaves in private memory, before it goes on
    oldest_arch: str = "sm_80"
    oldest_because: str = ""
    cooperative: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    is_single = False  # for `Operation`: no pool of threads is involved

    @property
    def address(self) -> Kernel:
        """What a launch takes; of a kernel on the CPU target it is the address of its code."""
        return self

    def runs_on(self, arch: str) -> bool:
        """True unless an architecture such as "sm_80" is too old for it."""
        return int(arch.removeprefix("sm_")) >= int(self.oldest_arch.removeprefix("sm_"))

    @property
    def network(self) -> str:
        """How it reaches ranks that load and store don't, see `device.gpu.network`; "none" if it needn't."""
        return self.constants.get("NETWORK", "none")

    def options_for(self, arch: str) -> dict[str, Any]:
        """What Triton's compiler is told. Products and sums round one by one, as on the CPU, unless by an fma.

        Raises UnsupportedError if its network's device library can't be linked.
        """
        registers = self.max_registers
        if self.network in NETWORKS:
            registers = min(_MOST_REGISTERS, _REGISTERS_PER_WARP // self.num_warps)
        options: dict[str, Any] = {"num_warps": self.num_warps, "maxnreg": registers, "enable_fp_fusion": False}
        if self.cooperative:
            options["launch_cooperative_grid"] = True
        linked = libraries(self.network, arch)
        return {**options, "extern_libs": linked} if linked else options

    def made_for(self, **constants: Any) -> Kernel:
        """The arm with these constants."""
        return replace(self, constants={**self.constants, **constants})

    def reporting(self, reports: bool) -> Kernel:
        """The same, waited for or not."""
        return replace(self, reports=reports)

    def on_programs(self, programs: Callable[[int], int]) -> Kernel:
        """An arm that needs other programs."""
        return replace(self, programs=programs)


def kernel(
    name: str,
    *,
    programs: Callable[[int], int],
    num_warps: int = 8,
    max_registers: int = 128,
    reports: bool = False,
    oldest_arch: str = "sm_80",
    oldest_because: str = "",
    cooperative: bool = False,
) -> Callable[[Any], Kernel]:
    """Declares a kernel."""

    def declare(function: Any) -> Kernel:
        function.__globals__.setdefault("tl", tl)  # the interpreter patches what it finds there
        annotations = function.__annotations__
        numbers = [name for name in inspect.signature(function).parameters if name not in annotations]
        annotations |= dict.fromkeys(numbers, "int64")  # else a number's size and divisibility would make more arms
        compiled = triton.jit(function, do_not_specialize=numbers)
        return Kernel(
            name, compiled, programs, num_warps, max_registers, reports, oldest_arch, oldest_because, cooperative
        )

    return declare


def one(num_programs: int) -> int:
    """`programs` of a kernel that one program does."""
    return 1


def all_programs(num_programs: int) -> int:
    """`programs` of a kernel without phases."""
    return num_programs
