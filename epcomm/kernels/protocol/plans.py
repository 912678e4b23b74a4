"""Plans of collectives as kernels read them: a table of integers per rank, and FIFOs of messages between ranks.

A *row* is one chunk of a step. A *worker* is a program of the kernel: it takes its rows one after the other, all of
them once for each *tile*, which is so much of every chunk that a message fits in a slot. What a message's chunk has
beyond the bytes that exist of a chunk here is neither read nor written.

A FIFO leads from one rank to another on one channel. Its slots are in the receiver's segment, and so is the word SENT,
which the sender raises; TAKEN, which the receiver raises, is in the sender's. They count messages over the whole life
of the communicator (generation in the top bits); FIFOs are empty between operations, so each plan may lay its slots out
anew. To a rank that load and store don't reach a message is put from a slot like it among the sender's *departures*,
which nothing but plans writes to. With the protocols "ll" and "ll128" messages have flags in them, and SENT isn't used:
see `lines`.
"""

from __future__ import annotations

from epcomm.device.control import LINE

MAX_CHANNELS = 64  # of a plan: NCCL's (MAXCHANNELS), which others' plans are made for
NETWORK_CHANNELS = 8  # among ranks of several nodes: networks that only add keep a count per word and rank
MAX_SLOT_BYTES = 256 << 10
TILE_ALIGNMENT = 64

#: bits of a row's FLAGS: what its step does (as `collectives.plan.Op.flags`)
RECEIVES, SENDS, REDUCES, READS, WRITES = 1, 2, 4, 8, 16
#: and the row: is it the first or the last of its step, do others wait for it, is its destination never used again,
#: does it make a result of a sum
IS_FIRST, IS_LAST, IS_AWAITED, IS_FINAL, FINISHES = 32, 64, 128, 256, 512
#: and what has WIDE times the bytes, a partial sum in float32: its source, the message or what else is added to the
#: source, what it makes
WIDE_SRC, WIDE_OTHER, WIDE_RESULT = 1024, 2048, 4096
ANY_WIDE = WIDE_SRC | WIDE_OTHER | WIDE_RESULT
WIDE = 2

# ---- table (words): a header, then [workers, WORKER_WORDS], rows, FIFOs, steps to wait for; places in it are in words
# ARRIVED: offset of those words, by rank; PROTOCOL: its place in `lines.PROTOCOLS`; PLACE_BYTES: what TILE_BYTES, or
# WIDE times as many, take in a message; NUM_FLAGS: that an operation takes; FLAG_COUNTS: the place, among the counts,
# of worker 0's count of flags; REGION, REGION_BYTES: offset and size of all memory that slots of this protocol may be
# in
(
    NUM_TILES, TILE_BYTES, SLOT_BYTES, DEPTH, ARRIVED, PROTOCOL, PLACE_BYTES, NUM_FLAGS, FLAG_COUNTS, REGION,
    REGION_BYTES,
) = range(11)  # fmt: skip
HEADER_WORDS = 11
# of a worker: its rows, and the FIFOs that it uses
FIRST_ROW, NUM_ROWS, FIRST_FIFO, NUM_FIFOS = range(4)
WORKER_WORDS = 4
# of a row: bytes of the chunk, where it isn't wide; buffers and byte offsets, OTHER of a sum without a message; offset
# in tiles in messages; places of FIFOs and numbers of messages in them within a tile; the place and number of the steps
# that come before it
(
    FLAGS, BYTES, SRC_BUFFER, SRC_OFFSET, OTHER_BUFFER, OTHER_OFFSET, DST_BUFFER, DST_OFFSET, PLACE,
    RECEIVE, RECEIVE_NUMBER, SEND, SEND_NUMBER, FIRST_AFTER, NUM_AFTER,
) = range(15)  # fmt: skip
ROW_WORDS = 15
# of a FIFO: the rank at its other end, offsets of SENT and TAKEN and of its slots, messages in a tile, the index of
# this end's count of messages, the offset of its departures
PEER, SENT_WORD, TAKEN_WORD, SLOTS, NUM_MESSAGES, COUNT, DEPARTURES = range(7)
FIFO_WORDS = 7
# of a step to wait for: its worker, that worker's rows, and how many of them have to be done
AFTER_WORKER, AFTER_ROWS, AFTER_DONE = range(3)
AFTER_WORDS = 3

#: buffers
INPUT, OUTPUT, SCRATCH = range(3)

#: A worker's word of rows done is sequence << DONE_BITS | rows, of all tiles.
DONE_BITS = 24


def max_channels(num_nodes: int) -> int:
    """Of plans among ranks of so many nodes."""
    return MAX_CHANNELS if num_nodes == 1 else NETWORK_CHANNELS


def plan_word_lines(size: int, num_nodes: int) -> int:
    """Lines of signal words, by [of which kind, rank]: ARRIVED, then SENT and TAKEN of each channel."""
    return (1 + 2 * max_channels(num_nodes)) * size


def sent_word(plan_words: int, size: int, channel: int, src: int) -> int:
    """Offset of what `src` raises in a receiver's segment."""
    return plan_words + ((1 + 2 * channel) * size + src) * LINE


def taken_word(plan_words: int, size: int, channel: int, dst: int) -> int:
    """Offset of what `dst` raises in a sender's segment."""
    return plan_words + ((2 + 2 * channel) * size + dst) * LINE
