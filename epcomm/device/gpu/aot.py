"""Compiles kernels ahead of time, without a GPU or its driver, and judges the code: registers, widths, orders."""

from __future__ import annotations

import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from epcomm.device.gpu import ptx
from epcomm.device.gpu.compile import Kernel
from epcomm.device.gpu.machine import INTERPRETED
from epcomm.errors import ConfigError, UnsupportedError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class CompiledArm:
    """What the machine code of a kernel's arm is like. Counts are of instructions in the code, not of executions.

    kernel, arm        the kernel, and the constants it was made for
    arch               "sm_90"
    registers          32-bit registers per thread
    shared_bytes       shared memory per program
    stack_bytes        stack frame or other local memory per thread; spilled registers lie there, and what the functions
                       of a network's library pass to each other
    spill_stores       bytes per thread that are spilled, and read back, as ptxas counts them
    spill_loads
    wide_loads         accesses of at least 16 bytes per thread in branches of `if ... WIDE`
    wide_stores
    split_accesses     accesses in those branches that came out narrower: the compiler wasn't sure of an alignment
    narrow_accesses    accesses in the other branches, for payload that isn't aligned
    widest_load        bytes per thread of the widest payload access
    widest_store
    orderings          how often each memory order occurs: ("acquire.sys", 10)
    weak_orderings     acquires and releases that only this GPU sees, in functions other than `fetch_add`
    noncoherent_loads  loads through the read-only path, which may miss what a peer wrote
    unseen_accesses    loads, stores and atomics without a state space, of which nothing above speaks
    products           32-bit products that may be part of an address
    calls              the functions of a network's library that it calls; what is said of accesses leaves them out
    undefined          functions that are called somewhere in the code, and are neither there nor in the driver
    unreleased_puts    calls of a network's put without a fence of the whole system right before them
    multimem           the different instructions for which NVLink's switch works
    cubin_bytes        size of the binary
    compile_seconds    near 0 when Triton's cache had it
    """

    kernel: str
    arm: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    wide_loads: int
    wide_stores: int
    split_accesses: int
    narrow_accesses: int
    widest_load: int
    widest_store: int
    orderings: tuple[tuple[str, int], ...]
    weak_orderings: int
    noncoherent_loads: int
    unseen_accesses: int
    products: int
    calls: tuple[str, ...]
    undefined: tuple[str, ...]
    unreleased_puts: int
    multimem: tuple[str, ...]
    cubin_bytes: int
    compile_seconds: float

    @property
    def name(self) -> str:
        """Kernel and arm; see `name_of`."""
        return f"{self.kernel} {self.arm}".rstrip()

    @property
    def moves_payload(self) -> bool:
        """True if it has code that copies or reduces rows or arrays."""
        return self.wide_loads + self.wide_stores + self.split_accesses + self.narrow_accesses > 0

    def defects(self) -> list[str]:
        """What no kernel's code may have."""
        found = []
        if self.spill_stores or self.spill_loads or (self.stack_bytes and not self.calls):
            found.append(
                f"uses local memory: {self.stack_bytes} bytes of stack, "
                f"{self.spill_stores} bytes spilled, {self.spill_loads} read back"
            )
        if self.split_accesses:
            found.append(f"{self.split_accesses} accesses of a wide branch are narrower than 16 bytes")
        if self.moves_payload and not (self.wide_loads and self.wide_stores):
            found.append(f"moves payload, but with {self.wide_loads} wide loads and {self.wide_stores} wide stores")
        if self.weak_orderings:
            found.append(f"{self.weak_orderings} acquires or releases aren't at system scope: peers don't see them")
        if self.noncoherent_loads:
            found.append(f"{self.noncoherent_loads} loads take the non-coherent path")
        if self.unseen_accesses:
            found.append(f"{self.unseen_accesses} accesses have no state space")
        if self.products:
            found.append(f"{self.products} products in 32 bits: addresses need 64")
        if self.undefined:
            found.append(f"calls {', '.join(self.undefined)}, which no library defines")
        if self.unreleased_puts:
            found.append(f"{self.unreleased_puts} puts may send what a network card doesn't see yet")
        return found


