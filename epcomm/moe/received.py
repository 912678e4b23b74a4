"""What a dispatch delivers to this rank. Fields are views of the receive block, made on first access."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from epcomm.kernels.protocol import expert_parallel as protocol
from epcomm.moe.routing import Routing

if TYPE_CHECKING:
    from epcomm.moe.bind import Bound
    from epcomm.moe.expert_parallel import ExpertParallel

#: (dtype, row width in elements, byte offset of the rows in a block) per tensor
Tensors = tuple[tuple[torch.dtype, int, int], ...]


class Received:
    """Rows for this rank's experts. The memory is lent: it returns when this object and every tensor of it are gone.

    ``x`` is a tensor (or a tuple, as given to dispatch) of shape [rows, hidden] (contiguous: grouped by local expert;
    flat: one row per token) or [local experts, size * max_tokens, hidden] (padded: each expert's rows from 0 on, the
    rest undefined).
    """

    def __init__(self, ep: ExpertParallel, routing: Routing, bound: Bound, is_tuple: bool, has_weights: bool,
                 buffer: Any):  # fmt: skip
        self.ep, self.routing = ep, routing
        self.bound, self._is_tuple, self._has_weights, self._buffer = bound, is_tuple, has_weights, buffer
        self.anchor: torch.Tensor | None = None  # of a graph: combine's results depend on this dispatch (`autograd`)

    def __repr__(self) -> str:
        rows = self._rows_shape()
        tensors = ", ".join(f"{dtype} {(*rows, width)}" for dtype, width, _ in self.bound.tensors)
        return f"<Received by rank {self.ep.rank}, {self.ep.config.layout}: {tensors}>"

    def _rows_shape(self) -> tuple[int, ...]:
        shape = self.routing.rows_shape
        return self.routing.calls.rows_shape(self.routing) if shape is None else shape  # a fixed one, before it came

    @cached_property
    def x(self) -> Any:
        """The rows."""
        views = self.rows_in_block()
        if self.bound.quantize is not None:
            return views[0], self.bound.quantize.delivered(views[1])
        return views if self._is_tuple else views[0]

    def rows_in_block(self) -> tuple[torch.Tensor, ...]:
        """The rows of each tensor as they arrived."""
        shape = self._rows_shape()
        return tuple(
            self._buffer.tensor(self.ep.regions.rows + offset, dtype, (*shape, width))
            for dtype, width, offset in self.bound.tensors
        )

    def output_buffer(self) -> Any:
        """Memory like `x` that `combine` reads in place: an expert kernel that writes there saves a copy.

        Like `x` before it was quantised, if it was: one tensor of the dtype and width that was given to dispatch.
        From combine on the peers read it: write there again only after the next dispatch has returned. If all output
        blocks are in use (or not yet read by all peers) it is ordinary memory, which combine stages.
        """
        return output_rows(self.ep, self.routing, self.bound, self._is_tuple)

    def _per_row(self, offset: int, dtype: torch.dtype, *width: int) -> torch.Tensor:
        return self._buffer.tensor(offset, dtype, (*self._rows_shape(), *width))

    @cached_property
    def topk_weights(self) -> torch.Tensor | None:
        """float32 [rows] (flat: [rows, topk]): the weights given to dispatch. None without, and in padded layout."""
        return None if self.ep.layout_code == protocol.PADDED else self.row_weights

    @cached_property
    def row_weights(self) -> torch.Tensor | None:
        """`topk_weights` in every layout; padded: [local experts, size * max_tokens], undefined past the counts."""
        if not self._has_weights:
            return None
        width = (self.routing.topk,) if self.ep.layout_code == protocol.FLAT else ()
        return self._per_row(self.ep.regions.weight, torch.float32, *width)

    @property
    def is_real(self) -> torch.Tensor:
        """bool: where there is a row, not padding or what lies past the last one."""
        if self.ep.layout_code != protocol.PADDED:
            return self.source_token >= 0
        return torch.arange(self._rows_shape()[1], device=self.ep.device) < self.expert_counts[:, None]

    @cached_property
    def topk_idx(self) -> torch.Tensor | None:
        """Local expert number of each row (flat: [rows, topk] of each slot), -1 where unused; None in padded layout."""
        if self.ep.layout_code == protocol.PADDED:
            return None
        if self.ep.layout_code == protocol.FLAT:
            return self._per_row(self.ep.regions.index, self.routing.index_dtype, self.routing.topk)
        ends = self._ends()
        expert = torch.searchsorted(ends, self._row_numbers(), right=True) // self.ep.size
        return torch.where(self.source_token >= 0, expert, -1).to(self.routing.index_dtype)

    def _row_numbers(self) -> torch.Tensor:
        return torch.arange(self._rows_shape()[0], device=self.ep.device)

    def _ends(self) -> torch.Tensor:
        """int64: where the rows of each local expert from each rank end (contiguous), as if none were dropped."""
        counts = self.routing.received_counts().T.long()
        totals = counts.sum(dim=1)
        starts = self._aligned(totals).cumsum(0) - self._aligned(totals)
        return (starts[:, None] + counts.cumsum(dim=1)).flatten()

    def _aligned(self, counts: torch.Tensor) -> torch.Tensor:
        return (counts + self.ep.alignment - 1) // self.ep.alignment * self.ep.alignment

    @cached_property
    def expert_counts(self) -> torch.Tensor:
        """int32 [local experts]: real rows (flat: selections) of each local expert."""
        if self.ep.layout_code == protocol.FLAT:
            index = self.topk_idx
            assert index is not None
            counts = torch.zeros(len(self.routing.workspace.local) + 1, dtype=torch.int32, device=self.ep.device)
            slots = index.flatten().long() + 1
            return counts.index_add_(0, slots, torch.ones_like(slots, dtype=torch.int32))[1:]
        counts = self.routing.received_counts().sum(dim=0, dtype=torch.int32)
        if not self.ep.drops:
            return counts
        starts = self._all_offsets()[:-1]
        return torch.minimum(counts, (self.ep.row_limit - starts).clamp(min=0)).int()

    @cached_property
    def expert_counts_list(self) -> list[int]:
        """`expert_counts` on the host, which waits for the device."""
        return self.expert_counts.tolist()

    def _all_offsets(self) -> torch.Tensor:
        """int64 [local experts + 1]: `expert_offsets`, as if no rows were dropped."""
        aligned = self._aligned(self.routing.received_counts().sum(dim=0, dtype=torch.int64))
        return torch.nn.functional.pad(aligned.cumsum(0), (1, 0))

    @property
    def own_rows_needed(self) -> torch.Tensor:
        """int64, on the device: the rows that this rank would have, were none dropped; contiguous only."""
        return self._all_offsets()[-1]

    @cached_property
    def expert_offsets(self) -> torch.Tensor | None:
        """int32 [local experts + 1]: aligned first row of each local expert, then all rows; contiguous only."""
        if self.ep.layout_code != protocol.CONTIGUOUS:
            return None
        offsets = self._all_offsets()
        return (offsets.clamp(max=self.ep.row_limit) if self.ep.drops else offsets).int()

    @property
    def grouped_mm_offs(self) -> torch.Tensor | None:
        """int32 [local experts]: where each local expert's rows end, as `torch._grouped_mm` wants it."""
        return None if self.expert_offsets is None else self.expert_offsets[1:]

    @cached_property
    def source_token(self) -> torch.Tensor:
        """int32: each row's token number on its source rank; -1 for padding rows (padded: undefined past the count)."""
        return self._per_row(self.ep.regions.token, torch.int32)

    @cached_property
    def source_rank(self) -> torch.Tensor:
        """int32: each row's source rank; -1 where there is no row."""
        if self.ep.layout_code == protocol.PADDED:
            ends = self.routing.received_counts().T.long().cumsum(dim=1)  # of each source's rows, by local expert
            rows = torch.arange(self._rows_shape()[1], device=self.ep.device).expand(len(ends), -1).contiguous()
            source = torch.searchsorted(ends, rows, right=True)
            return torch.where(rows < ends[:, -1:], source, -1).int()
        flat = self.ep.layout_code == protocol.FLAT
        ends = self.routing.received_tokens().long().cumsum(0) if flat else self._ends()
        source = torch.searchsorted(ends, self._row_numbers(), right=True) % self.ep.size
        return torch.where(self.source_token >= 0, source, -1).int()


