"""What else could be asked for instead of a collective, when that is enough, and what it would cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from epcomm.collectives.cost.choice import DTYPES, Request, choose
from epcomm.errors import ConfigError


@dataclass(frozen=True)
class Alternative:
    """Collectives one after the other, `kinds`, that are enough `when` something holds.

    `power`: their unit is the request's, times the number of ranks to this power.
    """

    when: str
    kinds: tuple[str, ...]
    power: int = 0

    def requests(self, request: Request) -> list[Request]:
        """The collectives in place of a request; a part that is no whole number of elements is rounded up."""
        size = DTYPES[request.dtype]
        elements = request.num_bytes // size
        elements = elements * request.num_ranks if self.power > 0 else elements
        elements = -(-elements // request.num_ranks) if self.power < 0 else elements
        return [replace(request, num_bytes=elements * size, kind=kind, root=0) for kind in self.kinds]


ALTERNATIVES = {
    "allreduce": (
        Alternative("only one rank reads the result", ("reduce",)),
        Alternative("each rank reads only its part of the result", ("reduce_scatter",), -1),
        Alternative(
            "each rank works on its part before all read the whole, as sharded optimizers do",
            ("reduce_scatter", "allgather"),
            -1,
        ),
    ),
    "allgather": (
        Alternative("the blocks are only summed", ("allreduce",)),
        Alternative("each rank reads only its part of every block", ("alltoall",), -1),
    ),
    "reduce_scatter": (
        Alternative("every rank reads the whole sum in the end", ("allreduce",), 1),
        Alternative("one rank reads the whole sum in the end", ("reduce",), 1),
    ),
    "broadcast": (
        Alternative("each rank has a part of it already, as of sharded parameters", ("allgather",), -1),
    ),
    "reduce": (
        Alternative("the ranks can share the work on the result", ("reduce_scatter",), -1),
        Alternative("every rank reads the result in the end", ("allreduce",)),
    ),
    "alltoall": (
        Alternative("a rank has the same for all ranks", ("allgather",)),
        Alternative("what a rank gets is only summed", ("reduce_scatter",)),
    ),
}  # fmt: skip


def priced(request: Request) -> Iterator[tuple[Alternative, float]]:
    """The alternatives to a request and their prices in µs, without those that no algorithm does on its machine."""
    for alternative in ALTERNATIVES[request.kind]:
        try:
            found = [choose(each) for each in alternative.requests(request)]
        except ConfigError:  # no links join those that would talk
            continue
        if all(each.has_price for each in found):
            yield alternative, sum(each.microseconds for each in found)
