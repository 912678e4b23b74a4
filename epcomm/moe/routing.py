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
    from epcomm.moe.outputs import Pools


class Workspace:
    """Private memory of one routing (see ``kernels/protocol/expert_parallel``); a handle reuses it for later ones."""

    HEADER_BYTES = 8 * protocol.ROUTING_WORDS

    def __init__(self, target: Target, config: Config, pools: Pools):
        self.pools = pools  # to which it returns
        max_tokens, topk, size = config.max_tokens, config.topk, config.size
        columns = config.most_physical + size
        layout = Layout()
        layout.add("header", self.HEADER_BYTES, 64)
        rows_of = layout.add("rows_of", size * 4, 64)
        counts = layout.add("counts", columns * 4, 64)
        self._known_bytes = layout.size  # what the host looks at
        slots = layout.add("experts", max_tokens * topk * 4, 64)
        positions = layout.add("positions", max_tokens * topk * 4, 64)
        rank_positions = layout.add("rank_positions", max_tokens * size * 4 if config.is_by_rank else 0, 64)
        table = layout.add("table", size * columns * 4, 64)
        base = layout.add("base", columns * 4, 64)
        departure = layout.add("departure", columns * 4, 64)
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
            (protocol.DEPARTURE, departure),
        ):
            self.header[at] = self.address + offset
        self.rows_of = memory[rows_of : rows_of + size * 4].view(np.int32)
        self._counts_at, self._table_at = counts, table
        self.config: Config | None = None  # that `place` was told

    def refresh(self) -> None:
        """Header, `rows_of` and `counts` are what the kernels that were launched so far have left there."""
        self.memory.refresh(0, self._known_bytes)

    def place(self, config: Config, local: torch.Tensor) -> None:
        """For the next routing, which is one to experts as `config` has them: `local` are this rank's, physical."""
        self.config, self.local, columns = config, local, config.num_physical + config.size
        self.counts = self.memory.array[self._counts_at : self._counts_at + columns * 4].view(np.int32)
        self.table = self.memory.device_view(self._table_at, (config.size, columns))


class Routing:
    """Where the rows of `num_tokens` tokens go. Immutable; its memory returns to the handle with it.

    Attributes: ``num_tokens``, ``topk``, ``index_dtype`` (of the indices it was made from), ``requires_grad``.
    """

    __slots__ = (
        "__weakref__", "calls", "ep", "generation", "has_places", "index_dtype", "num_tokens", "requires_grad",
        "rows_shape", "topk", "workspace",
    )  # fmt: skip

    def __init__(self, ep: ExpertParallel, calls: Calls, workspace: Workspace, num_tokens: int, topk: int,
                 index_dtype: torch.dtype, requires_grad: bool):  # fmt: skip
        self.calls = calls
        self.ep, self.workspace, self.generation = ep, workspace, ep.generation
        self.num_tokens, self.topk, self.index_dtype, self.requires_grad = num_tokens, topk, index_dtype, requires_grad
        self.rows_shape: tuple[int, ...] | None = None  # of this rank's received rows, without their width, once placed
        self.has_places = not ep.is_expanded  # combine knows where what arrived went; else once dispatched

    def __repr__(self) -> str:
        return f"<Routing of {self.num_tokens} tokens of rank {self.ep.rank}, topk={self.topk}>"

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
            if self.ep.load is not None:
                self.ep.load.update(self.expert_loads())

    def learn_requires_grad(self) -> None:
        """For the handle, once counts are exchanged."""
        self.workspace.refresh()
        self.requires_grad = bool(self.workspace.header[protocol.ANY_REQUIRES_GRAD])

    @property
    def num_rows(self) -> int:
        """Rows that this rank receives, padding included (padded layout: without)."""
        self.workspace.refresh()
        return self.workspace.rows_of.item(self.ep.rank)

    @property
    def rows_needed(self) -> int:
        """The most rows of a rank, dropped ones included; needs everyone's counts, and waits for the device."""
        self.workspace.refresh()
        return self.workspace.header[protocol.MOST_ROWS]

    @property
    def send_counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int32 [size] tokens for each rank, and int32 rows for each physical expert, from this rank.

        Without replicas a physical expert is a logical one; else they are numbered rank by rank (see `Placement`).
        """
        self.workspace.refresh()
        counts = torch.from_numpy(self.workspace.counts.copy())
        return counts[-self.ep.size :], counts[: -self.ep.size]

    def received_counts(self) -> torch.Tensor:
        """int32 [size, local experts]: rows from each rank for each local expert; needs everyone's counts."""
        return self.workspace.table[:, self.workspace.local]

    def received_tokens(self) -> torch.Tensor:
        """int32 [size]: tokens from each rank that have an expert here; needs everyone's counts."""
        return self.workspace.table[:, self.ep.rank - self.ep.size]

    def expert_loads(self) -> torch.Tensor:
        """int64 [num_experts]: rows of all ranks for each logical expert, dropped ones too; needs everyone's counts."""
        counts = self.workspace.table[:, : -self.ep.size].sum(dim=0)
        config = self.workspace.config
        assert config is not None  # it was placed before it became a routing's
        return counts if config.placement is None else config.placement.to_logical_counts(counts)
