"""Runs Triton kernels on CPU memory with Triton's interpreter, one program after the other: logic without a GPU.

The interpreter keeps its state in globals, so a process can be one interpreted rank, and one operation runs at a time.
"""

from __future__ import annotations

import ctypes
from typing import Any

from epcomm.device import control
from epcomm.device.cpu.launch import CALL_WORDS, load_claim, load_leave
from epcomm.device.gpu.compile import Kernel
from epcomm.device.gpu.machine import INTERPRETED
from epcomm.errors import UnsupportedError


def require_interpreter() -> None:
    """Raises unless Triton was imported as an interpreter."""
    if not INTERPRETED:
        raise UnsupportedError("Triton was imported as a compiler: set TRITON_INTERPRET=1 before its first import")


def launch(ctx: int, kernel: Kernel, args: int, fingerprint: int, words: tuple[int, ...], num_programs: int) -> int:
    """Runs a kernel as the next operation of the context; returns a status."""
    block = (ctypes.c_int64 * control.CONTEXT_WORDS).from_address(ctx)
    if block[control.IS_CLOSED]:
        return control.CLOSED
    if not load_claim()(ctx):
        return control.OCCUPIED
    try:
        block[control.STATUS] = control.OK
        call_words: Any = (ctypes.c_int64 * CALL_WORDS).from_address(args)
        call_words[:] = words
        grid = (kernel.programs(num_programs),)
        kernel.function[grid](ctx, args, fingerprint, *call_words, **kernel.constants)
        return block[control.STATUS]
    except KeyboardInterrupt:
        block[control.TICKET] = block[control.LEFT] = 0
        return control.INTERRUPTED
    finally:
        load_leave()(ctx)
