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
        address = int(context[control.PEERS + size + rank]) + control.FAILURE
        self._context, self._words = context, (ctypes.c_int64 * control.FAILURE_WORDS).from_address(address)

    @property
    def is_set(self) -> bool:
        """True if a launch has been stopped since the last `take`."""
        return self._words[0] != control.OK

    def take(self, fingerprint: int) -> int:
        """The status of what was launched, whose details go to the context block. The next launch starts afresh.

        Counts the operation as the kernels do: unless it was aborted before it began, or has no sequence.
        """
        status, *details = self._words
        self._words[0] = control.OK
        if status not in (control.OK, control.ABORTED):
            self._context[list(_CONTEXT_WORDS)] = details
        if fingerprint and status != control.ABORTED:
            self._context[control.SEQUENCE] += 1
        return status
