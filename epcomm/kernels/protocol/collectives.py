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
PIECE_BYTES = 64 << 10  # of a point-to-point message
INBOX_NUM_SLOTS = 4

# ---- parameter block: words that every call sets, then (from 7) those that binding sets
X, OUT, NUM_BYTES = range(3)
STREAMING = 3
STATE, REDUCE, SOURCES = 7, 8, 9  # addresses: state block, reduction, an array of [channels, size] addresses
ROOT = 10  # the rank that gets the result, or -1: all do
TABLE = 11  # exchange: address of [4, size] words, see below
SHARED = 12  # exchange: 1 if every receiver reads the same staged bytes
MAX_PAIR_BYTES = 13  # exchange: the most that any rank sends to any other; the same on all ranks
NUM_WORDS = 14
# rows of an exchange's table: byte offsets in x and out, and byte counts, by peer
SEND_OFFSET, SEND_BYTES, RECEIVE_OFFSET, RECEIVE_BYTES = range(4)

# ---- state block (words): private memory that all collectives of a communicator share
(
    BARRIER,
    TINY,
    ONE_SHOT_FLAGS,
    ONE_SHOT,
    WORDS,
    STAGED_SLOTS,
    REDUCED_SLOTS,
    SENT_SLOTS,
    NUM_CHANNELS,
) = range(9)
BARRIER_EPOCH, ONE_SHOT_EPOCH = 9, 10
MULTICAST = 11  # address at which NVLink's switch reaches all ranks' segments, 0 if it doesn't
CHUNKS = 16  # per channel: chunks that went through the two-shot ring, and through the exchange ring

# ---- point to point: a sender's inbox at the receiver is two word lines, then slots of a header line and bytes
# parameter block: the peer, the inbox's offset, the message's fingerprint, and the address of the count of slots that
# went through the inbox so far
PEER, INBOX, MESSAGE, COUNT = 7, 8, 9, 10
INBOX_SENT, INBOX_TAKEN, INBOX_SLOTS = 0, LINE, 2 * LINE
INBOX_SLOT_BYTES = LINE + PIECE_BYTES

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
    words: int  # [channels, CHANNEL_WORDS] lines
    staged: int  # [channels, NUM_SLOTS, chunk]
    reduced: int  # [channels, NUM_SLOTS, chunk]
    sent: int  # [channels, NUM_SLOTS, chunk]
    inbox: int  # [size] point-to-point inboxes, one per sender
    copies: int  # staging of data movement by copies
    inbox_bytes: int
    size: int  # of the whole segment


def collective_regions(size: int, num_channels: int, copy_bytes: int = 0) -> CollectiveRegions:
    """The layout for a communicator of `size` ranks. Pages are taken when first used.

    `copy_bytes`: staging of data movement by copies, if it goes that way.
    """
    layout = Layout()
    layout.add("control", control_region_bytes(size))
    inbox_bytes = INBOX_SLOTS + INBOX_NUM_SLOTS * INBOX_SLOT_BYTES
    return CollectiveRegions(
        barrier=layout.add("barrier", size * LINE),
        tiny=layout.add("tiny", 2 * LINE, LINE),
        one_shot_flags=layout.add("one_shot_flags", 2 * LINE, LINE),
        one_shot=layout.add("one_shot", 2 * ONE_SHOT_BYTES),
        words=layout.add("words", num_channels * CHANNEL_WORDS * LINE),
        staged=layout.add("staged", num_channels * NUM_SLOTS * CHUNK_BYTES),
        reduced=layout.add("reduced", num_channels * NUM_SLOTS * CHUNK_BYTES),
        sent=layout.add("sent", num_channels * NUM_SLOTS * CHUNK_BYTES),
        inbox=layout.add("inbox", size * inbox_bytes),
        inbox_bytes=inbox_bytes,
        copies=layout.add("copies", copy_bytes),
        size=layout.size,
    )
