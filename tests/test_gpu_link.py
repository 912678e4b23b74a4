"""Kernels with a network, to machine code: linked with NVSHMEM's and NCCL's device libraries, without a GPU.

What needs the wheels (epcomm[link]) is skipped without them; `make test-gpu-link` installs and requires them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from network_kernels import KERNELS, compiled
from network_wheels import WHEELS, need

from epcomm.cli.aot import compile_named
from epcomm.device.gpu import bitcode, nvshmem_slice, ptx
from epcomm.device.gpu.aot import CompiledArm
from epcomm.device.gpu.bitcode import NETWORKS, libraries
from epcomm.device.gpu.compile import Kernel
from epcomm.errors import UnsupportedError
from epcomm.kernels.gpu.arms import arms, link_arms

ARCHITECTURES = ("sm_90", "sm_100")
#: what each kernel calls
CALLS = {
    "put": {"put"},
    "signal": {"raise"},
    "complete": {"quiet"},
    "step": {"put", "raise", "quiet"},
}
GIN_CALLS = {"put": "put", "raise": "add", "quiet": "flush"}
#: bytes of stack that the libraries' functions take
MOST_STACK = 256


# ---- to machine code


@pytest.fixture(scope="module")
def linking(compilers: ProcessPoolExecutor, request: pytest.FixtureRequest) -> dict[tuple[str, ...], Future]:
    """Each case that a test of this run asks for, in the tests' order."""
    cases = [item.callspec.params["case"] for item in request.session.items if "linking" in item.fixturenames]
    return {case: compilers.submit(compiled, *case) for case in dict.fromkeys(cases)}


def is_reduced(name: str, network: str, arch: str) -> bool:
    """Whether a case is in the reduced matrix: each function and each library once, each architecture once."""
    return network != "nvshmem" or (name, arch) in {("step", "sm_90"), ("signal", "sm_90")}


