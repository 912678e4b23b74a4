"""Cuts the functions that kernels call out of NVSHMEM's device library, once per machine.

The library is 30 to 50 MB, and Triton reads what it links with whenever it compiles a kernel. `nvshmem_shim.mlir` calls
a few functions of it; here Triton's LLVM links both, drops all that isn't reached and optimises the rest: about 1 MB of
text, which kernels are linked with instead.

These are internals of Triton (`triton._C.libtriton`), so nothing else in the package touches them: the same four calls
that its own compiler makes for a kernel, with a module of ours. Nothing of Triton is replaced while they run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
from pathlib import Path

import triton

from epcomm.errors import UnsupportedError

_SHIM = Path(__file__).with_name("nvshmem_shim.mlir")
_TRIPLE = "nvptx64-nvidia-cuda"
_UNDEFINED = re.compile(r"^declare [^\n]*@(nvshmem\w*)\(", re.MULTILINE)


def nvshmem_slice(library: Path, version: str, arch: str) -> Path:
    """The slice of a device library, from Triton's cache folder if some process made it before."""
    shim = _SHIM.read_text(encoding="utf-8")
    key = hashlib.sha256(f"{version} {arch} {triton.__version__} {shim}".encode()).hexdigest()[:16]
    folder = Path(triton.knobs.cache.dir) / "epcomm"
    path = folder / f"nvshmem-{version}-{arch}-triton-{triton.__version__}-{key}.ll"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed: one process makes it, the others wait for it
        if not path.is_file():
            _write(path, _linked(library, version, arch))
    return path


def _write(path: Path, text: str) -> None:
    """Writes a file that is there as a whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _linked(library: Path, version: str, arch: str) -> str:
    """LLVM's text of the shim and all that it reaches in the library."""
    from triton._C.libtriton import ir, llvm, nvidia

    dialects = ir.context()
    ir.load_dialects(dialects)
    nvidia.load_dialects(dialects)
    shim = ir.parse_mlir_module(str(_SHIM), dialects)
    llvm.init_targets()
    context = llvm.context()
    module = llvm.to_module(shim, context)
    nvidia.set_short_ptr()  # or the layouts of kernels and slice differ
    llvm.attach_datalayout(module, _TRIPLE, arch, "")
    try:
        llvm.link_extern_libs(module, [str(library)])
    except Exception as error:  # whatever Triton's bindings make of LLVM's complaint
        raise UnsupportedError(
            f"Triton {triton.__version__} can't read the device library of NVSHMEM {version} ({error}): its LLVM is "
            "older than the one that wrote it. Install a newer Triton, or an older nvidia-nvshmem-cu12"
        ) from error
    llvm.optimize_module(module, llvm.OPTIMIZE_O3)
    text = str(module)
    if missing := sorted(set(_UNDEFINED.findall(text))):
        raise UnsupportedError(f"the device library of NVSHMEM {version} for {arch} has no {', '.join(missing)}")
    return text
