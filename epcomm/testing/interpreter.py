"""Ranks whose kernels are the GPU target's, run by Triton's interpreter on CPU memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interpreted_kernels(num_programs: int = 2) -> Iterator[None]:
    """Communicators that `epcomm.init` makes inside run interpreted Triton kernels, `num_programs` of them per rank.

    Their peers may run others: the protocol is the same. One such rank per process. Raises UnsupportedError if Triton
    was imported as a compiler before.
    """
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    from epcomm.kernels.gpu.target import InterpretedTarget
    from epcomm.kernels.target import make_target

    token = make_target.set(lambda: InterpretedTarget(num_programs))
    try:
        yield
    finally:
        make_target.reset(token)
