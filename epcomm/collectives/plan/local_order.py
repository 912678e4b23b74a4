"""Which steps of a rank have to wait for which of its others, where messages order nothing but their own data.

A plan's proof may order two accesses of a rank to one chunk by messages: one program sends, another rank answers, and
the answer reaches another program. With the protocol "simple" that is how it runs, too. With "ll" and "ll128" a rank
may answer the first words before the others are sent, so such steps wait for each other directly. They do so in the
order that the proof found, so no circle comes about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from epcomm.collectives.plan.plan import BUFFERS, Dependency, Plan, Position


def local_order(plan: Plan, rank: int, order: Sequence[Position]) -> dict[Position, set[Dependency]]:
    """For steps of a rank, given in an order: those of its other programs whose accesses to a chunk come right before.

    One of the two accesses writes: they are of the write before each access, and of the reads since before each write.
    """
    found: dict[Position, set[Dependency]] = defaultdict(set)
    for in_place in plan.placements:
        bases = plan.bases(rank, in_place)
        written: dict[int, Dependency] = {}
        read: dict[int, dict[int, Dependency]] = defaultdict(dict)  # by chunk, then by program
        for position in order:
            step = plan.programs[rank][position.program].steps[position.step]
            here = Dependency(position.program, position.step)
            for location, writes in ((step.src, False), (step.dst, True)):
                if location is None:
                    continue
                first = bases[BUFFERS.index(location.buffer)] + location.offset
                for chunk in range(first, first + step.count):
                    before = [written[chunk]] if chunk in written else []
                    if writes:
                        before += read.pop(chunk, {}).values()
                        written[chunk] = here
                    else:
                        read[chunk][here.program] = here
                    found[position].update(other for other in before if other.program != here.program)
    return found
