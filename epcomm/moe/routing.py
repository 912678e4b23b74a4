"""A routing: which row of which rank each (token, slot) becomes. Made once by `route`, used by many operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from epcomm.heap.layout import Layout
from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.kernels.target import Target

if TYPE_CHECKING:
    from epcomm.moe.calls import Calls
    from epcomm.moe.expert_parallel import ExpertParallel


class Workspace:
    """Private memory of one routing (see ``kernels/protocol/expert_parallel``); a handle reuses it for later ones."""

    CALLER_BYTES = 8 * (protocol.INDEX_BYTES + 1)  # of the header, what the host writes for each routing

    def __init__(self, target: Target, max_tokens: int, topk: int, num_experts: int, size: int, flat: bool):
        columns = num_experts + size
        layout = Layout()
        layout.add("header", protocol.ROUTING_WORDS * 8, 64)
        slots = layout.add("experts", max_tokens * topk * 4, 64)
        positions = layout.add("positions", max_tokens * topk * 4, 64)
        rank_positions = layout.add("rank_positions", max_tokens * size * 4 if flat else 0, 64)
        counts = layout.add("counts", columns * 4, 64)
        table = layout.add("table", size * columns * 4, 64)
        base = layout.add("base", columns * 4, 64)
        rows_of = layout.add("rows_of", size * 4, 64)
        self.memory = target.private(layout.size)
        self.address, memory = self.memory.address, self.memory.array
        # a memoryview is quicker to set than an array
        self.header = memory[: protocol.ROUTING_WORDS * 8].view(np.int64).data
        for at, offset in (
            (protocol.EXPERT, slots),
            (protocol.POSITION, positions),
            (protocol.RANK_POSITION, rank_positions),
            (protocol.OWN_COUNTS, counts),
            (protocol.TABLE, table),
            (protocol.BASE, base),
            (protocol.ROWS_OF, rows_of),
        ):
            self.header[at] = self.address + offset
        self.memory.publish()
        self.counts = memory[counts : counts + columns * 4].view(np.int32)
        self.table = memory[table : table + size * columns * 4].view(np.int32).reshape(size, columns)
        self.rows_of = memory[rows_of : rows_of + size * 4].view(np.int32)


class Routing:
    """Where the rows of `num_tokens` tokens go. Immutable; its memory returns to the handle with it.

    Attributes: ``num_tokens``, ``topk``, ``index_dtype`` (of the indices it was made from).
    """

    __slots__ = ("calls", "ep", "generation", "index_dtype", "num_tokens", "rows_shape", "topk", "workspace")

    def __init__(self, ep: ExpertParallel, calls: Calls, workspace: Workspace, num_tokens: int, topk: int,
                 index_dtype: torch.dtype):  # fmt: skip
        self.calls = calls
        self.ep, self.workspace, self.generation = ep, workspace, ep.generation
        self.num_tokens, self.topk, self.index_dtype = num_tokens, topk, index_dtype
        self.rows_shape: tuple[int, ...] | None = None  # of this rank's received rows, without their width, once placed

    def __del__(self) -> None:
        self.ep.return_workspace(self.workspace)

    @property
    def is_placed(self) -> bool:
        """True once everyone's counts are known: since route (throughput) or the first dispatch (latency)."""
        return self.rows_shape is not None

    def place(self) -> None:
        """For the handle, once everyone's counts are in the workspace."""
        if self.rows_shape is None:
            self.rows_shape = self.calls.rows_shape(self)

    @property
    def num_rows(self) -> int:
        """Rows that this rank receives, padding included (padded layout: without)."""
        self.workspace.memory.refresh()
        return self.workspace.rows_of.item(self.ep.rank)

    @property
    def send_counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [size] tokens for each rank, and int32 [num_experts] rows for each expert, from this rank."""
        self.workspace.memory.refresh()
        counts = torch.from_numpy(self.workspace.counts.copy())
        return counts[self.ep.num_experts :], counts[: self.ep.num_experts]

    def received_counts(self) -> np.ndarray:
        """int32 [size, local experts]: rows from each rank for each local expert; needs everyone's counts."""
        self.workspace.memory.refresh()
        return self.workspace.table[:, self.ep.local_expert_ids]

    def received_tokens(self) -> np.ndarray:
        """int32 [size]: tokens from each rank that have an expert here; needs everyone's counts."""
        self.workspace.memory.refresh()
        return self.workspace.table[:, self.ep.num_experts + self.ep.rank]
