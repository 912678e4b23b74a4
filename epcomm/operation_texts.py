"""The readable texts of a rank's operations, in its control region: peers find them by fingerprint after a mismatch."""

from __future__ import annotations

import hashlib

import numpy as np

from epcomm.device import control

_MESSAGES = 128  # records of point-to-point messages, whose texts may vary without end; the others are of operations


class OperationTexts:
    """What one rank calls. Each text is written once, and lost only after about a thousand other ones."""

    def __init__(self, control_region: np.ndarray):
        ring = control_region[control.TEXTS : control.TEXTS + control.TEXT_BYTES * control.NUM_TEXTS]
        self._records = ring.reshape(control.NUM_TEXTS, control.TEXT_BYTES)
        self._fingerprints: dict[str, int] = {}
        self._holders: list[str | None] = [None] * control.NUM_TEXTS
        self._next = {True: 0, False: _MESSAGES}

    def fingerprint(self, text: str, is_message: bool = False) -> int:
        """The fingerprint of `text`, which peers can read from now on."""
        known = self._fingerprints.get(text)
        return self._write(text, is_message) if known is None else known

    def _write(self, text: str, is_message: bool) -> int:
        fingerprint = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 | 1
        index = self._next[is_message]
        first, end = (0, _MESSAGES) if is_message else (_MESSAGES, control.NUM_TEXTS)
        self._next[is_message] = index + 1 if index + 1 < end else first
        forgotten = self._holders[index]
        if forgotten is not None:
            del self._fingerprints[forgotten]
        self._holders[index], self._fingerprints[text] = text, fingerprint
        encoded = text.encode()[: control.TEXT_BYTES - 16]
        record = self._records[index]
        record[16 : 16 + len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        record[:16].view(np.int64)[:] = fingerprint, len(encoded)
        return fingerprint


def find_text(ring: np.ndarray, fingerprint: int) -> str | None:
    """The text that belongs to `fingerprint` in a peer's ring, or None if the peer has forgotten it."""
    records = ring.reshape(control.NUM_TEXTS, control.TEXT_BYTES)
    for index in np.flatnonzero(records[:, :8].copy().view(np.int64)[:, 0] == fingerprint):
        length = int(records[index, 8:16].view(np.int64)[0])
        return bytes(records[index, 16 : 16 + min(length, control.TEXT_BYTES - 16)]).decode(errors="replace")
    return None
