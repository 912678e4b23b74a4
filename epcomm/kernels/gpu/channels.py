"""How the programs of one rank share out the channels of a collective, and the ranks a channel's chunks."""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device
from epcomm.kernels.protocol import collectives as protocol


@device
def share_of(program, num_channels):
    """(first channel of a program, the one after its last).

    Shares are contiguous, so channels begin in the same order on every rank, however many programs it has: a rank whose
    programs run one after the other waits for peers only at channels that they come to before all later ones.
    """
    num_programs = tl.num_programs(0)
    return program * num_channels // num_programs, (program + 1) * num_channels // num_programs


@device
def part_bytes(num_bytes, size):
    """Bytes of a chunk that each rank but the last reduces: whole 64-byte vectors."""
    return ((num_bytes + size - 1) // size + 63) & -64


@device
def slot_offset(ring, chunk):
    """Offset of a chunk's slot in a ring."""
    return ring + chunk % protocol.NUM_SLOTS * protocol.CHUNK_BYTES
