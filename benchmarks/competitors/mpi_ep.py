"""Expert parallelism over MPI: `Alltoall` of the counts and `Alltoallv` on the raw buffers, with mpi4py."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.competitors.expert_rows import ExpertRows
from benchmarks.competitors.rank_rows import PackedRows, RankRows
from benchmarks.competitors.row_buffers import RowBuffers
from benchmarks.timing import Contestant
from benchmarks.workload import Workload


class MpiWire:
    """An mpi4py communicator. Sizes are sent as bytes, so that every dtype takes the same path."""

    name = "mpi"

    def __init__(self, communicator: Any):
        from mpi4py import MPI

        self._communicator, self._byte, self._buffer = communicator, MPI.BYTE, MPI.buffer.fromaddress

    def blocks(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Equal blocks."""
        length = sent.nbytes
        into, source = self._buffer(received.data_ptr(), length), self._buffer(sent.data_ptr(), length)
        self._communicator.Alltoall([source, self._byte], [into, self._byte])

    def rows(
        self, received: torch.Tensor, received_counts: list[int], sent: torch.Tensor, sent_counts: list[int]
    ) -> None:
        """Rows with exact splits."""
        size = sent.stride(0) * sent.itemsize
        into, source = self._buffer(received.data_ptr(), received.nbytes), self._buffer(sent.data_ptr(), sent.nbytes)
        self._communicator.Alltoallv(
            [source, [size * rows for rows in sent_counts], self._byte],
            [into, [size * rows for rows in received_counts], self._byte],
        )


def mpi_contestants(communicator: Any, workload: Workload, buffers: RowBuffers) -> list[Contestant]:
    """Both variants, of which the better one counts, and the bare exchange of packed rows."""
    wire = MpiWire(communicator)
    expand = workload.case.layout != "flat"
    return [
        ExpertRows(wire, workload, buffers).contestant(),
        RankRows(wire, workload, buffers, expand).contestant(),
        PackedRows(wire, workload, buffers).contestant(),
    ]
