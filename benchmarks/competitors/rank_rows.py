"""Dispatch and combine with one row per (token, rank): a token travels once to each rank that owns some of its experts.

One exchange of fixed-size blocks carries the counts and each row's local experts, a second one the rows. With
`expand` the receiver copies each row to every local expert that wants it, grouped by expert, and sums in float32
before sending back: the layout of `expert_rows.py`.
"""

from __future__ import annotations

import torch

from benchmarks.competitors.row_buffers import RowBuffers, Wire, select_rows
from benchmarks.competitors.row_contestant import row_contestant
from benchmarks.timing import Contestant, Step
from benchmarks.workload import Workload, scale


class RankRows:
    """One row per (token, rank) over any wire."""

    def __init__(self, wire: Wire, workload: Workload, buffers: RowBuffers, expand: bool):
        case = workload.case
        self.wire, self.workload, self.buffers, self.expand = wire, workload, buffers, expand
        self.local = workload.local_experts
        self.ranks = torch.arange(case.ranks)
        self.block_rows = case.tokens + 1  # the first row of a block holds its count
        self.sent_blocks = torch.zeros(case.ranks, self.block_rows, case.topk, dtype=torch.int32)
        self.received_blocks = torch.zeros_like(self.sent_blocks)
        self.selections = torch.zeros(max(1, workload.max_rank_rows), case.topk, dtype=torch.int32)
        self.factors = scale(torch.arange(self.local) + workload.rank * self.local)
        self.out = torch.zeros_like(workload.x)

    def dispatch(self) -> None:
        """From `x` and `topk_idx` to received rows and their local experts."""
        topk_idx, local = self.workload.topk_idx, self.local
        wanted = torch.zeros(topk_idx.shape[0], self.ranks.shape[0], dtype=torch.bool)
        wanted.scatter_(1, torch.div(topk_idx, local, rounding_mode="floor"), True)
        destination, self.token = wanted.t().nonzero().unbind(1)
        counts = wanted.sum(0)
        self.sent_splits = counts.tolist()

        experts = topk_idx[self.token] - (destination * local)[:, None]
        experts = torch.where((experts >= 0) & (experts < local), experts, -1).to(torch.int32)
        first = counts.cumsum(0) - counts
        place = torch.arange(self.token.shape[0]) - first[destination] + destination * self.block_rows + 1
        self.sent_blocks.view(-1, topk_idx.shape[1]).index_copy_(0, place, experts)
        self.sent_blocks[:, 0, 0] = counts
        self.wire.blocks(self.received_blocks, self.sent_blocks)
        self.received_splits = self.received_blocks[:, 0, 0].tolist()
        self.num_received = sum(self.received_splits)

        select_rows(self.workload.x, self.token, self.buffers.sent)
        self.wire.rows(self.buffers.received, self.received_splits, self.buffers.sent, self.sent_splits)
        blocks = [block[1 : 1 + rows] for block, rows in zip(self.received_blocks, self.received_splits, strict=True)]
        torch.cat(blocks, out=self.selections[: self.num_received])
        if self.expand:
            self._group_by_expert()

    def _group_by_expert(self) -> None:
        selected = self.selections[: self.num_received].view(-1)
        order = torch.argsort(selected, stable=True)
        self.expert_counts = torch.bincount(selected + 1, minlength=self.local + 1)
        used = order[int(self.expert_counts[0]) :]
        self.source_row = torch.div(used, self.selections.shape[1], rounding_mode="floor")
        self.rows = select_rows(self.buffers.received, self.source_row, self.buffers.grouped)

    def experts(self) -> None:
        """Scale rows in place by the factors of their experts."""
        if self.expand:
            self.rows.mul_(torch.repeat_interleave(self.factors, self.expert_counts[1:]).to(self.rows.dtype)[:, None])
            return
        selected = self.selections[: self.num_received]
        factor = torch.where(selected >= 0, self.factors[selected.long().clamp(min=0)], 0.0).sum(-1, keepdim=True)
        rows = self.buffers.received[: self.num_received]
        rows.mul_(factor.to(rows.dtype))

    def combine(self) -> None:
        """From the experts' outputs to `out`."""
        if self.expand:
            self.buffers.sum_rows(self.buffers.received[: self.num_received], self.rows, self.source_row)
        self.wire.rows(self.buffers.sent, self.sent_splits, self.buffers.received, self.received_splits)
        self.buffers.sum_rows(self.out, self.buffers.sent[: self.token.shape[0]], self.token)

    def contestant(self) -> Contestant:
        """For the timing."""
        return row_contestant(self, "row per rank" + (", expanded" if self.expand else ""))


class PackedRows:
    """Only the exchange: rows already packed by rank, counts known, nothing permuted or summed in either direction."""

    def __init__(self, wire: Wire, workload: Workload, buffers: RowBuffers):
        self.wire, self.buffers = wire, buffers
        rows = (
            workload.pairs
            if workload.case.layout == "flat"
            else workload.expert_counts.view(workload.case.ranks, workload.case.ranks, -1).sum(-1)
        )
        self.sent_splits = rows[workload.rank].tolist()
        self.received_splits = rows[:, workload.rank].tolist()
        self.expected = torch.arange(sum(self.sent_splits), dtype=torch.float32) % 251 + 1

    def dispatch(self) -> None:
        """Rows to the experts' ranks."""
        self.wire.rows(self.buffers.received, self.received_splits, self.buffers.sent, self.sent_splits)

    def combine(self) -> None:
        """The same rows back."""
        self.wire.rows(self.buffers.sent, self.sent_splits, self.buffers.received, self.received_splits)

    def poison(self) -> None:
        """Number the rows to send."""
        self.buffers.sent[: len(self.expected)].copy_(self.expected[:, None].expand(-1, self.buffers.sent.shape[1]))
        self.buffers.received.fill_(float("nan"))

    def check(self) -> None:
        """Every row has come back to its place."""
        back = self.buffers.sent[: len(self.expected)].float()
        if not bool((back == self.expected[:, None]).all()):
            raise AssertionError("a packed row did not come back to its place")

    def contestant(self) -> Contestant:
        """For the timing."""
        return Contestant(
            name=f"{self.wire.name}, packed rows only",
            library=f"{self.wire.name} packed",
            steps=[Step("dispatch", self.dispatch), Step("combine", self.combine)],
            poison=self.poison,
            check=self.check,
        )
