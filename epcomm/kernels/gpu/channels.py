"""How the programs of one rank share out the channels of a collective."""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device


@device
def share_of(program, num_channels):
    """(first channel of a program, the one after its last).

    Shares are contiguous, so channels begin in the same order on every rank, however many programs it has: a rank whose
    programs run one after the other waits for peers only at channels that they come to before all later ones.
    """
    num_programs = tl.num_programs(0)
    return program * num_channels // num_programs, (program + 1) * num_channels // num_programs
