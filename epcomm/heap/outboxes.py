"""Outboxes of a rank (see `device.cpu.network`), as the host sees them: what all ways to other hosts have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np

from epcomm.device.cpu import network
from epcomm.errors import TimeoutError


class Outboxes:
    """An outbox for each of `ranks`; ``address`` is what kernels take: of outboxes, by rank."""

    def __init__(self, ranks: Iterable[int]):
        self.of_rank = {rank: np.zeros(network.OUTBOX_WORDS, dtype=np.int64) for rank in sorted(ranks)}
        self._addresses = np.zeros(max(self.of_rank) + 1, dtype=np.int64)
        for rank, outbox in self.of_rank.items():
            self._addresses[rank] = outbox.ctypes.data
        self.address = self._addresses.ctypes.data
        self._write_marker = network.load_write_marker()

    def settle(self, mark: int, arrived: Callable[[int], int], timeout: float) -> None:
        """Collective: returns once all that any rank wrote down before has arrived here. Raises `TimeoutError`.

        Peers are told `mark`, which is higher than the one before; `arrived`: what a rank has told last.
        """
        deadline, untold = time.monotonic() + timeout, set(self.of_rank)
        while late := untold | {rank for rank in self.of_rank if arrived(rank) < mark}:
            untold = {rank for rank in untold if not self._write_marker(self.of_rank[rank].ctypes.data, mark)}
            if time.monotonic() > deadline:
                raise TimeoutError(f"what goes to or comes from rank(s) {sorted(late)} did not all arrive in time")
            time.sleep(0.001)

    def drain(self, timeout: float) -> None:
        """Returns once all that was written down before has been read. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        written = {rank: int(outbox[network.WRITTEN]) for rank, outbox in self.of_rank.items()}
        while late := [rank for rank, number in written.items() if self.of_rank[rank][network.TAKEN] < number]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"what goes to rank(s) {late} was not all taken in time")
            time.sleep(0.001)

    def stop(self) -> None:
        """What is complete is sent, then threads that send end."""
        stop = network.load_stop_outbox()
        for outbox in self.of_rank.values():
            stop(outbox.ctypes.data)
