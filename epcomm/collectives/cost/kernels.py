"""Allreduces by kernels written by hand: candidates beside plans, and what is taken where nothing has a price.

This loads nothing: what `auto` means on most machines is known without the cost model.
"""

from __future__ import annotations

from epcomm.kernels.protocol.collectives import ONE_SHOT_BYTES


def kernels_for(num_bytes: int, num_nodes: int) -> tuple[str, ...]:
    """The algorithms that have a kernel for so many bytes among ranks of so many nodes."""
    if num_nodes > 1:
        return ("hierarchical",)  # the kernel that is called rails
    return ("one_shot", "two_shot") if num_bytes <= ONE_SHOT_BYTES else ("two_shot",)


def measured_kernel(num_bytes: int, num_nodes: int = 1) -> str:
    """The one that is taken where no prices are compared.

    On cores of a host that was measured: one_shot is faster up to ONE_SHOT_BYTES, and plans of as many bytes copy them
    once more, into FIFOs.
    """
    return kernels_for(num_bytes, num_nodes)[0]


def octave(num_bytes: int) -> int:
    """The next power of two: an allreduce is chosen as of so many bytes, for pricing takes longer than running one."""
    return 1 << (num_bytes - 1).bit_length()