def output_rows(ep: ExpertParallel, routing: Routing, bound: Bound, is_tuple: bool) -> Any:
    """`Received.output_buffer` of what a dispatch of a kind delivered along a routing, whether that is alive or not."""
    shape = routing.rows_shape
    assert shape is not None  # it was dispatched
    buffer = ep.take_output() if bound.outputs_fit else None
    views = []
    for dtype, width, at in bound.outputs:
        if buffer is None:
            views.append(torch.empty((*shape, width), dtype=dtype, device=ep.device))
        else:
            views.append(buffer.tensor(at, dtype, (*shape, width)))
    return tuple(views) if is_tuple and bound.outputs is bound.tensors else views[0]


def copy_block(received: Received, out: tuple[torch.Tensor, ...] | None) -> Received:
    """The same result in memory of its own, its rows in `out` if given. The receive block is free afterwards."""
    ep, routing, regions = received.ep, received.routing, received.ep.regions
    owned = ep.owned_memory(regions.size)
    copied = Received(ep, routing, received.bound, received._is_tuple, received._has_weights, owned)
    if out is not None:
        copied.__dict__["x"] = out if received._is_tuple else out[0]
    targets = copied.rows_in_block() if out is None else out
    pairs: list[tuple[Any, Any]] = [(copied.source_token, received.source_token)]
    pairs += zip(targets, received.rows_in_block(), strict=True)
    if ep.layout_code == protocol.FLAT:
        pairs.append((copied.topk_idx, received.topk_idx))
    if received.row_weights is not None:
        pairs.append((copied.row_weights, received.row_weights))
    for target, source in pairs:
        if ep.layout_code != protocol.PADDED or ep.device.type != "cpu":
            target.copy_(source)  # on a GPU with what is undefined: it would take a host that waits to tell
            continue
        for number, count in enumerate(received.expert_counts_list):
            target[number, :count] = source[number, :count]
    return copied
