"""Three collectives in epcomm's language: proven, shown, and run on numpy arrays in one thread.

    python examples/plans.py
"""

from __future__ import annotations

import numpy as np

from epcomm.collectives.language import Collective, Trace, chunk
from epcomm.collectives.plan import Plan
from epcomm.collectives.plan.reference import execute
from epcomm.collectives.plan.verify import verify


def ring_allreduce(size: int) -> Plan:
    with Trace("ring", Collective("allreduce", size, num_chunks=size)) as trace:
        for index in range(size):  # this chunk goes around once as a sum, which rank `index` completes, once as result
            total = chunk((index + 1) % size, "input", index)
            for step in range(2, size + 1):
                total = chunk((index + step) % size, "input", index).reduce(total, "output")
            for step in range(1, size):
                total = total.copy((index + step) % size)
    return trace.plan(channels=2, pieces=2)


def hierarchical_allreduce(nodes: int, size: int) -> Plan:
    with Trace("hierarchical", Collective("allreduce", nodes * size, num_chunks=size)) as trace:
        for local in range(size):  # chunk `local` is summed by this rank of each node, then along a rail of those ranks
            rail = [node * size + local for node in range(nodes)]
            for rank in rail:
                total = chunk(rank, "input", local).copy(rank, "output")
                for other in range(rank - local, rank - local + size):
                    if other != rank:
                        total = total.reduce(chunk(other, "input", local))
            for before, rank in zip(rail, rail[1:]):
                chunk(rank, "output", local).reduce(chunk(before, "output", local), channel=1)
            for before, rank in zip(rail[::-1], rail[-2::-1]):
                chunk(before, "output", local).copy(rank, channel=1)
            for rank in rail:
                for other in range(rank - local, rank - local + size):
                    chunk(rank, "output", local).copy(other, channel=2)
    return trace.plan()


def all_pairs_alltoall(size: int) -> Plan:
    with Trace("all pairs", Collective("alltoall", size, num_chunks=1), in_place=False) as trace:
        for rank in range(size):
            for to in range(size):
                chunk(rank, "input", to).copy(to, "output", rank)
    return trace.plan()


def run(plan: Plan) -> list[np.ndarray]:
    """Each rank's output where rank r's input chunk c is [100 * r + c]."""
    collective = plan.collective
    sizes = [collective.input_chunks(rank) for rank in range(plan.num_ranks)]
    return execute(plan, [100 * rank + np.arange(size)[:, None] for rank, size in enumerate(sizes)]).outputs


def main() -> None:
    for plan in (ring_allreduce(4), hierarchical_allreduce(2, 3), all_pairs_alltoall(3)):
        proof = verify(plan)
        print(f"{plan.name}, {plan.collective}: proven, {plan.num_steps} steps, rounds {proof.roundings} times")
        print("  rank 1 has", run(plan)[1].ravel().tolist())
    all_pairs_alltoall(2).show()


if __name__ == "__main__":
    main()
