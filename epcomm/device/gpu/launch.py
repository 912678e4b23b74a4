"""The host's side of a launch, whoever runs the kernel: who may launch, and what stopped the programs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.launch import load_claim, load_leave
from epcomm.heap.private import MirroredMemory

_CONTEXT_WORDS = control.FAILED_PEER, control.FAILED_SITE, control.FAILED_WANTED, control.FAILED_FOUND


def launch(ctx: MirroredMemory, args: MirroredMemory, fingerprint: int, run: Callable[[], object]) -> int:
    """Runs `run`, which launches a kernel, as the next operation of the context; returns a status."""
    block = ctx.array.view(np.int64)
    if block[control.IS_CLOSED]:
        return control.CLOSED
    if not load_claim()(block.ctypes.data):
        return control.OCCUPIED
    try:
        failure = _FailureWords(block)
        if status := failure.before_launch():
            return status
        args.publish()
        if fingerprint:
            block[control.SEQUENCE] += 1  # as the kernel does
        run()
        return failure.take()
    except KeyboardInterrupt:
        return control.INTERRUPTED
    finally:
        load_leave()(block.ctypes.data)


class _FailureWords:
    """What the programs of a launch leave for the host when they stop, in the control region of their rank.

    `context` is the host's view of the rank's context block.
    """

    def __init__(self, context: np.ndarray):
        size, rank = int(context[control.SIZE]), int(context[control.RANK])
        region = int(context[control.PEERS + size + rank])
        self._context = context
        self._words = (ctypes.c_int64 * control.FAILURE_WORDS).from_address(region + control.FAILURE)
        self._abort = ctypes.c_int64.from_address(region + control.ABORT_WORD)

    def before_launch(self) -> int:
        """Why nothing is to be launched: an earlier launch was stopped, or the abort word is up. OK if neither."""
        status = self.take()
        is_aborted = self._abort.value >> control.GENERATION_SHIFT >= self._context[control.GENERATION]
        return control.ABORTED if status == control.OK and is_aborted else status

    def take(self) -> int:
        """The status that stopped a launch since the last `take`, else OK; its details go to the context block."""
        status, *details = self._words
        self._words[0] = control.OK
        if status not in (control.OK, control.ABORTED):
            self._context[list(_CONTEXT_WORDS)] = details
        return status
