"""Buffers that all competitors of a case share (only one runs at a time), and the row movements they have in common."""

from __future__ import annotations

from typing import Protocol

import torch

_CHUNK_ROWS = 512


class Wire(Protocol):
    """The two exchanges an expert-parallel layer needs from a communication library."""

    name: str

    def blocks(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Exchange equal blocks: dim 0 is split evenly over the ranks."""

    def rows(
        self, received: torch.Tensor, received_counts: list[int], sent: torch.Tensor, sent_counts: list[int]
    ) -> None:
        """Exchange rows; `counts` by rank, rows of a rank contiguous in rank order."""


class RowBuffers:
    """Preallocated memory for up to `rows` rows in each direction and for the float32 sums of `sums` output rows."""

    def __init__(self, rows: int, sums: int, hidden: int, dtype: torch.dtype):
        self.sent = torch.zeros(rows, hidden, dtype=dtype)
        self.received = torch.zeros(rows, hidden, dtype=dtype)
        self.grouped = torch.zeros(rows, hidden, dtype=dtype)
        self.sums = torch.zeros(sums, hidden, dtype=torch.float32)
        self._wide = torch.zeros(min(rows, _CHUNK_ROWS), hidden, dtype=torch.float32)

    def sum_rows(self, out: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> None:
        """`out[i]` = sum of the rows whose target is `i`, in float32, rounded once."""
        sums = self.sums[: out.shape[0]]
        sums.zero_()
        for chunk, where in zip(rows.split(_CHUNK_ROWS), targets.split(_CHUNK_ROWS), strict=True):
            wide = self._wide[: chunk.shape[0]]
            wide.copy_(chunk)
            sums.index_add_(0, where, wide)
        out.copy_(sums)


def select_rows(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Gather rows into preallocated memory; the part of `out` that was written."""
    written = out[: index.shape[0]]
    torch.index_select(source, 0, index, out=written)
    return written
