"""What a rank calls: operations, the context they run in, and their readable texts, which peers find by fingerprint."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.launch import IS_SINGLE
from epcomm.kernels.target import Kernel, Target

_MESSAGES = 128  # records of point-to-point messages, whose texts may vary without end; the others are of operations


@dataclass(slots=True)
class Operation:
    """A kernel bound to its parameters: what `Runtime.run` needs, resolved once (``kernel`` and ``handle`` of args).

    ``text`` names the operation and everything that must agree between ranks; its hash is the fingerprint.
    ``keep`` holds whatever owns memory that ``args`` points to.
    """

    code: Kernel
    args: ParameterBlock
    text: str
    fingerprint: int = 0
    keep: Any = None
    kernel: Any = field(init=False)
    handle: Any = field(init=False)

    def __post_init__(self) -> None:
        self.args.target.prepare(self.code)
        self.kernel, self.handle = self.code.address, self.args.memory.handle
        self.args.words[IS_SINGLE] = self.code.is_single


class ParameterBlock:
    """Zeroed 64-bit words: first those that a launch sets for each call, then the kernel's own, which the host sets."""

    __slots__ = ("memory", "target", "words")

    def __init__(self, target: Target, num_words: int):
        self.target = target
        self.memory = target.private(8 * max(num_words, IS_SINGLE + 1))
        self.words = self.memory.array.view(np.int64)


class Context:
    """A context block (see `device.control`): its words, for the host, and its handle, for launches."""

    __slots__ = ("__weakref__", "handle", "memory", "words")

    def __init__(self, target: Target, num_words: int):
        self.memory = target.private(8 * num_words)
        self.handle, self.words = self.memory.handle, self.memory.array.view(np.int64)

    def set_timeout(self, seconds: float) -> None:
        """How long an operation may wait."""
        self.words[control.TIMEOUT_NS] = int(seconds * 1e9)
        self.memory.publish(8 * control.TIMEOUT_NS, 8 * control.TIMEOUT_NS + 8)


class OperationTexts:
    """What one rank calls. Each text is written once, and lost only after about a thousand other ones."""

    def __init__(self, control_region: np.ndarray):
        ring = control_region[control.TEXTS : control.TEXTS + control.TEXT_BYTES * control.NUM_TEXTS]
        self._records = ring.reshape(control.NUM_TEXTS, control.TEXT_BYTES)
        self._fingerprints: dict[str, int] = {}
        self._holders: list[str | None] = [None] * control.NUM_TEXTS
        self._next = {True: 0, False: _MESSAGES}
        self._lock = threading.Lock()

    def fingerprint(self, text: str, is_message: bool = False) -> int:
        """The fingerprint of `text`, which peers can read from now on."""
        known = self._fingerprints.get(text)
        return self._write(text, is_message) if known is None else known

    def _write(self, text: str, is_message: bool) -> int:
        with self._lock:  # send and recv may run in several threads
            return self._write_record(text, is_message)

    def _write_record(self, text: str, is_message: bool) -> int:
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        fingerprint = int.from_bytes(digest, "little") & control.FINGERPRINT_MASK | 1
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
