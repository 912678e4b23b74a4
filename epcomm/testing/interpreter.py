"""Ranks whose kernels are the GPU target's, run by Triton's interpreter on CPU memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from epcomm.world.rendezvous import launched_rank


@contextmanager
def interpreted_kernels(num_programs: int = 2, **options: Any) -> Iterator[None]:
    """Communicators that `epcomm.init` makes inside run interpreted Triton kernels, `num_programs` of them per rank.

    Their peers may run others: the protocol is the same. One such rank per process. `options` are those of
    `InterpretedTarget`. Raises UnsupportedError if Triton was imported as a compiler before.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    from epcomm.kernels.gpu.interpreted import InterpretedTarget
    from epcomm.kernels.target import make_target

    token = make_target.set(lambda: InterpretedTarget(num_programs, **options))
    try:
        yield
    finally:
        make_target.reset(token)


def kernels_of(kind: str, **options: Any) -> AbstractContextManager[None]:
    """`interpreted_kernels` on the ranks of a launch that have them: "triton" all, "mixed" the odd ones, "numba" none.

    Ranks differ in how many programs they run.
    """
    launched = launched_rank.get()
    rank = 0 if launched is None else launched.rank
    if kind == "triton" or (kind == "mixed" and rank % 2 == 1):
        return interpreted_kernels(1 + rank % 3, **options)
    return nullcontext()
