"""The abort word of a rank and the message beside it: how a failure reaches peers that wait, and what it says.

A rank that fails writes its message into its own control region, raises the abort word of every rank of its host, its
own first, and tells the leaders of other hosts, who do so there. The first cause in a generation of the communicator
stays.
"""

from __future__ import annotations

import numpy as np

from epcomm.device import control
from epcomm.device.cpu.launch import load_raise_abort
from epcomm.errors import EpcommError, MismatchError, PeerFailedError, PeerLostError
from epcomm.heap.cpu import SymmetricSegment
from epcomm.operation import find_text
from epcomm.world.hub import Hub

_LONGEST_ANSWER = 2.0  # seconds that an error waits for a word from another host
_KINDS = {control.PEER_MISMATCH: MismatchError}  # of errors that every rank raises alike


class AbortRegion:
    """The abort words and messages of all ranks, seen from one."""

    def __init__(self, hub: Hub, segment: SymmetricSegment):
        self._rank, self._hub, self._links, self._segment = hub.rank, hub, hub.links, segment
        self._leader = hub.leaders[hub.nodes[hub.rank]]
        self._word = segment.own.array(control.ABORT_WORD, 8).view(np.int64)
        self._raise_word = load_raise_abort()

    def is_raised(self, generation: int) -> bool:
        """True if this rank was told of a failure in this generation or a later one."""
        return int(self._word[0]) >> control.GENERATION_SHIFT >= generation

    def is_own_stop(self) -> bool:
        """True if a program of this rank has stopped the others, and nobody else knows."""
        return (int(self._word[0]) >> 16) & 0xFFFF == control.LOCAL_ABORT

    def tell_everyone(self, text: str, generation: int, reason: int) -> None:
        """Raises every rank's word, this rank's first, with `text` to be quoted."""
        encoded = text.encode()[: control.MESSAGE_BYTES - 8]
        message = self._bytes(self._rank, control.MESSAGE, control.MESSAGE_BYTES)
        message[8 : 8 + len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        message[:8].view(np.int64)[0] = len(encoded)
        self.tell_self(generation, reason, self._rank)
        self._tell_host(generation, reason, self._rank)
        self._links.tell_failure(generation, reason, encoded)

    def tell_self(self, generation: int, reason: int, culprit: int) -> None:
        """Raises this rank's word: `culprit` is gone and can't."""
        self._raise(self._rank, generation, reason, culprit)

    def relay(self, generation: int, reason: int, culprit: int, text: bytes = b"") -> None:
        """On a leader: raises its host's words for a rank of another host; `text` is what that one said."""
        slot = self._bytes(self._rank, control.RELAYED, control.RELAYED_BYTES)
        header = slot[:16].view(np.int64)
        if text and header[0] < generation:  # later ones in this generation find all words raised
            text = text[: control.RELAYED_BYTES - 16]
            slot[16 : 16 + len(text)] = np.frombuffer(text, dtype=np.uint8)
            header[:] = generation, len(text)
        self._tell_host(generation, reason, culprit)

    def error(self, where: str) -> EpcommError:
        """What this rank's raised word stands for."""
        word = int(self._word[0])
        reason, culprit = (word >> 16) & 0xFFFF, word & 0xFFFF
        if reason == control.PEER_LOST:
            return PeerLostError(f"{where}: the process of rank {culprit} ended", culprit)
        if self._segment.bases[culprit] != 0:
            message = self._bytes(culprit, control.MESSAGE, control.MESSAGE_BYTES)
        else:
            message = self._bytes(self._leader, control.RELAYED, control.RELAYED_BYTES)[8:]
        length = min(int(message[:8].view(np.int64)[0]), control.MESSAGE_BYTES - 8)
        quoted = bytes(message[8 : 8 + length]).decode(errors="replace")
        return _KINDS.get(reason, PeerFailedError)(f"{where}: rank {culprit} failed with {quoted}")

    def text_of(self, rank: int, fingerprint: int) -> str | None:
        """The text that belongs to `fingerprint`, from the ring of a rank; None if that is not on this host."""
        if not (0 <= rank < len(self._segment.bases) and self._segment.bases[rank]):
            return None
        return find_text(self._bytes(rank, control.TEXTS, control.TEXT_BYTES * control.NUM_TEXTS), fingerprint)

    def peer_text(self, rank: int, fingerprint: int) -> str | None:
        """`text_of` any rank: one on another host is asked for it, by its leader. None if it isn't known in time."""
        if self._segment.mappings[rank] is not None:
            return self.text_of(rank, fingerprint)
        leader = self._hub.leaders[self._hub.nodes[rank]]
        return self._hub.links.ask_text(leader, rank, fingerprint, _LONGEST_ANSWER)

    def _bytes(self, rank: int, offset: int, num_bytes: int) -> np.ndarray:
        mapping = self._segment.mappings[rank]
        if mapping is None:
            raise ValueError(f"rank {self._rank}: rank {rank} is on another host: its memory is not mapped here")
        return mapping.array(offset, num_bytes)

    def _tell_host(self, generation: int, reason: int, culprit: int) -> None:
        for rank in np.flatnonzero(self._segment.bases).tolist():
            self._raise(rank, generation, reason, culprit)

    def _raise(self, rank: int, generation: int, reason: int, culprit: int) -> None:
        value = generation << control.GENERATION_SHIFT | reason << 16 | culprit
        self._raise_word(int(self._segment.bases[rank]) + control.ABORT_WORD, value)