def arm_of(kernel: Kernel) -> str:
    """The constants of a kernel as text, but for those that are None or "none": "IN=bf16 OUT=fp32"."""

    def text(value: Any) -> str:
        return "+".join(map(text, value)) if isinstance(value, tuple) else str(value)

    texts = {name: text(value) for name, value in kernel.constants.items() if value is not None}
    return " ".join(f"{name}={value}" for name, value in texts.items() if value != "none")


def name_of(kernel: Kernel) -> str:
    """A kernel's name and arm: "dispatch EXPERTS=256 RANKS=8"."""
    return f"{kernel.name} {arm_of(kernel)}".rstrip()


def compile_arm(kernel: Kernel, arch: str) -> CompiledArm:
    """Compiles one arm for an architecture with stock Triton. Arguments are numbers of which nothing is assumed."""
    if INTERPRETED:
        raise UnsupportedError("Triton was imported as an interpreter: unset TRITON_INTERPRET")
    if arch not in ARCHITECTURES:
        raise ConfigError(f"arch must be one of {', '.join(ARCHITECTURES)}; got {arch!r}")
    if not kernel.runs_on(arch):
        raise UnsupportedError(f"{name_of(kernel)} is not for {arch}: {kernel.oldest_because}")
    capability = int(arch.removeprefix("sm_"))
    started = time.perf_counter()
    compiled = compile_kernel(kernel, arch)
    seconds = time.perf_counter() - started
    used = ptx.resources(_assembler_log(compiled.asm["ptx"], capability))
    code = compiled.asm["ptx"] if kernel.network == "none" else ptx.own_code(compiled.asm["ptx"])
    found = ptx.accesses(code)
    payload = [access for access in found if access.branch]
    wide = [access for access in payload if access.branch == "wide" and access.num_bytes >= 16]
    return CompiledArm(
        kernel=kernel.name,
        arm=arm_of(kernel),
        arch=arch,
        registers=used.registers,
        shared_bytes=compiled.metadata.shared,
        stack_bytes=used.stack_bytes,
        spill_stores=used.spill_stores,
        spill_loads=used.spill_loads,
        wide_loads=sum(access.is_load for access in wide),
        wide_stores=sum(not access.is_load for access in wide),
        split_accesses=sum(access.branch == "wide" for access in payload) - len(wide),
        narrow_accesses=sum(access.branch == "narrow" for access in payload),
        widest_load=max((access.num_bytes for access in payload if access.is_load), default=0),
        widest_store=max((access.num_bytes for access in payload if not access.is_load), default=0),
        orderings=tuple(ptx.orderings(found).items()),
        weak_orderings=sum(
            bool(access.order) and access.scope != "sys" and access.function != "fetch_add" for access in found
        ),
        noncoherent_loads=sum(".nc" in access.instruction for access in found),
        unseen_accesses=ptx.generic_accesses(code),
        products=0 if kernel.constants.get("OP") == "prod" else ptx.products_in_32_bits(compiled.asm["ttir"]),
        calls=() if kernel.network == "none" else ptx.calls(code),
        undefined=ptx.undefined(compiled.asm["ptx"]),
        unreleased_puts=ptx.unreleased_puts(code),
        multimem=ptx.multimem_instructions(code),
        cubin_bytes=len(compiled.asm["cubin"]),
        compile_seconds=seconds,
    )


def compile_kernel(kernel: Kernel, arch: str) -> Any:
    """What Triton's compiler makes of one arm; "ptx" and the like are in its `asm`."""
    names = kernel.function.arg_names
    source = ASTSource(
        fn=kernel.function,
        signature={name: "constexpr" if name in kernel.constants else "i64" for name in names},
        constexprs=kernel.constants,
    )
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = False  # the lines tell what an access is for
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
        return triton.compile(source, target=target, options=kernel.options_for(arch))


def _assembler_log(text: str, capability: int) -> str:
    """What the assembler that Triton takes for this architecture says of a kernel; Triton keeps only its binary."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.ptx"
        path.write_text(text, encoding="utf-8")
        command = [get_ptxas(capability).path, "-v", "-lineinfo", "--fmad=false", "--regAllocOptLevel=2"]  # as Triton
        command += [f"--gpu-name={sm_arch_from_capability(capability)}", str(path), "-o", f"{path}.o"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
