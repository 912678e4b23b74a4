"""Which values of a plan are partial sums, and where ranks keep them if sums are wide (`Plan.wide_sums`).

A value holds what one rank contributed, what all did, or something in between: a *partial sum*. Where sums are wide
partial sums have twice the bytes of what they sum, in messages and in memory; a sum of all ranks is rounded when it is
made, and narrow from then on. A partial sum that is kept lies in scratch, in a *shadow* of the chunk that it is written
to. So the accesses of a shadow are some of those of its chunk, which the proof has put in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from epcomm.collectives.plan.plan import BUFFERS, Location, Plan, Position
from epcomm.errors import ConfigError

#: How an operand lies, unless it is a partial sum in the shadow of that number: as what is summed; wide in a message.
NARROW, IN_MESSAGE = -1, -2


class Widths(NamedTuple):
    """How one chunk's operands of a step lie: its source; what that is added to, or the message; the result."""

    src: int = NARROW
    other: int = NARROW
    result: int = NARROW


@dataclass(frozen=True)
class PartialSums:
    """The widths of each step's chunks, and how many shadows each rank has."""

    widths: dict[Position, list[Widths]]
    num_shadows: list[int]


class _Value(NamedTuple):
    """Which ranks contributed, as bits; the chunk in whose shadow it lies, if it is a partial sum that is kept."""

    ranks: int
    place: Location | None = None


def partial_sums(plan: Plan, order: Sequence[Position]) -> PartialSums:
    """Of a plan that is proven, whose steps can run in an order; ConfigError if they aren't the same in place."""
    found = [_Run(plan, order, in_place) for in_place in plan.placements]
    for position, widths in found[0].widths.items():
        if widths != found[-1].widths[position]:
            problem = f"{position} has other partial sums in place: wanted a plan that is meant for one placement"
            raise ConfigError(f"plan {plan.name}: wide_sums: {problem}")
    return PartialSums(found[0].widths, [len(numbers) for numbers in found[0].shadows])


class _Run:
    """The plan, run on sets of ranks."""

    def __init__(self, plan: Plan, order: Sequence[Position], in_place: bool):
        ranks = range(plan.num_ranks)
        self._everyone = (1 << plan.num_ranks) - 1
        self._bases = [plan.bases(rank, in_place) for rank in ranks]
        self._memory = [[_Value(0)] * bases[-1] for bases in self._bases]
        self._messages: dict[tuple[int, int, int], deque[list[_Value]]] = defaultdict(deque)
        self.widths: dict[Position, list[Widths]] = {}
        self.shadows: list[dict[Location, int]] = [{} for _ in ranks]
        for rank in ranks:
            num_chunks = plan.collective.input_chunks(rank)
            self._memory[rank][self._at(rank, Location("input", 0), num_chunks)] = [_Value(1 << rank)] * num_chunks
        for position in order:
            self._do(plan, position)

    def _do(self, plan: Plan, position: Position) -> None:
        step = plan.programs[position.rank][position.program].steps[position.step]
        op, rank, memory = step.op, position.rank, self._memory[position.rank]
        src = other = [_Value(0)] * step.count
        if step.src is not None:
            src = memory[self._at(rank, step.src, step.count)]
        if step.receive_from is not None:
            other = self._messages[step.receive_from, rank, position.channel].popleft()
        elif op.reduces and step.dst is not None:
            other = memory[self._at(rank, step.dst, step.count)]
        ranks = [a.ranks | b.ranks for a, b in zip(src, other, strict=True)]
        results = [_Value(bits, self._shadowed(bits, step.dst, place)) for place, bits in enumerate(ranks)]
        if step.send_to is not None:
            sent = [_Value(bits) for bits in ranks]
            self._messages[rank, step.send_to, position.channel].append(sent)
        if step.dst is not None:
            memory[self._at(rank, step.dst, step.count)] = results
        operands = zip(src, other, results, strict=True)
        self.widths[position] = [Widths(*(self._width(rank, value) for value in values)) for values in operands]

    def _at(self, rank: int, location: Location, count: int) -> slice:
        first = self._bases[rank][BUFFERS.index(location.buffer)] + location.offset
        return slice(first, first + count)

    def _is_partial(self, ranks: int) -> bool:
        return ranks & (ranks - 1) > 0 and ranks != self._everyone

    def _shadowed(self, ranks: int, dst: Location | None, place: int) -> Location | None:
        """The chunk to whose shadow a result is written, if any."""
        return Location(dst.buffer, dst.offset + place) if dst is not None and self._is_partial(ranks) else None

    def _width(self, rank: int, value: _Value) -> int:
        if not self._is_partial(value.ranks):
            return NARROW
        numbers = self.shadows[rank]
        return IN_MESSAGE if value.place is None else numbers.setdefault(value.place, len(numbers))
