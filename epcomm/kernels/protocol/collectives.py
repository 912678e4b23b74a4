"""Regions of the collectives in the control segment, after the control region. Offsets are bytes from its start.

First come all signal words, a line each, then what they tell of; only the flags of small messages lie with their data.
Chunks flow through rings of slots. A ring's words count chunks over the whole life of the communicator (generation in
the top bits), so nothing is ever reset. Work is cut into channels, each with words and slots of its own; a program
takes every ``num_programs``-th channel. How many channels there are is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.device.control import LINE, control_region_bytes
from epcomm.heap.layout import Layout
from epcomm.kernels.protocol.lines import LINES_BYTES
from epcomm.kernels.protocol.plans import plan_word_lines

ONE_SHOT_BYTES = 32 << 10  # larger messages go in two shots, where they cost less traffic
TINY_BYTES = LINE - 8  # these share a line with their flag
CHUNK_BYTES = 512 << 10  # a chunk of every rank stays in cache: 32-128 KiB were measured 10-40 % slower
NUM_SLOTS = 4
PIECE_BYTES = 64 << 10  # of a point-to-point message
INBOX_NUM_SLOTS = 4
#: Hosts take turns where each puts so much or more to several others: what comes from the host as far before is awaited
#: before the next one is put to. Two streams into one link share it badly: an allgather of 1 MiB among 3 hosts took 7.0
#: ms without, over 1 Gbit/s, and 5.9 ms so.
TURN_BYTES = 64 << 10
PIECES_PER_HOP = 4  # of messages of middle size between hosts: a chain of nodes, or of steps, is full most of the time
DEPARTURES_BYTES = 2 << 20  # of plans, per channel: depth 2 and slots of 256 KiB for four peers
PARTIAL_BYTES = 2 * CHUNK_BYTES  # of one node's partial result of a chunk: sums of 16-bit floats are float32

# ---- parameter block: words that every call sets, then (from 7) those that binding sets
X, OUT, NUM_BYTES = range(3)
STREAMING = 3
STATE, REDUCE, SOURCES = 7, 8, 9  # addresses: state block, reduction, an array of [channels, size] addresses
ROOT = 10  # a reduction: the rank that gets the result, an exchange: the one whose bytes all get; -1: all of them
TABLE = 11  # exchange: address of [4, size] words, see below; plans: of the table, see `plans`
SHARED = 12  # exchange: 1 if every receiver reads the same staged bytes
MAX_PAIR_BYTES = 13  # exchange: the most that any rank sends to any other; the same on all ranks
FINISH = 14  # address of what makes results: rails: of the nodes' partial results; plans: of sums, or 0
PARTIAL_SCALE = 15  # rails: bytes of a partial result per byte of the message
ARE_ALONE = 16  # rails: 1 if every node has one rank, whose input is its node's partial result
NUM_SHARES = 17  # rails: in how many shares nodes finish a part, each node its own; 1: each node finishes all of it
KEPT_OFFSET, KEPT_BYTES = 18, 19  # rails: which bytes of the result this rank gets
# plans: addresses: counts of messages and flags, words of programs (a line each), chunks, stages of programs
COUNTS, DONE, SCRATCH, STAGES = 20, 21, 22, 23
SUMS = 24  # plans: addresses of sums of two, by which of these are wide, as bits: the first, the second, the result
NUM_WORDS = SUMS + 8
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
PUSHED_WORDS, RECEIVED_SLOTS, PARTIAL_SLOTS = 12, 13, 14  # where ranks are on several hosts
NODES = 15  # address of the table of nodes, see `nodes`
CHUNKS = 16  # per channel: chunks that went through the two-shot ring, and through the exchange ring

# ---- point to point: a ring of slots per sender in the receiver's memory; a slot is a header line, then bytes
# parameter block: the peer, the message's fingerprint, the address of the count of slots that were filled so far; then
# offsets: of the slots, of SENT in the receiver's segment, of TAKEN in the sender's, and of a sender's own slots, from
# which it puts where it can't store
PEER, MESSAGE, COUNT = 7, 8, 9
INBOX, INBOX_SENT, INBOX_TAKEN, OUTBOX = 10, 11, 12, 13
NUM_MESSAGE_WORDS = 14
INBOX_SLOT_BYTES = LINE + PIECE_BYTES
INBOX_BYTES = INBOX_NUM_SLOTS * INBOX_SLOT_BYTES

# ---- words of a collective channel, one line each, raised by their owner and read by all peers
STAGED, REDUCED, SENT, TAKEN = range(4)
CHANNEL_WORDS = 4

# ---- words of a collective channel where ranks are on several hosts, one line per rank that raises it in each reader's
# segment; FORWARDED is of the rank whose bytes a third one has passed on
PUSHED_SENT, PUSHED_FORWARDED, PUSHED_TAKEN, PUSHED_PARTIAL, PUSHED_REDUCED, PUSHED_ARRIVED = range(6)
NUM_PUSHED = 6


@dataclass(frozen=True)
class CollectiveRegions:
    """Byte offsets in the control segment."""

    barrier: int  # [size] lines: word r is raised by rank r
    words: int  # [channels, CHANNEL_WORDS] lines
    pushed: int  # [channels, NUM_PUSHED, size] lines
    message_sent: int  # [size] lines, one per sender
    message_taken: int  # [size] lines, one per receiver
    plan_words: int  # see `plans`
    one_shot_flags: int  # [2] lines by epoch parity
    tiny: int  # [2] lines by epoch parity: flag, then up to TINY_BYTES
    one_shot: int  # [2, ONE_SHOT_BYTES] by epoch parity
    staged: int  # [channels, NUM_SLOTS, chunk]
    reduced: int  # [channels, NUM_SLOTS, chunk]
    sent: int  # [channels, NUM_SLOTS, chunk]
    received: int  # [channels, NUM_SLOTS, chunk], by source: what ranks of other hosts sent
    partial: int  # [channels, NUM_SLOTS, nodes, PARTIAL_BYTES]
    inbox: int  # [size, INBOX_BYTES], one per sender
    outbox: int  # [size, INBOX_BYTES], one per receiver
    copies: int  # staging of data movement by copies
    fifos: int  # [fifo_bytes], of plans: the rings above
    fifo_bytes: int
    departures: int  # [departures_bytes], of plans: what is put to other nodes
    departures_bytes: int
    ll: int  # [lines_bytes], of plans: FIFOs of messages in words with flags, see `lines`
    ll128: int  # [lines_bytes], in lines with flags
    lines_bytes: int
    size: int  # of the whole segment

    @property
    def word_bytes(self) -> int:
        """All words that ranks raise in each other's segments are below."""
        return self.one_shot


