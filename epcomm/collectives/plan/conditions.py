"""What a collective means, in chunks: how many a rank has, which it starts with, and which it must end with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epcomm.errors import ConfigError

#: The collectives a plan can be of.
COLLECTIVES = ("allreduce", "allgather", "reduce_scatter", "broadcast", "reduce", "alltoall")
REDUCTIONS = frozenset({"allreduce", "reduce_scatter", "reduce"})
ROOTED = frozenset({"broadcast", "reduce"})

#: As a contributor: every rank.
ALL_RANKS = -1


@dataclass(frozen=True)
class Collective:
    """A collective among `num_ranks` ranks whose unit is `num_chunks` chunks.

    The unit is the whole tensor of allreduce, broadcast and reduce, and one rank's block of the others: a rank's input
    of reduce_scatter and alltoall and its output of allgather and alltoall are `num_ranks` units, one per rank in
    order. Only the root of a broadcast has an input, only that of a reduce an output.
    """

    kind: str
    num_ranks: int
    num_chunks: int
    root: int = 0

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise ConfigError(f"collective: wanted one of {', '.join(COLLECTIVES)}, got {self.kind!r}")
        for name, least in (("num_ranks", 1), ("num_chunks", 1), ("root", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"{self.kind}: {name}: wanted an integer >= {least}, got {value!r}")
        if self.root >= self.num_ranks:
            raise ConfigError(f"{self.kind}: root: wanted a rank below {self.num_ranks}, got {self.root}")

    @property
    def is_reduction(self) -> bool:
        return self.kind in REDUCTIONS

    def input_chunks(self, rank: int) -> int:
        """Chunks of a rank's input."""
        if self.kind == "broadcast" and rank != self.root:
            return 0
        return self.num_chunks * (self.num_ranks if self.kind in ("reduce_scatter", "alltoall") else 1)

    def output_chunks(self, rank: int) -> int:
        """Chunks of a rank's output."""
        if self.kind == "reduce" and rank != self.root:
            return 0
        return self.num_chunks * (self.num_ranks if self.kind in ("allgather", "alltoall") else 1)

    def overlay(self, rank: int) -> tuple[int, int]:
        """Where input and output begin in their shared memory when the collective runs in place.

        The input of an allgather is this rank's block of its output, the output of a reduce_scatter this rank's block
        of its input; elsewhere the two are one.
        """
        block = rank * self.num_chunks
        return (block, 0) if self.kind == "allgather" else (0, block) if self.kind == "reduce_scatter" else (0, 0)

    def wanted(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """What each chunk of a rank's output must be: (contributor, position), int64 [output_chunks] each.

        The chunk at `position` of the contributor's input, or for ALL_RANKS the sum of those of every rank.
        """
        chunks = np.arange(self.output_chunks(rank))
        block, within = np.divmod(chunks, self.num_chunks)
        everyone = np.full_like(chunks, ALL_RANKS)
        return {
            "allreduce": (everyone, chunks),
            "reduce": (everyone, chunks),
            "reduce_scatter": (everyone, rank * self.num_chunks + chunks),
            "broadcast": (np.full_like(chunks, self.root), chunks),
            "allgather": (block, within),
            "alltoall": (block, rank * self.num_chunks + within),
        }[self.kind]

    def __str__(self) -> str:
        root = f", root {self.root}" if self.kind in ROOTED else ""
        return f"{self.kind} of {self.num_ranks} ranks, {self.num_chunks} chunks{root}"
