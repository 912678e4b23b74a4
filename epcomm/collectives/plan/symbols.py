"""A plan run on symbols: what each chunk is made of at the end, and whether that is the collective's result."""

from __future__ import annotations

from collections import Counter
from functools import cached_property

import numpy as np

from epcomm.collectives.plan import passes
from epcomm.collectives.plan.conditions import ALL_RANKS
from epcomm.collectives.plan.explain import placed
from epcomm.collectives.plan.graph import Graph
from epcomm.errors import PlanError

_MAX_PARTS = 8  # of a sum, in a message


class Symbols:
    """The values in all ranks' memory after a run. Values are numbered as `passes.dataflow_of` says."""

    def __init__(self, graph: Graph, steps: np.ndarray, order: np.ndarray, in_place: bool):
        self.graph, self.plan, self.in_place = graph, graph.plan, in_place
        collective, ranks = self.plan.collective, range(self.plan.num_ranks)
        self._bases = [self.plan.bases(rank, in_place) for rank in ranks]
        self._inputs = [collective.input_chunks(rank) for rank in ranks]
        #: the leaf of rank r's input chunk c is _first_leaf[r] + c
        self._first_leaf = 1 + np.concatenate([[0], np.cumsum(self._inputs)]).astype(np.int64)
        self.num_leaves = int(self._first_leaf[-1]) - 1
        self._memory_of_rank = graph.memory_of_rank(in_place)
        memory = np.full(self._memory_of_rank[-1], passes.UNDEFINED, np.int64)
        for rank in ranks:
            self._part(memory, rank, 0, self._inputs[rank])[:] = self._leaves(rank)
        self._writers = np.full_like(memory, -1)
        sizes = np.where(graph.flags & passes.SENDS, graph.count, 0)
        messages = np.empty(sizes.sum(), np.int64)
        first_message = np.cumsum(sizes) - sizes
        sums = np.empty((np.where(graph.flags & passes.REDUCES, graph.count, 0).sum(), 2), np.int64)
        passes.dataflow_of()(
            steps, order, self._memory_of_rank, memory, self._writers, first_message, messages, sums, self.num_leaves
        )
        self.memory, self.sums = memory, sums

    def check(self) -> None:
        """PlanError ("result") unless each rank's memory holds what it should."""
        collective = self.plan.collective
        for rank in range(self.plan.num_ranks):
            contributors, positions = collective.wanted(rank)
            if collective.is_reduction:
                is_right = self._is_sum_of_all(self.output(rank)) & (self._positions[self.output(rank)] == positions)
            else:
                is_right = self.output(rank) == self._first_leaf[contributors] + positions
            for chunk in np.flatnonzero(~is_right):
                who = "every rank" if contributors[chunk] == ALL_RANKS else f"rank {contributors[chunk]}"
                wanted = f"chunk {positions[chunk]} of the input of {who}, once"
                raise self._error(rank, "output", 1, int(chunk), wanted)
            kept = self._part(self.memory, rank, 0, self._inputs[rank]) == self._leaves(rank)
            if self.in_place:
                first = self._bases[rank][1] - self._bases[rank][0]  # the output, seen from where the input begins
                kept[max(first, 0) : max(first + len(positions), 0)] = True
            for chunk in np.flatnonzero(~kept):
                raise self._error(rank, "input", 0, int(chunk), "what it was: it is no result")

    def output(self, rank: int) -> np.ndarray:
        """The values of a rank's output."""
        return self._part(self.memory, rank, 1, self.plan.collective.output_chunks(rank))

    @property
    def roundings(self) -> int:
        """The longest chain of sums in a rank's result."""
        depths = self._contents[3]
        return max((int(depths[self.output(rank)].max(initial=0)) for rank in range(self.plan.num_ranks)), default=0)

    @property
    def same_bits(self) -> bool:
        """Are the results of all ranks that have one the same sums, up to the order of a sum's operands?"""
        if self.plan.collective.kind != "allreduce":
            return True
        canonical = self._canonical()
        results = [canonical[self.output(rank)] for rank in range(self.plan.num_ranks)]
        return all((result == results[0]).all() for result in results)

    def _canonical(self) -> np.ndarray:
        """A number per value, the same for values that are the same sums. Chain by chain, from the shortest."""
        depths = self._contents[3]
        canonical = np.arange(len(depths))
        depth_of_sum = depths[self.num_leaves + 1 :]
        for depth in range(1, int(depth_of_sum.max(initial=0)) + 1):
            chosen = np.flatnonzero(depth_of_sum == depth)
            operands = np.sort(canonical[self.sums[chosen]], axis=1)
            _, first, inverse = np.unique(operands, axis=0, return_index=True, return_inverse=True)
            canonical[self.num_leaves + 1 + chosen] = self.num_leaves + 1 + chosen[first][inverse.reshape(-1)]
        return canonical

    @cached_property
    def _contents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of all values: positions, ranks as bits [num_values, words], states, depths."""
        num_ranks, num_values = self.plan.num_ranks, 1 + self.num_leaves + len(self.sums)
        positions, states, depths = np.zeros((3, num_values), np.int64)
        ranks = np.zeros((num_values, -(-num_ranks // 64)), np.uint64)
        for rank in range(num_ranks):
            leaves = self._leaves(rank)
            positions[leaves] = np.arange(len(leaves))
            ranks[leaves, rank // 64] = 1 << rank % 64
        states[passes.UNDEFINED] = passes.HAS_UNDEFINED
        passes.contents_of()(self.sums, self.num_leaves, positions, ranks, states, depths)
        return positions, ranks, states, depths

    @property
    def _positions(self) -> np.ndarray:
        return self._contents[0]

    def _is_sum_of_all(self, values: np.ndarray) -> np.ndarray:
        _, ranks, states, _ = self._contents
        count = np.unpackbits(ranks[values].view(np.uint8), axis=1).sum(axis=1)
        return (states[values] == passes.SOUND) & (count == self.plan.num_ranks)

    def _leaves(self, rank: int) -> np.ndarray:
        return np.arange(self._first_leaf[rank], self._first_leaf[rank + 1])

    def _part(self, memory: np.ndarray, rank: int, buffer: int, size: int) -> np.ndarray:
        first = self._memory_of_rank[rank] + self._bases[rank][buffer]
        return memory[first : first + size]

    def _error(self, rank: int, name: str, buffer: int, chunk: int, wanted: str) -> PlanError:
        at = self._memory_of_rank[rank] + self._bases[rank][buffer] + chunk
        writer = int(self._writers[at])
        by = "nothing wrote it" if writer < 0 else f"written last by {self.graph.describe(writer)}"
        message = (
            f"plan {self.plan.name}: rank {rank}'s {name}[{chunk}] ({placed(self.in_place)}): wanted {wanted}; "
            f"got {self._described(int(self.memory[at]))}; {by}"
        )
        return PlanError("result", message, None if writer < 0 else self.graph.position(writer))

    def _described(self, value: int) -> str:
        """What a value is the sum of."""
        counts: Counter[int] = Counter({value: 1})
        while (largest := max(counts)) > self.num_leaves:  # operands have lower numbers than their sum
            times = counts.pop(largest)
            for operand in self.sums[largest - self.num_leaves - 1].tolist():
                counts[operand] += times
        parts = []
        for leaf, times in sorted(counts.items()):
            rank = int(np.searchsorted(self._first_leaf, leaf, side="right")) - 1
            chunk = "what was never written" if leaf == passes.UNDEFINED else ""
            chunk = chunk or f"chunk {leaf - self._first_leaf[rank]} of rank {rank}"
            parts.append(chunk + (f", {times} times" if times > 1 else ""))
        more = f" and {len(parts) - _MAX_PARTS} more" if len(parts) > _MAX_PARTS else ""
        return "; ".join(parts[:_MAX_PARTS]) + more
