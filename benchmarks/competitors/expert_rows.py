"""Dispatch and combine with one row per (token, expert), as torchtitan and transformers exchange them.

Sort the selections by expert, exchange counts, gather rows, all-to-all, permute to the layout grouped by local
expert; back the same way, and sum a token's rows in float32.
"""

from __future__ import annotations

import torch

from benchmarks.competitors.row_buffers import RowBuffers, Wire, select_rows
from benchmarks.competitors.row_contestant import row_contestant
from benchmarks.timing import Contestant
from benchmarks.workload import Workload, scale


class ExpertRows:
    """One row per (token, expert) over any wire."""

    def __init__(self, wire: Wire, workload: Workload, buffers: RowBuffers):
        case = workload.case
        self.wire, self.workload, self.buffers = wire, workload, buffers
        self.ranks, self.local = case.ranks, workload.local_experts
        self.counts = torch.zeros(case.ranks, self.local, dtype=torch.int64)
        self.received_counts = torch.zeros_like(self.counts)
        self.local_ids = torch.arange(self.local).repeat(case.ranks)
        self.factors = scale(torch.arange(self.local) + workload.rank * self.local).to(workload.dtype)
        self.out = torch.zeros_like(workload.x)

    def dispatch(self) -> None:
        """From `x` and `topk_idx` to rows grouped by local expert."""
        selections = self.workload.topk_idx.view(-1)
        order = torch.argsort(selections, stable=True)
        self.token = torch.div(order, self.workload.case.topk, rounding_mode="floor")
        self.counts.copy_(torch.bincount(selections, minlength=self.counts.numel()).view_as(self.counts))
        self.wire.blocks(self.received_counts, self.counts)
        self.sent_splits = self.counts.sum(1).tolist()
        self.received_splits = self.received_counts.sum(1).tolist()
        self.num_received = sum(self.received_splits)
        select_rows(self.workload.x, self.token, self.buffers.sent)
        self.wire.rows(self.buffers.received, self.received_splits, self.buffers.sent, self.sent_splits)
        experts = torch.repeat_interleave(self.local_ids, self.received_counts.view(-1))
        self.permutation = torch.argsort(experts, stable=True)
        self.rows = select_rows(self.buffers.received, self.permutation, self.buffers.grouped)

    def experts(self) -> None:
        """Scale each expert's rows in place."""
        per_expert = self.received_counts.sum(0)
        self.rows.mul_(torch.repeat_interleave(self.factors, per_expert)[:, None])

    def combine(self) -> None:
        """From the experts' outputs to `out`."""
        inverse = torch.empty_like(self.permutation)
        inverse[self.permutation] = torch.arange(self.num_received)
        select_rows(self.buffers.grouped, inverse, self.buffers.received)
        self.wire.rows(self.buffers.sent, self.sent_splits, self.buffers.received, self.received_splits)
        self.buffers.sum_rows(self.out, self.buffers.sent[: self.token.shape[0]], self.token)

    def contestant(self) -> Contestant:
        """For the timing."""
        return row_contestant(self, "row per expert")
