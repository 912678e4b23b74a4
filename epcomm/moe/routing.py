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
    from epcomm.moe.config import Config
    from epcomm.moe.expert_parallel import ExpertParallel


class Workspace:
    """Private memory of one routing (see ``kernels/protocol/expert_parallel``); a handle reuses it for later ones."""

    HEADER_BYTES = 8 * protocol.ROUTING_WORDS

    def __init__(self, target: Target, config: Config, is_captured: bool):
        self.is_captured = is_captured
        max_tokens, topk, num_experts, size = config.max_tokens, config.topk, config.num_experts, config.size
        columns = num_experts + size
        layout = Layout()
        layout.add("header", self.HEADER_BYTES, 64)
        slots = layout.add("experts", max_tokens * topk * 4, 64)
        positions = layout.add("positions", max_tokens * topk * 4, 64)
        rank_positions = layout.add("rank_positions", max_tokens * size * 4 if config.is_by_rank else 0, 64)
        counts = layout.add("counts", columns * 4, 64)
        table = layout.add("table", size * columns * 4, 64)
        base = layout.add("base", columns * 4, 64)
        rows_of = layout.add("rows_of", size * 4, 64)
        places = layout.add("places", config.most_arrivals * topk * 4 if config.is_expanded else 0, 64)
        self.memory = target.private(layout.size)
        self.address, memory = self.memory.address, self.memory.array
        # a memoryview is quicker to set than an array
        self.header = memory[: self.HEADER_BYTES].view(np.int64).data
        for at, offset in (
            (protocol.EXPERT, slots),
            (protocol.POSITION, positions),
            (protocol.RANK_POSITION, rank_positions),
            (protocol.OWN_COUNTS, counts),
            (protocol.TABLE, table),
            (protocol.BASE, base),
            (protocol.ROWS_OF, rows_of),
            (protocol.PLACES, places),
        ):
            self.header[at] = self.address + offset
        self.counts = memory[counts : counts + columns * 4].view(np.int32)
        self.table = self.memory.device_view(table, (size, columns))
        self.rows_of = memory[rows_of : rows_of + size * 4].view(np.int32)


class Routing:
    """Where the rows of `num_tokens` tokens go. Immutable; its memory returns to the handle with it.

    Attributes: ``num_tokens``, ``topk``, ``index_dtype`` (of the indices it was made from).
    """

    __slots__ = (
        "calls", "ep", "generation", "has_places", "index_dtype", "num_tokens", "rows_shape", "topk", "workspace"
    )  # fmt: skip

    def __init__(self, ep: ExpertParallel, calls: Calls, workspace: Workspace, num_tokens: int, topk: int,
                 index_dtype: torch.dtype):  # fmt: skip
        self.calls = calls
        self.ep, self.workspace, self.generation = ep, workspace, ep.generation
        self.num_tokens, self.topk, self.index_dtype = num_tokens, topk, index_dtype
        self.rows_shape: tuple[int, ...] | None = None  # of this rank's received rows, without their width, once placed
        self.has_places = not ep.config.is_expanded  # combine knows where what arrived went; else once dispatched

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
    def rows_needed(self) -> int:
        """The most rows of a rank, dropped ones included; needs everyone's counts, and waits for the device."""
        self.workspace.memory.refresh()
        return self.workspace.header[protocol.MOST_ROWS]

    @property
    def send_counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [size] tokens for each rank, and int32 [num_experts] rows for each expert, from this rank."""
        self.workspace.memory.refresh()
        counts = torch.from_numpy(self.workspace.counts.copy())
        return counts[self.ep.num_experts :], counts[: self.ep.num_experts]

    def received_counts(self) -> torch.Tensor:
        """int32 [size, local experts]: rows from each rank for each local expert; needs everyone's counts."""
        return self.workspace.table[:, self.ep.local_experts]

    def received_tokens(self) -> torch.Tensor:
        """int32 [size]: tokens from each rank that have an expert here; needs everyone's counts."""
        return self.workspace.table[:, self.ep.num_experts + self.ep.rank]
