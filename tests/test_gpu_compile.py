"""The GPU target's kernels, compiled ahead of time: registers, access widths, memory orders, 64-bit addresses.

This process and those that it starts to compile have Triton as a compiler; what is interpreted runs in another one.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import triton
import triton.language as tl
from multimem_kernels import signal_everyone
from typer.testing import CliRunner

import epcomm.cli.aot
import epcomm.kernels.gpu
from epcomm.cli.main import app
from epcomm.device.gpu import ptx
from epcomm.device.gpu.aot import CompiledArm, compile_arm, compile_kernel
from epcomm.device.gpu.compile import Kernel, kernel, one
from epcomm.device.gpu.machine import device
from epcomm.device.gpu.memory import load32, load64, set_word
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.kernels.gpu.arms import arms
from epcomm.kernels.protocol.lines import IN_LINES, LL128

NO_PAYLOAD = {"barrier", "route"}  # they move words only
FEW, ALL = arms(), arms(everything=True)
TESTS = Path(__file__).resolve().parent
runner = CliRunner()


@pytest.fixture(scope="module")
def compiling(compilers: ProcessPoolExecutor, request: pytest.FixtureRequest) -> dict[tuple[str, str], Future]:
    """By (arch, name): each arm that a test of this run asks for, in the tests' order."""
    wanted = [
        item.callspec.params for item in request.session.items if "compiling" in getattr(item, "fixturenames", ())
    ]
    jobs = dict.fromkeys((params["arch"], params["name"]) for params in wanted)
    return {(arch, name): compilers.submit(epcomm.cli.aot.compile_named, name, arch) for arch, name in jobs}


CASES = [pytest.param("sm_90", name, marks=() if name in FEW else pytest.mark.slow) for name in ALL]
OTHERS = [(arch, name) for arch in ("sm_80", "sm_100") for name in FEW]
CASES += [pytest.param(arch, name, marks=pytest.mark.slow) for arch, name in OTHERS if FEW[name].runs_on(arch)]
TOO_OLD = [(arch, name) for arch, name in OTHERS if not FEW[name].runs_on(arch)]


@pytest.mark.parametrize("arch, name", CASES)
def test_arm(arch: str, name: str, compiling: dict[tuple[str, str], Future]) -> None:
    arm: CompiledArm = compiling[arch, name].result()
    assert (arm.stack_bytes, arm.spill_stores, arm.spill_loads) == (0, 0, 0)
    assert arm.registers <= ALL[name].max_registers
    if arm.kernel in NO_PAYLOAD or (arm.kernel == "dispatch_receive" and "EXPANDED=False" in name):
        assert not arm.moves_payload
    else:
        assert arm.widest_load >= 16 and arm.widest_store >= 16
        assert arm.wide_loads > 0 and arm.wide_stores > 0
    assert arm.split_accesses == 0
    # what rank-local tickets need, and nothing else, is at the scope of one GPU
    assert {order for order, count in arm.orderings} == {"acq_rel.gpu", "release.sys", "acquire.sys", "acq_rel.sys"}
    assert (arm.weak_orderings, arm.noncoherent_loads, arm.unseen_accesses, arm.products) == (0, 0, 0, 0)
    assert arm.defects() == []
    assert arm.cubin_bytes > 0
    if arm.kernel == "allreduce_multimem":
        dtype = str(ALL[name].constants["DTYPE"])
        numbers = {"bf16": "acc::f32.v4.bf16x2", "fp16": "acc::f32.v4.f16x2", "fp32": "v4.f32"}[dtype]
        added, stored = arm.multimem
        assert added == f"multimem.ld_reduce.relaxed.sys.global.add.{numbers}"
        assert stored == "multimem.st.relaxed.sys.global.v4.f32"
    else:
        assert arm.multimem == ()


@pytest.mark.parametrize("arch, name", TOO_OLD)
def test_arm_is_not_for_an_older_arch(arch: str, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"is not for {arch}: multimem instructions need sm_90"):
        compile_arm(FEW[name], arch)


