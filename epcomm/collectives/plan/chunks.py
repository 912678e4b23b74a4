"""How many bytes a plan's chunks have, and where they are in tensors of any size.

A chunk has as many bytes as all others of its block, a multiple of 64, but for the last ones, which may have fewer or
none. Scratch has room for the largest in each place.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from epcomm.collectives.plan.conditions import Collective
from epcomm.collectives.plan.plan import BUFFERS, Location, Plan, Position
from epcomm.errors import ConfigError
from epcomm.heap.layout import align_up
from epcomm.kernels.protocol.plans import TILE_ALIGNMENT


@dataclass(frozen=True)
class Chunks:
    """Byte offsets of chunks in blocks of `block_bytes`."""

    collective: Collective
    block_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """Of all but the last ones."""
        return align_up(-(-self.block_bytes // self.collective.num_chunks), TILE_ALIGNMENT)

    @property
    def are_equal(self) -> bool:
        """Do all have as many bytes?"""
        return self.bytes_at(self.collective.num_chunks - 1) == self.chunk_bytes

    def offset(self, buffer: str, chunk: int) -> int:
        if buffer == "scratch":
            return chunk * self.chunk_bytes
        block, within = divmod(chunk, self.collective.num_chunks)
        return block * self.block_bytes + min(self.block_bytes, within * self.chunk_bytes)

    def num_bytes(self, buffer: str, chunk: int) -> int:
        return self.chunk_bytes if buffer == "scratch" else self.bytes_at(chunk % self.collective.num_chunks)

    def bytes_at(self, within: int) -> int:
        """Of a chunk by its position in a block."""
        return min(self.chunk_bytes, max(0, self.block_bytes - within * self.chunk_bytes))


def check_sizes(plan: Plan, order: Sequence[Position], chunks: Chunks) -> None:
    """ConfigError if the plan, run in an order, would keep a chunk where a smaller one belongs."""
    num_chunks = plan.collective.num_chunks
    if chunks.are_equal:
        return
    for in_place in plan.placements:
        for position, value, chunk in _kept_values(plan, order, in_place):
            if chunks.bytes_at(value) > chunks.bytes_at(chunk % num_chunks):
                raise ConfigError(
                    f"plan {plan.name}: {position} keeps a chunk where a smaller one belongs: wanted a number of bytes "
                    f"that {num_chunks} chunks of whole {TILE_ALIGNMENT} bytes make up, got {chunks.block_bytes}"
                )


def moved_bytes(plan: Plan, order: Sequence[Position], chunks: Chunks) -> dict[Position, list[int]]:
    """How many bytes of each of its chunks a step moves, for the steps of an order in which the plan runs.

    So many as exist of its source and its destination, and of what it receives: both ends of a message say the same.
    """
    found: dict[Position, list[int]] = {}
    messages: dict[tuple[int, int, int], deque[list[int]]] = defaultdict(deque)
    for position in order:
        step = plan.programs[position.rank][position.program].steps[position.step]
        sizes = [chunks.chunk_bytes] * max(step.count, 1)
        for location in (step.src, step.dst):
            if location is not None:
                there = (chunks.num_bytes(location.buffer, location.offset + place) for place in range(len(sizes)))
                sizes = [*map(min, sizes, there)]
        if step.receive_from is not None:
            sizes = [*map(min, sizes, messages[step.receive_from, position.rank, position.channel].popleft())]
        if step.send_to is not None:
            messages[position.rank, step.send_to, position.channel].append(sizes)
        found[position] = sizes
    return found


def _kept_values(plan: Plan, order: Sequence[Position], in_place: bool) -> Iterator[tuple[Position, int, int]]:
    """Of every chunk of input or output that is written: who writes it, the value's position in its block, the chunk.

    Sums are of values of one position, so a sum has that of either operand.
    """
    bases = [plan.bases(rank, in_place) for rank in range(plan.num_ranks)]
    memory = [[0] * of_rank[-1] for of_rank in bases]
    messages: dict[tuple[int, int, int], list[list[int]]] = defaultdict(list)

    def at(rank: int, location: Location, count: int) -> slice:
        first = bases[rank][BUFFERS.index(location.buffer)] + location.offset
        return slice(first, first + count)

    for rank in range(plan.num_ranks):
        num_input = plan.collective.input_chunks(rank)
        values = [chunk % plan.collective.num_chunks for chunk in range(num_input)]
        memory[rank][at(rank, Location("input", 0), num_input)] = values
    for position in order:
        step = plan.programs[position.rank][position.program].steps[position.step]
        rank, channel, moved = position.rank, position.channel, list[int]()
        if step.src is not None:
            moved = memory[rank][at(rank, step.src, step.count)]
        if step.receive_from is not None:
            moved = messages[step.receive_from, rank, channel].pop(0)
        if step.send_to is not None:
            messages[rank, step.send_to, channel].append(moved)
        if step.dst is not None:
            memory[rank][at(rank, step.dst, step.count)] = moved
            if step.dst.buffer != "scratch":
                yield from ((position, value, step.dst.offset + place) for place, value in enumerate(moved))
