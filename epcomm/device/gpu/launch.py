"""The host's side of a launch, whoever runs the kernel: who may launch, and what stopped the programs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.launch import load_claim, load_leave
from epcomm.heap.private import MirroredMemory

#: what kernels leave for a later launch to tell, if the host doesn't wait for them
_TOLD_LATER = control.CAPACITY_BEFORE, control.BAD_VALUE_BEFORE
_CONTEXT_WORDS = control.FAILED_PEER, control.FAILED_SITE, control.FAILED_WANTED, control.FAILED_FOUND


def launch(
    ctx: MirroredMemory,
    args: MirroredMemory,
    fingerprint: int,
    is_captured: bool,
    run: Callable[[], object],
) -> int:
    """Runs `run`, which launches a kernel, as the next operation of the context; returns a status.

    A launch that is captured happens later and any number of times: nothing is counted or known of it here.
    """
    block = ctx.array.view(np.int64)
    if block[control.IS_CLOSED]:
        return control.CLOSED
    if not load_claim()(block.ctypes.data):
        return control.OCCUPIED
    try:
        failure = _FailureWords(block)
        if status := failure.before_launch():
            return status
        args.publish_once()
        if fingerprint and not is_captured:
            block[control.SEQUENCE] += 1  # as the kernel does
        run()
        return control.OK if is_captured else failure.after_launch()
    except KeyboardInterrupt:
        return control.INTERRUPTED
    finally:
        load_leave()(block.ctypes.data)


def status_before(ctx: MirroredMemory) -> int:
    """Why the next launch of this context would fail: OK, or what earlier ones have left."""
    return _FailureWords(ctx.array.view(np.int64)).before_launch()


class _FailureWords:
    """What the programs of a launch leave for the host when they stop, in the control region of their rank.

    `context` is the host's view of the rank's context block.
    """

    def __init__(self, context: np.ndarray):
        size, rank = int(context[control.SIZE]), int(context[control.RANK])
        region = int(context[control.PEERS + size + control.WINDOW_WORDS + rank])
        self._context = context
        self._words = (ctypes.c_int64 * control.FAILURE_WORDS).from_address(region + control.FAILURE)
        self._abort = ctypes.c_int64.from_address(region + control.ABORT_WORD)

    def before_launch(self) -> int:
        """Why nothing is to be launched: an earlier launch was stopped, or the abort word is up. OK if neither."""
        status = self.take()
        is_aborted = self._abort.value >> control.GENERATION_SHIFT >= self._context[control.GENERATION]
        return control.ABORTED if status == control.OK and is_aborted else status

    def after_launch(self) -> int:
        """What is known to have stopped the launch by now. What is to be told later stays."""
        return control.OK if self._words[0] in _TOLD_LATER else self.take()

    def take(self) -> int:
        """The status that stopped a launch since the last `take`, else OK; its details go to the context block."""
        status, *details = self._words
        self._words[0] = control.OK
        if status not in (control.OK, control.ABORTED):
            self._context[list(_CONTEXT_WORDS)] = details
        return status