@pytest.mark.parametrize("way", IN_LINES)
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_messages_in_lines_move_by_strong_accesses_of_16_bytes(arch: str, way: str) -> None:
    """A pair of words by one instruction, which no compiler may leave out; a line of "ll128" by one of a warp."""
    arm = ALL[f"execute_plan DTYPE=uint8 FINISHES=False PROTOCOL={way}"]
    compiled = compile_kernel(arm, arch)
    found = ptx.accesses(compiled.asm["ptx"])
    pairs = [access for access in found if ".relaxed.sys." in access.instruction]
    assert {access.instruction for access in pairs} == {
        "ld.relaxed.sys.global.v2.b64", "st.relaxed.sys.global.v2.b64",
    }  # fmt: skip
    assert {access.num_bytes for access in pairs} == {16}
    # a warp's threads have consecutive pairs at once, and so whole lines
    layouts = dict(re.findall(r"^(#blocked\d*) = (.*)$", compiled.asm["ttgir"], re.MULTILINE))
    moved = [line for line in compiled.asm["ttgir"].splitlines() if ".relaxed.sys.global.v2.b64" in line]
    for layout in set(re.findall(r"#blocked\d*", "".join(moved))) if way == LL128 else ():
        assert "sizePerThread = [1], threadsPerWarp = [32]" in layouts[layout]


def test_every_kernel_has_an_arm() -> None:
    declared = {
        value.name
        for module in pkgutil.iter_modules(epcomm.kernels.gpu.__path__)
        for value in vars(importlib.import_module(f"epcomm.kernels.gpu.{module.name}")).values()
        if isinstance(value, Kernel)
    }
    assert {arm.name for arm in FEW.values()} == declared
    assert set(FEW) <= set(ALL)


# ---- what the checks are worth: code that has each defect


@device
def copy_vector(to, source, num_bytes, KNOWN: tl.constexpr, WIDE: tl.constexpr):
    at = tl.arange(0, 1024)
    if WIDE:
        if KNOWN:
            num_bytes = num_bytes // 16 * 16
        source, to = source.to(tl.pointer_type(tl.int32)), to.to(tl.pointer_type(tl.int32))
        values = tl.load(tl.multiple_of(source, 16) + at, mask=at < num_bytes // 4)
        tl.store(tl.multiple_of(to, 16) + at, values, mask=at < num_bytes // 4)


@kernel("aligned", programs=one)
def aligned(ctx, args, num_bytes):
    copy_vector(ctx, args, num_bytes, True, True)


@kernel("length_not_known", programs=one)
def length_not_known(ctx, args, num_bytes):
    copy_vector(ctx, args, num_bytes, False, True)


@kernel("signals_to_its_gpu", programs=one)
def signals_to_its_gpu(ctx, args):
    tl.atomic_xchg(ctx.to(tl.pointer_type(tl.int64)), args, sem="release", scope="gpu")


@kernel("reads_a_stale_line", programs=one)
def reads_a_stale_line(ctx, args):
    value = tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [args], tl.int64, is_pure=False, pack=1)
    set_word(ctx, 0, value)


@kernel("reads_generically", programs=one)
def reads_generically(ctx, args):
    value = tl.inline_asm_elementwise("ld.b64 $0, [$1];", "=l,l", [args], tl.int64, is_pure=False, pack=1)
    set_word(ctx, 0, value)


@kernel("row_in_32_bits", programs=one)
def row_in_32_bits(ctx, args):
    set_word(ctx, 0, load64(args + (load32(ctx) * 7168).to(tl.int64)))


DEFECTS = [
    (aligned, []),
    (length_not_known, ["8 accesses of a wide branch", "moves payload, but with 0 wide loads"]),
    (signals_to_its_gpu, ["1 acquires or releases aren't at system scope"]),
    (reads_a_stale_line, ["1 loads take the non-coherent path"]),
    (reads_generically, ["1 accesses have no state space"]),
    (row_in_32_bits, ["1 products in 32 bits"]),
    (replace(FEW["combine IN=bf16 OUT=bf16 RANKS=8 SUMMED_HERE=False"], max_registers=48), ["uses local memory"]),
]


@pytest.mark.parametrize("arm, beginnings", DEFECTS, ids=[arm.name for arm, _ in DEFECTS])
def test_defect_is_found(arm: Kernel, beginnings: list[str]) -> None:
    defects = compile_arm(arm, "sm_90").defects()
    assert len(defects) == len(beginnings), defects
    assert all(defect.startswith(beginning) for defect, beginning in zip(defects, beginnings)), defects


def test_signal_by_multicast() -> None:
    arm = compile_arm(signal_everyone, "sm_90")
    assert arm.multimem == ("multimem.red.release.sys.global.add.u64",)
    assert arm.defects() == []


def test_unknown_arch_is_refused() -> None:
    with pytest.raises(ConfigError, match="sm_80, sm_90, sm_100"):
        compile_arm(aligned, "sm_70")


def test_words_of_ptx() -> None:
    text = """
        .loc 1 3 5
        // begin inline asm
        mov.u32 %r1, 0x0;
        .loc 1 4 5
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
        // end inline asm
        ld.global.v2.b64 {%rd1, %rd2}, [%rd3];
        ld.shared.b64 %rd4, [%r5];
        @%p2 atom.global.gpu.acq_rel.add.u64 %rd5, [%rd6], %rd7;
        st.release.sys.global.u64 [%rd6], %rd7;
        fence.acq_rel.sys;
        // ld.global.b8 in a comment
        .file 1 "/nowhere.py"
    """
    found = ptx.accesses(text)
    assert [(access.num_bytes, access.order, access.scope) for access in found] == [
        (16, "", ""), (16, "", ""), (8, "acq_rel", "gpu"), (8, "release", "sys"), (0, "acq_rel", "sys"),
    ]  # fmt: skip
    assert {(access.file, access.line, access.function, access.branch) for access in found} == {
        ("/nowhere.py", 3, "", "")
    }


def test_words_of_ptxas() -> None:
    log = """    24 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
        ptxas info    : Used 64 registers, used 1 barriers, 24 bytes cumulative stack size"""
    assert ptx.resources(log) == ptx.Resources(registers=64, stack_bytes=24, spill_stores=12, spill_loads=16)
    with pytest.raises(ValueError, match="said nothing"):
        ptx.resources("ptxas info    : 0 bytes gmem")


# ---- interpreted, at addresses that 32 bits don't reach


def test_far_addresses() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, TESTS / "far_addresses.py"], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (result.returncode, result.stdout.count(": ok")) == (0, 5), result.stderr


