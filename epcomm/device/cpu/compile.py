"""Compiles kernels to machine code once per machine and source tree, and keeps the result on disk.

Numba's own cache looks only at the file that holds a function, so editing a primitive would leave stale kernels
behind. Here the cache directory is named by a hash of every source a kernel can be made from, the versions of the
compiler, and the CPU. A lock file per kernel lets one process compile while the others wait for its result.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy
from numba import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache

_PACKAGE = Path(__file__).resolve().parents[2]
#: what a kernel can be made from: not the other target's
_SOURCES = ("device/*.py", "device/cpu/*.py", "kernels/protocol/*.py", "kernels/cpu/*.py", "collectives/plan/passes.py")

#: ``int64 kernel(int64 ctx, int64 args, int64 program, int64 num_programs)``
KERNEL_SIGNATURE = types.int64(types.int64, types.int64, types.int64, types.int64)

#: Decorates a function that kernels call; it is compiled into each of them.
device = numba.njit(nogil=True, error_model="numpy")


@functools.cache
def cache_directory() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/epcomm/<hash>``, or under the home or temporary folder."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(str(path.relative_to(_PACKAGE)).encode())
            digest.update(path.read_bytes())
    cpu = llvm.get_host_cpu_name() + llvm.get_host_cpu_features().flatten()
    digest.update(repr((numba.__version__, llvmlite.__version__, numpy.__version__, cpu)).encode())
    candidates = [Path(tempfile.gettempdir()) / f"epcomm-cache-{os.getuid()}"]
    with contextlib.suppress(RuntimeError):  # no home directory
        candidates.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "epcomm")
    for base in candidates:
        path = base / digest.hexdigest()[:20]
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _is_private(base) and os.access(path, os.W_OK):
                return path
    raise OSError(f"no private, writable directory for compiled kernels: tried {', '.join(map(str, candidates))}")


def _is_private(directory: Path) -> bool:
    """True if no other user could have put machine code there."""
    status = directory.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


class _Locator:
    """Places a function's cache files by its epcomm name; the directory already stands for the sources."""

    def __init__(self, name: str):
        self._name = name
        self._py_file = name  # Numba names it in warnings

    def ensure_cache_path(self) -> None:
        pass

    def get_cache_path(self) -> str:
        return str(cache_directory())

    def get_source_stamp(self) -> str:
        return "epcomm"

    def get_disambiguator(self) -> str:
        return self._name


class _Cache(FunctionCache):
    """A `FunctionCache` keyed by name and signature. Functions made by a factory get one name per set of arguments."""

    def __init__(self, function: Callable[..., Any], name: str):
        class Implementation(CompileResultCacheImpl):
            def __init__(self, py_func: Callable[..., Any]):
                self._lineno = py_func.__code__.co_firstlineno
                self._locator = _Locator(name)
                self._filename_base = self.get_filename_base("kernel", "")

        self._impl_class = Implementation
        self._epcomm_name = name
        super().__init__(function)

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (sig, codegen.magic_tuple(), self._epcomm_name)


def _compile_once(name: str, compile_function: Callable[[], Any]) -> Any:
    """Runs `compile_function` while holding the lock of `name`: the first process compiles, the others load."""
    with open(cache_directory() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compile_function()


class Kernel:
    """A function compiled to a C function pointer when its `address` is first asked for."""

    def __init__(self, function: Callable[..., Any], name: str, signature: Any, is_single: bool):
        function.__qualname__ = name  # Numba names machine code by it: two of a factory's closures must not share it
        self.function, self.name, self.signature, self.is_single = function, name, signature, is_single

    @functools.cached_property
    def _compiled(self) -> Any:
        # cfunc() compiles where it is called, so the object is built by hand in order to set its cache first.
        from numba.core.ccallback import CFunc

        compiled = CFunc(
            self.function, (self.signature.args, self.signature.return_type), {}, {"error_model": "numpy"}
        )
        compiled._cache = _Cache(self.function, self.name)
        _compile_once(self.name, compiled.compile)
        return compiled

    @property
    def address(self) -> int:
        return self._compiled.address


def kernel(
    name: str, signature: Any = KERNEL_SIGNATURE, *, is_single: bool = False
) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares a kernel. `name` must tell apart everything a factory varies; `is_single`: it is run as one program."""
    return lambda function: Kernel(function, name, signature, is_single)


def host_function(name: str, signature: Any) -> Callable[[Callable[..., Any]], Callable[[], Any]]:
    """Declares a compiled function that Python calls, without the GIL; the result is a function that loads it."""

    def declare(function: Callable[..., Any]) -> Callable[[], Any]:
        function.__qualname__ = name

        @functools.cache
        def load() -> Any:
            dispatcher = numba.njit(nogil=True, error_model="numpy")(function)
            dispatcher._cache = _Cache(function, name)
            _compile_once(name, lambda: dispatcher.compile(signature))
            dispatcher.disable_compile()
            return dispatcher

        return load

    return declare