CASES = [
    pytest.param((name, network, arch), marks=() if is_reduced(name, network, arch) else pytest.mark.slow)
    for network in NETWORKS
    for arch in ARCHITECTURES
    for name in KERNELS
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_kernel(case: tuple[str, str, str], linking: dict[tuple[str, ...], Future], request: Any) -> None:
    name, network, arch = case
    need(request, network)
    arm, states = linking[case].result()
    if network == "nvshmem":
        assert "nvshmemi_device_state_d" in states  # `cumodule_init` looks for it
    else:
        assert states == set()
    check_linked(arm, KERNELS[name].made_for(NETWORK=network), CALLS[name])


def check_linked(arm: CompiledArm, kernel: Kernel, calls: set[str]) -> None:
    """The code calls these of its network's functions and has all that they need; and it is as good as any other."""
    names = GIN_CALLS if kernel.network == "gin" else {}
    assert arm.calls == tuple(sorted(f"epcomm_{kernel.network}_{names.get(call, call)}" for call in calls))
    assert (arm.undefined, arm.unreleased_puts) == ((), 0)
    assert (arm.spill_stores, arm.spill_loads) == (0, 0)
    assert arm.stack_bytes <= MOST_STACK
    assert arm.registers <= kernel.options_for(arm.arch)["maxnreg"]
    assert arm.defects() == []
    assert arm.cubin_bytes > 0


@pytest.mark.parametrize("name", KERNELS)
def test_no_network_leaves_nothing(name: str) -> None:
    arm, states = compiled(name, "none", "sm_90")
    assert (arm.calls, arm.undefined, states, arm.stack_bytes) == ((), (), set(), 0)
    assert "extern_libs" not in KERNELS[name].made_for(NETWORK="none").options_for("sm_90")


#: what each kernel with a network calls
LINKED_CALLS = {
    "barrier": {"raise"},
    "send": {"put", "raise", "quiet"},
    "recv": {"raise"},
    "exchange_network": {"put", "raise", "quiet"},
    "allreduce_rails": {"put", "raise", "quiet"},
    "broadcast_network": {"put", "raise", "quiet"},
    "execute_plan": {"put", "raise", "quiet"},
    "exchange_counts": {"put", "raise", "quiet"},
    "dispatch": {"put", "raise", "quiet"},
    "combine": {"put", "raise", "quiet"},
    "combine_receive": {"raise"},
}
LINK_ARMS = [
    pytest.param((name, arch), marks=() if arch == "sm_90" and name in link_arms() else pytest.mark.slow)
    for arch in ARCHITECTURES
    for name, kernel in link_arms(everything=True).items()
    if kernel.runs_on(arch)
]


@pytest.fixture(scope="module")
def linking_arms(compilers: ProcessPoolExecutor, request: pytest.FixtureRequest) -> dict[tuple[str, ...], Future]:
    """Each arm that a test of this run asks for, in the tests' order, where its network's wheel is."""
    jobs = [item.callspec.params["job"] for item in request.session.items if "linking_arms" in item.fixturenames]
    return {job: compilers.submit(compile_named, *job) for job in dict.fromkeys(jobs)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("job", LINK_ARMS, ids="-".join)
def test_arm(job: tuple[str, str], linking_arms: dict[tuple[str, ...], Future], request: Any) -> None:
    kernel = link_arms(everything=True)[job[0]]
    need(request, kernel.network)
    check_linked(linking_arms[job].result(), kernel, LINKED_CALLS[kernel.name])


def test_every_kernel_with_a_network_has_an_arm() -> None:
    """Few or all, of both libraries; and every constant NETWORK that a kernel declares is in one."""
    declared = {kernel.name for kernel in arms().values() if "NETWORK" in kernel.function.arg_names}
    for network in NETWORKS:
        for everything in (False, True):
            found = link_arms(everything).values()
            assert {kernel.name for kernel in found if kernel.network == network} == declared == set(LINKED_CALLS)
    assert set(link_arms()) <= set(link_arms(everything=True))


def test_docs_quote_the_committed_run() -> None:
    """`epcomm aot --network ... --json benchmarks/results/gpu_link.json` wrote what docs/transports.md says of arms."""
    root = Path(__file__).resolve().parent.parent
    document = json.loads((root / "benchmarks" / "results" / "gpu_link.json").read_text())
    found = {
        (f"{arm['kernel']} {arm['arm']}", arm["arch"]): (arm["registers"], arm["cubin_bytes"], arm["spill_stores"])
        for arm in document["arms"]
    }
    assert document["failures"] == [] and found.keys() == {(n, a) for n in link_arms() for a in ARCHITECTURES}
    pair = r"(\d+) / (\d+)"
    quoted = re.findall(rf"^\| `(.+)` \| {pair} \| {pair} \|$", (root / "docs" / "transports.md").read_text(), re.M)
    assert len(quoted) == len(link_arms())
    for name, *numbers in quoted:
        older, newer = (found[name, arch] for arch in ARCHITECTURES)
        assert [*map(int, numbers)] == [older[0], newer[0], older[1], newer[1]] and older[2] == newer[2] == 0


def test_put_without_a_fence_is_found() -> None:
    fence, store, label = "\tfence.acq_rel.sys; mov.u32 %r1, 0;", "\tst.global.b32 [%rd1], %r1;", "$L__BB0_3:"
    call = "\tcall.uni (retval0), epcomm_gin_put, (param0);"
    narrow = fence.replace("sys", "gpu")

    def count(*lines: str) -> int:
        return ptx.unreleased_puts("\n".join(lines))

    assert count(fence, "$L__tmp3:", "\tst.param.b64 [param0], %rd1;", call) == 0
    assert count(store, fence, call) == 0
    assert [count(call), count(narrow, call), count(fence, store, call), count(fence, label, call)] == [1, 1, 1, 1]
    assert count(fence, call, store, call) == 1
    assert count(fence, store, call.replace("put", "flush")) == 0


def test_function_that_no_library_has_is_found() -> None:
    text = ".extern .func  (.param .b32 func_retval0) vprintf\n(\n.extern .func nvshmem_gone\n(\n.func there\n("
    assert ptx.undefined(text) == ("nvshmem_gone",)


def test_interpreted_kernels_do_without_a_network() -> None:
    code = (
        "from network_kernels import complete; complete.function[(1,)](0, 0, NETWORK='none');"
        "from epcomm.device.gpu.machine import INTERPRETED; print(INTERPRETED)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment,
        cwd=Path(__file__).parent,
    )  # fmt: skip
    assert (result.returncode, result.stdout.strip()) == (0, "True"), result.stderr


# ---- what the shims assume


def nccl_text(symbol: str, folder: Path) -> str:
    """LLVM's text of a function of NCCL's bitcode and all that it reaches."""
    from triton._C.libtriton import ir, llvm

    caller = folder / "caller.mlir"
    caller.write_text(
        f"llvm.func @{symbol}()\nllvm.func @call() {{\n  llvm.call @{symbol}() : () -> ()\n  llvm.return\n}}\n"
    )
    dialects, context = ir.context(), llvm.context()
    ir.load_dialects(dialects)
    llvm.init_targets()
    module = llvm.to_module(ir.parse_mlir_module(str(caller), dialects), context)
    llvm.attach_datalayout(module, "nvptx64-nvidia-cuda", "sm_90", "")
    llvm.link_extern_libs(module, [libraries("gin", "sm_90")["nccl"]])
    return str(module)


def signature(text: str, keyword: str, symbol: str) -> list[str]:
    """Types of a function's result and parameters, and which of them are passed as a copy."""
    found = re.search(rf"^{keyword} [^\n]*?(\S+) @{symbol}\((.*?)\)(?: [^()\n]*)?$", text, re.MULTILINE)
    assert found, symbol
    inner = found[2]
    while (plain := re.sub(r"\([^()]*\)", "", inner)) != inner:
        inner = plain
    words = [re.findall(r"byval|zeroext|\b(?:ptr|i\d+)\b", parameter) for parameter in inner.split(",")]
    return [found[1], *map(" ".join, words)]


@pytest.mark.parametrize("symbol", ["ncclGinPut_v3", "ncclGinSignal_v3", "ncclGinFlush", "ncclGin_C_init"])
def test_gin_shim_declares_what_nccl_defines(symbol: str, request: Any, tmp_path: Path) -> None:
    need(request, "gin")
    shim = Path(libraries("gin", "sm_90")["gin"]).read_text()
    defined = signature(nccl_text(symbol, tmp_path), "define", symbol)
    assert signature(shim, "declare", symbol) == defined and "ptr" in defined


def test_structs_of_nccl_are_as_large_as_the_shim_has_them(request: Any, tmp_path: Path) -> None:
    need(request, "gin", with_bindings=True)
    import nccl.bindings.nccl

    text = nccl_text("ncclGinSignal_v3", tmp_path)
    assert "%struct.ncclTeam = type { i32, i32, i32 }" in text
    assert '%struct.ncclCoopAny = type { %"struct.ncclCoopAny::Storage", ptr }' in text
    assert '%"struct.ncclCoopAny::Storage" = type { [16 x i8] }' in text
    made = re.search(r"^define [^\n]*@ncclGin_C_init\(([^\n]*)", nccl_text("ncclGin_C_init", tmp_path), re.MULTILINE)
    assert made
    assert max(map(int, re.findall(r"\(\d+, (\d+)\)", made[1]))) <= 128  # bytes of an ncclGin_C that are written
    device_bytes = re.search(r"dereferenceable\((\d+)\)", made[1])
    assert device_bytes and int(device_bytes[1]) == nccl.bindings.nccl.dev_comm_dtype.itemsize


def test_networks_without_a_library_are_not_linked() -> None:
    assert libraries("none", "sm_90") == libraries("remote", "sm_90") == {}


def test_registers_that_a_launch_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epcomm.device.gpu.compile.libraries", lambda network, arch: {})
    step = KERNELS["step"].made_for(NETWORK="nvshmem")
    for num_warps, registers in ((1, 255), (4, 255), (8, 255), (16, 128)):
        assert replace(step, num_warps=num_warps).options_for("sm_90")["maxnreg"] == registers
    assert step.made_for(NETWORK="remote").options_for("sm_90")["maxnreg"] == step.max_registers


def test_own_code_leaves_out_libraries() -> None:
    text = """.func of_a_library(.param .b64 a)
        .visible .entry kernel(
        call.uni (retval0), of_a_library, (param0);
        ld.global.b32 %r1, [%rd1];
        }
        .func of_a_library(.param .b64 a)
        call.uni another, (param0);
        ld.b32 %r1, [%rd1];
        .file 1 "/kernel.py"
    """.replace("        ", "\t").replace("\t.", ".")
    code = ptx.own_code(text)
    assert ptx.calls(code) == ("of_a_library",)
    assert ptx.generic_accesses(code) == 0 and ptx.generic_accesses(text) == 1
    assert '.file 1 "/kernel.py"' in code


# ---- finding the libraries


@pytest.fixture()
def fresh() -> Iterator[None]:
    """Nothing that was found before is remembered, or afterwards."""
    bitcode._nvshmem.cache_clear()
    bitcode._gin.cache_clear()
    yield
    bitcode._nvshmem.cache_clear()
    bitcode._gin.cache_clear()


@pytest.mark.parametrize("network, wheel", WHEELS.items())
def test_wheel_is_missing(network: str, wheel: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(name: str) -> None:
        raise bitcode.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bitcode.metadata, "distribution", not_found)
    with pytest.raises(UnsupportedError, match=f"pip install nvidia-{wheel}-cu1[23]"):
        KERNELS["put"].made_for(NETWORK=network).options_for("sm_90")


@pytest.mark.parametrize(
    "contents, library, message",
    [
        (None, "2.32.3", "2.28.9 has no device bitcode, which came with 2.30.7: pip install -U"),
        (b"ncclGinPut_v2 ncclGinFlush", "2.28.9", "has no ncclGinPut_v3, ncclGinSignal_v3, ncclGin_BackendMaskILj60E"),
        (b" ".join(bitcode._GIN_SYMBOLS), "2.32.3", "bitcode is of version 2.28.9, the NCCL that is loaded of 2.32.3"),
        (b" ".join(bitcode._GIN_SYMBOLS), "2.28.9", ""),
    ],
)
def test_nccl_is_not_the_one(
    contents: bytes | None, library: str, message: str, fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if contents is not None:
        (tmp_path / "libnccl_device.bc").write_bytes(contents)
    monkeypatch.setattr(bitcode, "installed", lambda name: ("2.28.9", tmp_path))
    monkeypatch.setattr(bitcode, "nccl_version", lambda path: library)
    if message:
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            libraries("gin", "sm_90")
    else:
        assert list(libraries("gin", "sm_90")) == ["gin", "nccl"]  # in the order in which they are linked


def test_nccl_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="NCCL can't be loaded"):
        bitcode.nccl_version(tmp_path / "libnccl.so.2")


def test_nccl_tells_its_version(request: Any) -> None:
    need(request, "gin")
    version, folder = bitcode.installed("nccl")
    assert bitcode.nccl_version(folder / "libnccl.so.2") == version


@pytest.mark.parametrize(
    "files, arch, chosen",
    [
        (("libnvshmem_device_sm_80.bc", "libnvshmem_device_sm_90.bc"), "sm_100", ("sm_90.bc", "sm_90")),
        (("libnvshmem_device_sm_80.bc", "libnvshmem_device_sm_90.bc"), "sm_86", ("sm_80.bc", "sm_80")),
        (("libnvshmem_device.bc",), "sm_90", ("device.bc", "sm_90")),
        (("libnvshmem_device_sm_90.bc",), "sm_80", None),
    ],
)
def test_nvshmem_of_an_architecture(
    files: tuple[str, ...], arch: str, chosen: tuple[str, str] | None, fresh: None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for file in files:
        (tmp_path / file).touch()
    monkeypatch.setattr(bitcode, "installed", lambda name: ("3.8.0", tmp_path))
    monkeypatch.setattr(bitcode, "nvshmem_slice", lambda library, version, arch: (library.name, version, arch))
    if chosen is None:
        with pytest.raises(UnsupportedError, match="3.8.0 has no device bitcode for sm_80"):
            libraries("nvshmem", arch)
    else:
        file, sliced_for = chosen
        found: Any = re.match(r"\('(.*)', '3.8.0', '(.*)'\)", libraries("nvshmem", arch)["nvshmem"])
        assert found[1].endswith(file) and found[2] == sliced_for


# ---- the slice of NVSHMEM's library


@pytest.fixture()
def empty_cache(tmp_path: Path) -> Iterator[Path]:
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        yield tmp_path / "epcomm"


def test_slice_is_made_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(nvshmem_slice, "_linked", lambda library, version, arch: made.append(arch) or "text")
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(nvshmem_slice.nvshmem_slice(Path("a.bc"), "3.8.0", "sm_90")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["sm_90"] and len(paths) == 4 and len(set(paths)) == 1
    assert paths[0].read_text() == "text" and "3.8.0-sm_90-triton" in paths[0].name
    assert nvshmem_slice.nvshmem_slice(Path("a.bc"), "3.8.0", "sm_100") != paths[0]


def test_slice_that_fails_leaves_nothing(empty_cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "libnvshmem_device_sm_90.bc"
    broken.write_bytes(b"BC\xc0\xdebroken")
    with pytest.raises(UnsupportedError, match="can't read the device library of NVSHMEM 9.9 .*newer Triton"):
        nvshmem_slice.nvshmem_slice(broken, "9.9", "sm_90")
    assert [path.suffix for path in empty_cache.iterdir()] == [".lock"]


def test_slice_of_a_library_without_the_functions(empty_cache: Path, tmp_path: Path) -> None:
    library = tmp_path / "old.ll"
    library.write_text('target triple = "nvptx64-nvidia-cuda"\ndefine void @nvshmem_quiet() {\n  ret void\n}\n')
    with pytest.raises(UnsupportedError, match="has no nvshmem_fence, nvshmemx_putmem_nbi_block, nvshmemx_signal_op"):
        nvshmem_slice.nvshmem_slice(library, "3.0", "sm_90")
