"""Data movement by plain copies, for which a GPU has engines: no multiprocessor works but for the barriers.

Each rank stages bytes for its peers, in pieces, and copies what they staged for it. Edges, by barriers
  RAW  before it copies: the peers have staged the piece.
  WAR  after it has copied: the peers have read the piece; the next one may be staged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from epcomm.heap.views import memory_view
from epcomm.kernels.protocol.collectives import RECEIVE_OFFSET, SEND_OFFSET
from epcomm.operation import Operation
from epcomm.runtime import Runtime

_ALIGNMENT = 256  # of what goes to a peer in the staging memory: what cudaMalloc aligns to


def copy_pieces(
    rank: int,
    x: torch.Tensor,
    out: torch.Tensor,
    staging: Sequence[torch.Tensor],
    table: Sequence[Sequence[int]],
    max_pair_bytes: int,
    shared: bool,
    barrier: Callable[[], object],
) -> None:
    """Moves bytes between the ranks; every rank calls it. All copies and barriers are enqueued in order.

    Args:
        rank: this one.
        x, out: uint8 tensors to send from and to receive into.
        staging: every rank's staging memory, by rank: uint8 tensors of one size, written by their owners only.
        table: see `kernels.protocol.collectives`; send offsets, send bytes, receive offsets, receive bytes, by peer.
        max_pair_bytes: the most that any rank sends to any other.
        shared: every receiver gets the same bytes, staged once.
        barrier: returns, or lets later copies begin, once all ranks have come.
    """
    size, room = len(staging), staging[rank].numel()
    piece = room if shared else room // size // _ALIGNMENT * _ALIGNMENT
    sends, receives = _ranges(table, SEND_OFFSET), _ranges(table, RECEIVE_OFFSET)
    others = [(rank + distance) % size for distance in range(1, size)]
    for start in range(0, max(max_pair_bytes, 1), piece):
        to_stage = [(0 if shared else peer * piece, _piece(x, sends[peer], start, piece)) for peer in others]
        to_stage = [(at, part) for at, part in to_stage if part.numel()]
        for at, part in to_stage[:1] if shared else to_stage:
            staging[rank][at : at + part.numel()].copy_(part)
        barrier()
        at = 0 if shared else rank * piece
        for peer in others:
            part = _piece(out, receives[peer], start, piece)
            if part.numel():
                part.copy_(staging[peer][at : at + part.numel()])
        kept = _piece(out, receives[rank], start, piece)
        if kept.numel():
            source = _piece(x, sends[rank], start, piece)
            if kept.data_ptr() != source.data_ptr():
                kept.copy_(source)
        barrier()


def _ranges(table: Sequence[Sequence[int]], row: int) -> list[tuple[int, int]]:
    """(first, end) of the bytes of each peer: a row of offsets and then one of counts."""
    return [(offset, offset + count) for offset, count in zip(table[row], table[row + 1], strict=True)]


def _piece(memory: torch.Tensor, whole: tuple[int, int], start: int, num_bytes: int) -> torch.Tensor:
    """Up to `num_bytes` from `start` on of a range of bytes."""
    first, end = whole
    return memory[min(first + start, end) : min(first + start + num_bytes, end)]


class CopyMove:
    """A movement of data, bound to its table, as copies between barriers."""

    def __init__(
        self,
        runtime: Runtime,
        barrier: Operation,
        staging_offset: int,
        table: Sequence[Sequence[int]],
        max_pair_bytes: int,
        shared: bool,
    ):
        self.text = barrier.text
        self._runtime, self._barrier, self._table = runtime, barrier, table
        self._max_pair_bytes, self._shared = max_pair_bytes, shared
        target = runtime.target
        self._device = target.device
        self._staging = [
            memory_view(int(base) + staging_offset, target.copy_engine_bytes, target.device)
            for base in runtime.collectives.bases
        ]

    def run(self, x: int, out: int, timeout: float | None) -> None:
        """Moves from address `x` to address `out`."""
        barrier = functools.partial(self._runtime.run, self._barrier)
        if timeout is not None:
            barrier = functools.partial(self._runtime.run_within, timeout, self._barrier)
        source, to = (
            memory_view(address, max(end for _, end in _ranges(self._table, row)), self._device)
            for address, row in ((x, SEND_OFFSET), (out, RECEIVE_OFFSET))
        )
        copy_pieces(
            self._runtime.rank, source, to, self._staging, self._table, self._max_pair_bytes, self._shared, barrier
        )
