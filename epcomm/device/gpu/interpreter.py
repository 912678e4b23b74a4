"""Runs Triton kernels on CPU memory with Triton's interpreter, one program after the other: logic without a GPU.

The interpreter keeps its state in globals, so a process can be one interpreted rank, and one operation runs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.launch import load_claim, load_leave
from epcomm.device.gpu.compile import Kernel
from epcomm.device.gpu.failure import FailureWords
from epcomm.device.gpu.machine import INTERPRETED
from epcomm.errors import UnsupportedError
from epcomm.heap.private import MirroredMemory


def require_interpreter() -> None:
    """Raises unless Triton was imported as an interpreter."""
    if not INTERPRETED:
        raise UnsupportedError("Triton was imported as a compiler: set TRITON_INTERPRET=1 before its first import")


def launch(
    ctx: MirroredMemory, kernel: Kernel, args: MirroredMemory, fingerprint: int, words: Sequence[int], num_programs: int
) -> int:
    """Runs a kernel as the next operation of the context; returns a status."""
    block = ctx.array.view(np.int64)
    if block[control.IS_CLOSED]:
        return control.CLOSED
    if not load_claim()(block.ctypes.data):
        return control.OCCUPIED
    try:
        failure = FailureWords(block)
        if status := failure.before_launch():
            return status
        args.publish()
        if fingerprint:
            block[control.SEQUENCE] += 1  # as the kernel does
        kernel.function[(kernel.programs(num_programs),)](
            ctx.address, args.address, fingerprint, *map(int, words), **kernel.constants
        )
        return failure.take()
    except KeyboardInterrupt:
        return control.INTERRUPTED
    finally:
        load_leave()(block.ctypes.data)
