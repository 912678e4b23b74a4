"""What the programs of a launch leave for the host when they stop: words in the rank's own control region."""

from __future__ import annotations

import ctypes

import numpy as np

from epcomm.device import control

_CONTEXT_WORDS = control.FAILED_PEER, control.FAILED_SITE, control.FAILED_WANTED, control.FAILED_FOUND


class FailureWords:
    """The failure words of the rank whose context block (the host's view of it) this is."""

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
