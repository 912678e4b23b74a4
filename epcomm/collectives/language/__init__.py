"""A language for collectives: Python loops that say where chunks go, compiled to a plan.

    with Trace("ring", Collective("allgather", num_ranks=4, num_chunks=1)) as trace:
        for rank in range(4):
            chunk(rank, "input", 0).copy(rank, "output", rank)
            for step in range(3):
                chunk((rank + step) % 4, "output", rank).copy((rank + step + 1) % 4)
    plan = trace.plan()
"""

from epcomm.collectives.language.trace import Chunk, Trace, chunk
from epcomm.collectives.plan import Collective

__all__ = ["Chunk", "Collective", "Trace", "chunk"]
