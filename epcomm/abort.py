"""The abort word of a rank and the message beside it: how a failure reaches peers that wait, and what it says.

A rank that fails writes its message into its own control region, then raises the abort word of every rank, its own
first. The first cause in a generation of the communicator stays.
"""

from __future__ import annotations

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.launch import load_raise_abort
from epcomm.errors import EpcommError, MismatchError, PeerFailedError, PeerLostError
from epcomm.heap.cpu import SymmetricSegment

_KINDS = {control.PEER_MISMATCH: MismatchError}  # of errors that every rank raises alike


class AbortRegion:
    """The abort words and messages of all ranks, seen from one."""

    def __init__(self, rank: int, segment: SymmetricSegment):
        self._rank, self._segment = rank, segment
        self._word = segment.own.array(control.ABORT_WORD, 8).view(np.int64)
        self._raise_word = load_raise_abort()

    def is_raised(self, generation: int) -> bool:
        """True if this rank was told of a failure in this generation or a later one."""
        return int(self._word[0]) >> control.GENERATION_SHIFT >= generation

    def tell_everyone(self, text: str, generation: int, reason: int) -> None:
        """Raises every rank's word, this rank's first, with `text` to be quoted."""
        encoded = text.encode()[: control.MESSAGE_BYTES - 8]
        message = self._message(self._rank)
        message[8 : 8 + len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        message[:8].view(np.int64)[0] = len(encoded)
        for distance in range(len(self._segment.bases)):
            self._raise((self._rank + distance) % len(self._segment.bases), generation, reason, self._rank)

    def tell_self(self, generation: int, reason: int, culprit: int) -> None:
        """Raises this rank's word: `culprit` is gone and can't."""
        self._raise(self._rank, generation, reason, culprit)

    def error(self, where: str) -> EpcommError:
        """What this rank's raised word stands for."""
        word = int(self._word[0])
        reason, culprit = (word >> 16) & 0xFFFF, word & 0xFFFF
        if reason == control.PEER_LOST:
            return PeerLostError(f"{where}: the process of rank {culprit} ended", culprit)
        message = self._message(culprit)
        length = min(int(message[:8].view(np.int64)[0]), control.MESSAGE_BYTES - 8)
        quoted = bytes(message[8 : 8 + length]).decode(errors="replace")
        return _KINDS.get(reason, PeerFailedError)(f"{where}: rank {culprit} failed with {quoted}")

    def _message(self, rank: int) -> np.ndarray:
        return self._segment.mappings[rank].array(control.MESSAGE, control.MESSAGE_BYTES)

    def _raise(self, rank: int, generation: int, reason: int, culprit: int) -> None:
        value = generation << control.GENERATION_SHIFT | reason << 16 | culprit
        self._raise_word(int(self._segment.bases[rank]) + control.ABORT_WORD, value)