# ---- the command


def test_command(tmp_path: Path) -> None:
    file = tmp_path / "aot.json"
    options = ["aot", "--arch", "sm_90", "--arch", "sm_80", "--only", "send", "--workers", "1", "--json", str(file)]
    result = runner.invoke(app, options, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "2 of 2 arms compiled" in result.output
    document = json.loads(file.read_text())
    assert [(arm["kernel"], arm["arch"]) for arm in document["arms"]] == [("send", "sm_90"), ("send", "sm_80")]
    assert document["failures"] == [] and document["triton"] == triton.__version__


def test_command_fails_on_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    good = compile_arm(aligned, "sm_90")
    bad = replace(good, kernel="send", arm="", spill_stores=8)
    monkeypatch.setattr(
        epcomm.cli.aot, "compile_all", lambda jobs, workers: [(jobs[0][0], bad), (jobs[0][0], OSError("full"))]
    )
    result = runner.invoke(app, ["aot", "--only", "send"])
    assert result.exit_code == 1
    assert "send on sm_90: uses local memory: 0 bytes of stack, 8 bytes spilled" in result.output.replace("\n", " ")
    assert "OSError: full" in result.output and "2 defects" in result.output


@pytest.mark.parametrize("options", [["--arch", "sm_70"], ["--only", "nothing"], ["--workers", "0"]])
def test_command_refuses(options: list[str]) -> None:
    assert runner.invoke(app, ["aot", *options]).exit_code == 2


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("modules", None, "pip install 'epcomm[gpu]'"),
        ("version", "3.5.1", "needs Triton 3.6 or newer; this is 3.5.1"),
        ("interpret", True, "unset it to compile"),
    ],
)
def test_command_needs_a_compiler(name: str, value: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "modules":
        monkeypatch.setitem(sys.modules, "triton", None)
    elif name == "version":
        monkeypatch.setattr(triton, "__version__", value)
    else:
        monkeypatch.setattr(triton.knobs.runtime, "interpret", value)
    result = runner.invoke(app, ["aot"], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and message in result.output
