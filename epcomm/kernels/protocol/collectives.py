"""Regions of the collectives in the control segment, after the control region. Offsets are bytes from its start.

Chunks flow through rings of slots. A ring's words count chunks over the whole life of the communicator (generation in
the top bits), so nothing is ever reset. Work is cut into channels, each with words and slots of its own; a program
takes every ``num_programs``-th channel. How many channels there are is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.device.control import LINE, control_region_bytes
from epcomm.heap.layout import Layout

ONE_SHOT_BYTES = 32 << 10  # larger messages go in two shots, where they cost less traffic
TINY_BYTES = LINE - 8  # these share a line with their flag
CHUNK_BYTES = 512 << 10  # a chunk of every rank stays in cache: 32-128 KiB were measured 10-40 % slower
NUM_SLOTS = 4
CHANNEL_SLOT_BYTES = 64 << 10  # point to point
CHANNEL_SLOTS = 4

# ---- words of a collective channel, one line each, raised by their owner and read by all peers
STAGED, REDUCED, SENT, TAKEN = range(4)
CHANNEL_WORDS = 4


@dataclass(frozen=True)
class CollectiveRegions:
    """Byte offsets in the control segment."""

    barrier: int  # [size] lines: word r is raised by rank r
    tiny: int  # [2] lines by epoch parity: flag, then up to TINY_BYTES
    one_shot_flags: int  # [2] lines by epoch parity
    one_shot: int  # [2, ONE_SHOT_BYTES] by epoch parity
    splits: int  # [2 by epoch parity, size] lines of flag, then [2, size, size] byte counts
    split_table: int
    words: int  # [channels, CHANNEL_WORDS] lines
    staged: int  # [channels, NUM_SLOTS, chunk]
    reduced: int  # [channels, NUM_SLOTS, chunk]
    inbox: int  # [size] point-to-point inboxes, one per sender
    inbox_bytes: int
    size: int  # of the whole segment


def collective_regions(size: int, num_channels: int) -> CollectiveRegions:
    """The layout for a communicator of `size` ranks. Pages are taken when first used."""
    layout = Layout()
    layout.add("control", control_region_bytes(size))
    inbox_bytes = 4 * LINE + CHANNEL_SLOTS * CHANNEL_SLOT_BYTES
    return CollectiveRegions(
        barrier=layout.add("barrier", size * LINE),
        tiny=layout.add("tiny", 2 * LINE, LINE),
        one_shot_flags=layout.add("one_shot_flags", 2 * LINE, LINE),
        one_shot=layout.add("one_shot", 2 * ONE_SHOT_BYTES),
        splits=layout.add("splits", 2 * size * LINE),
        split_table=layout.add("split_table", 2 * size * size * 8),
        words=layout.add("words", num_channels * CHANNEL_WORDS * LINE),
        staged=layout.add("staged", num_channels * NUM_SLOTS * CHUNK_BYTES),
        reduced=layout.add("reduced", num_channels * NUM_SLOTS * CHUNK_BYTES),
        inbox=layout.add("inbox", size * inbox_bytes),
        inbox_bytes=inbox_bytes,
        size=layout.size,
    )
