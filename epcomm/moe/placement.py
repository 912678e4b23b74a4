"""Which rank holds which experts, popular ones on several ranks; the placement that evens out measured loads.

The router knows *logical* experts. A logical expert may have *replicas*: *physical* experts with the same weights, on
different ranks. Physical experts are numbered rank by rank; a dispatch to replicas is one to physical experts.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from epcomm.errors import ConfigError
from epcomm.moe.checks import INDEX_DTYPES, check_integer, describe

_LONGEST_TEXT = 120  # characters of experts in `Placement.text`; more are hashed
_GOLDEN = 2654435769  # 2**32 / golden ratio, whose multiples modulo 2**32 are spread about as evenly as any number's
_MASK = (1 << 32) - 1


def _wrong(where: str, name: str, wanted: str, got: Any) -> ConfigError:
    return ConfigError(f"{where}: argument `{name}`: wanted {wanted}, got {got}")


@dataclass(frozen=True)
class Placement:
    """`experts[rank]`: the logical experts on a rank, by local number; maybe none. Hashable, the same in every process.

    `ConfigError` unless the numbers that occur are 0 to some highest one, all of them, and differ within a rank: a
    second replica there would take memory and balance nothing.
    """

    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        try:
            experts = tuple(tuple(map(operator.index, held)) for held in self.experts)
        except TypeError:
            raise _wrong("Placement", "experts", "for each rank numbers of experts", repr(self.experts)) from None
        present = {expert for held in experts for expert in held}
        missing = next(expert for expert in itertools.count() if expert not in present)
        if not present or missing < len(present):
            got = f"{min(present)}" if min(present, default=0) < 0 else f"none of expert {missing}"
            raise _wrong("Placement", "experts", "all experts from 0 on, each on at least one rank", got)
        for rank, held in enumerate(experts):
            if len(set(held)) < len(held):
                raise _wrong("Placement", "experts", "different experts on a rank", f"{list(held)} on rank {rank}")
        object.__setattr__(self, "experts", experts)  # as tuples, whatever sequences they were

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.experts,)  # without cached tables, which may lie on a GPU

    @staticmethod
    def from_owner(owner: Sequence[int], size: int) -> Placement:
        """Without replicas: `owner[expert]` is its rank. A rank's experts are in ascending order."""
        size = check_integer("Placement.from_owner", "size", size, 1)
        wanted = f"for each expert a rank from 0 to {size - 1}"
        try:
            ranks = list(map(operator.index, owner))
        except TypeError:
            raise _wrong("Placement.from_owner", "owner", wanted, repr(owner)) from None
        if not ranks or not all(0 <= rank < size for rank in ranks):
            raise _wrong("Placement.from_owner", "owner", wanted, ranks)
        return Placement(tuple(tuple(e for e, owning in enumerate(ranks) if owning == rank) for rank in range(size)))

    @staticmethod
    def even(num_experts: int, size: int) -> Placement:
        """Without replicas: contiguous blocks whose sizes differ by at most 1, the larger ones first."""
        num_experts = check_integer("Placement.even", "num_experts", num_experts, 1)
        each, more = divmod(num_experts, check_integer("Placement.even", "size", size, 1))
        starts = [rank * each + min(rank, more) for rank in range(size + 1)]
        return Placement(tuple(tuple(range(*bounds)) for bounds in itertools.pairwise(starts)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.experts)

    @cached_property
    def num_experts(self) -> int:
        """Number of logical experts."""
        return len(self._replicas)

    @cached_property
    def num_physical(self) -> int:
        """Number of physical experts, on all ranks together."""
        return sum(map(len, self.experts))

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """The rank of each physical expert; ascending."""
        return tuple(rank for rank, held in enumerate(self.experts) for _ in held)

    @property
    def physical_to_logical(self) -> torch.Tensor:
        """int64 [num_physical]."""
        return torch.tensor(list(itertools.chain(*self.experts)))

    @property
    def logical_to_physical(self) -> torch.Tensor:
        """int64 [num_experts, most replicas of any]: an expert's replicas, ascending, then -1."""
        return torch.tensor(list(zip(*itertools.zip_longest(*self._replicas, fillvalue=-1), strict=True)))

    @property
    def replica_counts(self) -> torch.Tensor:
        """int64 [num_experts], at least 1 each."""
        return torch.tensor(list(map(len, self._replicas)))

    @property
    def text(self) -> str:
        """For messages and fingerprints: different placements have different ones. Long ones are hashed."""
        experts = repr(self.experts)
        if len(experts) > _LONGEST_TEXT:
            experts = f"#{hashlib.blake2b(experts.encode(), digest_size=8).hexdigest()}"
        return f"Placement({self.num_physical} of {self.num_experts} experts on {self.size} ranks: {experts})"

    def to_physical(self, topk_idx: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
        """Physical experts for `topk_idx`, logical ones, int32 or int64 [num_tokens, topk]: same shape, dtype, device.

        Which replica depends on the expert and on token number + `offset` only, so slots of one token that name one
        expert agree. If up to 8192 contiguous tokens all choose an expert, none of its replicas (64 at most) gets over
        8 tokens more than another; if every 2nd or every 8th token does, they share as well, as they would not by the
        token's number modulo the replicas. Pass the rank as `offset`, lest all ranks begin alike.

        Negative values stay. Those from `num_experts` on stay or become `num_physical`: still out of range. Nothing
        waits for the device, but the first call on one copies tables there: `prepare` before a CUDA graph is captured.
        The result is `topk_idx` itself if physical and logical numbers are the same.
        """
        where = "Placement.to_physical"
        if not isinstance(topk_idx, torch.Tensor) or topk_idx.dim() != 2 or topk_idx.dtype not in INDEX_DTYPES:
            raise _wrong(where, "topk_idx", "int32 or int64 [num_tokens, topk]", describe(topk_idx))
        start = check_integer(where, "offset", offset, 0) * _GOLDEN & _MASK
        if self.is_identity:
            return topk_idx
        counts, table, _ = self._tables(topk_idx.device)
        is_known = (topk_idx >= 0) & (topk_idx < self.num_experts)
        expert = torch.where(is_known, topk_idx, 0).long()
        # A token's point in [0, 2**32), of which each replica takes an equal part. Nothing overflows 64 bits.
        point = torch.arange(len(topk_idx), device=topk_idx.device).mul_(_GOLDEN).add_(start).bitwise_and_(_MASK)
        replica = point[:, None].mul(counts[expert]).bitwise_right_shift_(32)
        physical = table[expert, replica].to(topk_idx.dtype)
        unknown = torch.where(topk_idx < 0, topk_idx, topk_idx.clamp(min=self.num_physical))
        return torch.where(is_known, physical, unknown)

    def to_logical_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Sums over replicas: of int32 or int64 [num_physical], int64 [num_experts] on the same device."""
        logical = self._tables(counts.device)[2]
        return counts.new_zeros(self.num_experts, dtype=torch.int64).index_add_(0, logical, counts.long())

    def prepare(self, device: torch.device) -> None:
        """Copies tables to the device, which `to_physical` and `to_logical_counts` else do when first called there."""
        self._tables(device)

    @cached_property
    def _replicas(self) -> list[list[int]]:
        """The physical experts of each logical one, ascending."""
        replicas: dict[int, list[int]] = {}
        for physical, expert in enumerate(itertools.chain(*self.experts)):
            replicas.setdefault(expert, []).append(physical)
        return [replicas[expert] for expert in range(len(replicas))]

    @cached_property
    def is_identity(self) -> bool:
        """True if physical and logical numbers are the same: no replicas, and experts in order."""
        return list(itertools.chain(*self.experts)) == list(range(self.num_physical))

    @cached_property
    def _tables_on(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        return {}

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """On the device: replica_counts; each expert's replicas in the order of their parts; physical_to_logical."""
        if device not in self._tables_on:
            table = self.logical_to_physical
            for expert, replicas in enumerate(self._replicas):
                # Were each expert's first part its lowest rank's, the first token would load low ranks only.
                table[expert, : len(replicas)] = torch.tensor(replicas).roll(expert)
            tables = self.replica_counts, table, self.physical_to_logical
            self._tables_on[device] = tables[0].to(device), tables[1].to(device), tables[2].to(device)
        return self._tables_on[device]


def _pack(items: Sequence[int], loads: Sequence[float], num_bins: int) -> list[list[int]]:
    """Items by bin, in numbers that differ by at most 1; `items` has one at most `num_bins` times, a bin at most once.

    Largest load first, each into the least loaded bin that may take it; `loads[item]` is that of one occurrence.
    """
    if len(items) <= num_bins:  # nothing to balance: what may stay in place does
        return [list(items[b : b + 1]) for b in range(num_bins)]
    least, num_more = divmod(len(items), num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    total = [0.0] * num_bins
    for item in sorted(items, key=lambda item: (-loads[item], item)):
        has_room = [b for b in range(num_bins) if len(bins[b]) < least + (num_more > 0)]
        choices = [(total[b], len(bins[b]), b) for b in has_room if item not in bins[b]]
        if choices:
            b = min(choices)[-1]
        else:
            # Every bin with room has this item. A bin without it exists, and is full, so it holds more than any of
            # those, hence something that they lack: that moves over and makes place. The move that loads least is done.
            _, b, full, other = min(
                (max(total[b] + loads[other], total[full] - loads[other] + loads[item]), b, full, other)
                for full in range(num_bins) if item not in bins[full]
                for b in has_room
                for other in bins[full] if other not in bins[b]
            )  # fmt: skip
            bins[full][bins[full].index(other)] = item
            total[full] += loads[item] - loads[other]
            item = other
        num_more -= len(bins[b]) == least
        bins[b].append(item)
        total[b] += loads[item]
    return bins


def _replicate(experts: Sequence[int], loads: Sequence[float], num_physical: int, most: int) -> list[int]:
    """Experts, each at least once and at most `most` times. Each further one is of the largest load per replica."""
    # Of equal loads, zeros perhaps, the expert with fewest replicas is next: or the first one would get all.
    heap = [(-loads[expert], 1, expert) for expert in experts]
    heapq.heapify(heap)
    items = list(experts)
    while len(items) < num_physical:
        _, count, expert = heapq.heappop(heap)
        if count < most:
            items.append(expert)
            heapq.heappush(heap, (-loads[expert] / (count + 1), count + 1, expert))
    return items


def rebalance(
    loads: Any, num_ranks: int, *, num_physical: int | None = None, num_nodes: int = 1, num_groups: int = 1
) -> Placement:
    """A placement on `num_ranks` ranks that evens out `loads` [num_experts], finite numbers >= 0 of any unit.

    The greedy method of DeepSeek's EPLB (github.com/deepseek-ai/EPLB): `num_groups` groups of experts (contiguous; what
    a group-limited router chooses among) are packed onto `num_nodes` nodes (contiguous ranks), then each node's experts
    are replicated, `num_physical` in all (default: no replicas), then packed onto its ranks. Unlike there, replicas are
    always on different ranks, and numbers may be uneven: by at most 1 per rank, and nodes with more load get more. If
    nodes don't divide groups, or have too few ranks for that many replicas, all ranks are treated as one node.

    `loads` may be a tensor (on a GPU: it is waited for), an array or a sequence. The same ones give the same placement
    on every machine, ties going to the lowest number; ranks must agree on them.
    """
    wanted = "finite numbers >= 0 [num_experts]"
    try:
        # by way of numpy: torch alone would round Python's floats to 32 bits
        tensor = loads if isinstance(loads, torch.Tensor) else torch.tensor(np.asarray(loads))
    except (TypeError, ValueError, RuntimeError):
        raise _wrong("rebalance", "loads", wanted, repr(loads)) from None
    if tensor.dim() != 1 or not len(tensor) or tensor.is_complex():
        raise _wrong("rebalance", "loads", wanted, describe(tensor))
    load_of: list[float] = tensor.to("cpu", torch.float64).tolist()
    if not (all(load >= 0 for load in load_of) and sum(load_of) < math.inf):
        raise _wrong("rebalance", "loads", wanted, load_of)
    num_experts, num_ranks = len(load_of), check_integer("rebalance", "num_ranks", num_ranks, 1)
    num_nodes = check_integer("rebalance", "num_nodes", num_nodes, 1)
    num_groups = check_integer("rebalance", "num_groups", num_groups, 1)
    num_physical = num_experts if num_physical is None else check_integer("rebalance", "num_physical", num_physical, 1)
    if not num_experts <= num_physical <= num_experts * num_ranks:
        wanted = f"from num_experts={num_experts} to {num_experts * num_ranks}, one per expert and rank"
        raise _wrong("rebalance", "num_physical", wanted, num_physical)
    if num_ranks % num_nodes:
        raise _wrong("rebalance", "num_nodes", f"a divisor of num_ranks={num_ranks}", num_nodes)
    if num_experts % num_groups:
        raise _wrong("rebalance", "num_groups", f"a divisor of num_experts={num_experts}", num_groups)
    node_ranks, width = num_ranks // num_nodes, num_experts // num_groups
    if num_groups % num_nodes or num_physical > num_experts * node_ranks:
        num_nodes, node_ranks = 1, num_ranks

    group_loads = [math.fsum(load_of[group * width : (group + 1) * width]) for group in range(num_groups)]
    nodes = _pack(range(num_groups), group_loads, num_nodes)
    # fsum is exact but for one rounding: the same in any order and version of Python
    by_load = sorted(range(num_nodes), key=lambda node: (-math.fsum(group_loads[group] for group in nodes[node]), node))
    each, more = divmod(num_physical, num_nodes)
    ranks: list[tuple[int, ...]] = []
    for node, groups in enumerate(nodes):
        experts = [group * width + i for group in sorted(groups) for i in range(width)]
        items = _replicate(experts, load_of, each + (by_load.index(node) < more), node_ranks)
        counts = Counter(items)
        share = [load / (counts[expert] or 1) for expert, load in enumerate(load_of)]
        ranks += [tuple(sorted(held)) for held in _pack(items, share, node_ranks)]
    return Placement(tuple(ranks))


class Load:
    """Tokens per logical expert, [num_experts]: their sum ``total`` in int64, and their mean over updates.

    `decay` in (0, 1] is an update's weight relative to the next one's; 1: a plain mean. Nothing waits for the device.
    A rank counts its own tokens: sum the counts over all ranks before they come here, or the mean before `rebalance`.
    """

    def __init__(self, num_experts: int, decay: float = 1.0, device: torch.device | str = "cpu"):
        if not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise _wrong("Load", "decay", "a number > 0 and <= 1", repr(decay))
        self.decay = float(decay)
        num_experts = check_integer("Load", "num_experts", num_experts, 1)
        with torch.inference_mode(False):  # or they could be changed in that mode only
            self.total = torch.zeros(num_experts, dtype=torch.int64, device=device)
            self._weighted = self.total.double()
            self._weight = self._weighted.new_zeros(())  # a tensor, so that a CUDA graph may hold updates

    def update(self, counts: torch.Tensor) -> None:
        """Adds `counts`, int32 or int64 [num_experts] on the same device: tokens since the last update."""
        is_count = isinstance(counts, torch.Tensor) and counts.dtype in INDEX_DTYPES
        if not is_count or counts.shape != self.total.shape or counts.device != self.total.device:
            wanted = f"int32 or int64 [{len(self.total)}] on {self.total.device}"
            raise _wrong("Load.update", "counts", wanted, describe(counts))
        self.total.add_(counts)
        self._weighted.mul_(self.decay).add_(counts)
        self._weight.mul_(self.decay).add_(1)

    @property
    def mean(self) -> torch.Tensor:
        """float64 [num_experts]; zeros before the first update, from which on the weights sum to at least 1."""
        return self._weighted / self._weight.clamp(min=1)

    def reset(self) -> None:
        """Forgets all updates."""
        for tensor in (self.total, self._weighted, self._weight):
            tensor.zero_()