def collective_regions(
    size: int, num_channels: int, copy_bytes: int = 0, num_nodes: int = 1
) -> CollectiveRegions:
    """The layout for a communicator of `size` ranks. Pages are taken when first used.

    `copy_bytes`: staging of data movement by copies, if it goes that way. What only ranks on several nodes use is empty
    if there is one.
    """
    layout = Layout()
    layout.add("control", control_region_bytes(size))
    spans, slots = num_nodes > 1, num_channels * NUM_SLOTS
    lines_bytes, departures_bytes = (not spans) * num_channels * LINES_BYTES, spans * num_channels * DEPARTURES_BYTES
    regions = dict(
        barrier=layout.add("barrier", size * LINE, LINE),
        words=layout.add("words", num_channels * CHANNEL_WORDS * LINE, LINE),
        pushed=layout.add("pushed", spans * num_channels * NUM_PUSHED * size * LINE, LINE),
        message_sent=layout.add("message_sent", size * LINE, LINE),
        message_taken=layout.add("message_taken", size * LINE, LINE),
        plan_words=layout.add("plan_words", plan_word_lines(size, num_nodes) * LINE, LINE),
        one_shot_flags=layout.add("one_shot_flags", 2 * LINE, LINE),
        tiny=layout.add("tiny", 2 * LINE, LINE),
        one_shot=layout.add("one_shot", 2 * ONE_SHOT_BYTES),
        staged=layout.add("staged", slots * CHUNK_BYTES),
        reduced=layout.add("reduced", slots * CHUNK_BYTES),
        sent=layout.add("sent", slots * CHUNK_BYTES),
        received=layout.add("received", spans * slots * CHUNK_BYTES),
        partial=layout.add("partial", spans * slots * num_nodes * PARTIAL_BYTES),
        inbox=layout.add("inbox", size * INBOX_BYTES),
        outbox=layout.add("outbox", spans * size * INBOX_BYTES),
        copies=layout.add("copies", copy_bytes),
        departures=layout.add("departures", departures_bytes),
        ll=layout.add("ll", lines_bytes),
        ll128=layout.add("ll128", lines_bytes),
    )
    # Nobody is in another collective when a plan's messages are sent, and none of them is left when it ends.
    fifos, end = regions["staged"], regions["sent"] + slots * CHUNK_BYTES
    return CollectiveRegions(
        **regions, fifos=fifos, fifo_bytes=end - fifos, departures_bytes=departures_bytes, lines_bytes=lines_bytes,
        size=layout.size,
    )  # fmt: skip
