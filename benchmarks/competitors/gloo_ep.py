"""Expert parallelism over gloo: `torch.distributed.all_to_all_single` with exact splits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.competitors.expert_rows import ExpertRows
from benchmarks.competitors.rank_rows import RankRows
from benchmarks.competitors.row_buffers import RowBuffers
from benchmarks.timing import Contestant
from benchmarks.workload import Workload


class GlooWire:
    """The default process group."""

    name = "gloo"

    def blocks(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Equal blocks."""
        dist.all_to_all_single(received, sent)

    def rows(
        self, received: torch.Tensor, received_counts: list[int], sent: torch.Tensor, sent_counts: list[int]
    ) -> None:
        """Rows with exact splits."""
        dist.all_to_all_single(received[: sum(received_counts)], sent[: sum(sent_counts)], received_counts, sent_counts)


def gloo_contestants(workload: Workload, buffers: RowBuffers) -> list[Contestant]:
    """Both variants; the better one counts."""
    wire = GlooWire()
    expand = workload.case.layout != "flat"
    return [ExpertRows(wire, workload, buffers).contestant(), RankRows(wire, workload, buffers, expand).contestant()]
