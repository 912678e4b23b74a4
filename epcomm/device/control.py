"""Layout of a rank's private context block and of its shared control region: what every kernel and the host agree on.

Both are arrays of 64-bit words. The *context block* is private memory; a kernel gets its address as ``ctx``. The
*control region* opens the control segment, which every rank of the communicator maps.
"""

from __future__ import annotations

# ---- statuses that a kernel returns
OK = 0
TIMEOUT = 1  # the deadline passed; the context says which rank, site and value
ABORTED = 2  # this rank's abort word was raised: by a peer's error, a lost peer or abort()
MISMATCH = 3  # the awaited peer is in another operation
CAPACITY = 4  # agreed on by all ranks from exchanged counts; the communicator stays usable
BAD_VALUE = 5  # an index in the caller's data is out of range
INTERRUPTED = 6  # SIGINT while waiting
CLOSED = 7  # the communicator was closed, or the process was forked
OCCUPIED = 8  # another thread is in an operation of this context
CAPACITY_BEFORE, BAD_VALUE_BEFORE = 9, 10  # a GPU's: an operation that the host didn't wait for found this

# ---- context block (words)
RANK, SIZE = 0, 1
GENERATION = 2  # starts at 1, one more after each reset()
SEQUENCE = 3  # operations begun, generation in the top bits; 0 in a context that is outside the sequence
FINGERPRINT = 4  # of the operation in progress
TIMEOUT_NS = 5  # how long an operation may wait
DEADLINE_NS = 6  # monotonic clock; set by the first slow wait of an operation
SPINS = 7  # polls with a pause before the core is yielded
POOL = 8  # address of the rank's pool of program threads, 0 when it runs one program
IS_CLOSED = 9
IS_OCCUPIED = 14  # 1 while a thread is in an operation
# what the last failed wait was waiting for
FAILED_PEER, FAILED_SITE, FAILED_WANTED, FAILED_FOUND = 10, 11, 12, 13
OUTBOX_SITE = 64  # in FAILED_SITE, beside those of kernels/protocol/sites: no room for what goes to another host
TICKET, LEFT = 15, 16  # programs of a GPU launch that began and that ended so far, in order
NETWORK = 17  # what kernels need to reach ranks that load and store don't reach: see device.*.network; else 0
PEERS = 18  # the window of the collectives' segment, see below; then base addresses, by rank, of the control regions
CONTEXT_WORDS = PEERS  # and those
# behind them, by rank, on CPUs: nanoseconds that programs have waited for it, beyond the polls that go first

# ---- window (words): a symmetric segment as kernels address it. First base addresses by rank, 0 where load and store
# don't reach; then what a network needs to put bytes into that rank's copy
WINDOW_HANDLE = 0  # what the network calls the segment
WINDOW_RAISED = 1  # address of [size, lines] words that this rank has raised, for networks that can only add; else 0
WINDOW_LINES = 2  # words per rank in it: all signal words are in the first lines of a segment, one in each
WINDOW_WORDS = 3

# ---- control region (byte offsets). One word per 128 bytes: adjacent lines are fetched together.
LINE = 128
ABORT_WORD = 0  # generation << GENERATION_SHIFT | reason << 16 | rank that caused it
FAILURE = LINE  # words of a GPU rank: the status that stopped it, then peer, site, wanted and found of the failed wait
FAILURE_WORDS = 5
MESSAGE = 512  # length (64 bits), then UTF-8: what this rank's own failure says
MESSAGE_BYTES = 4096 - MESSAGE
RELAYED = 4096  # of a leader: generation, length, UTF-8: what a rank of another host told its host as the first
RELAYED_BYTES = 4096
TEXTS = 8192  # ring of (fingerprint, length, UTF-8): the readable text of this rank's recent operations
TEXT_BYTES = 512
NUM_TEXTS = 1024
HEADERS = TEXTS + TEXT_BYTES * NUM_TEXTS  # per peer, written by it: what it is calling
HEADER_RING = 8  # words per peer, a line each; ranks run ahead by at most two operations
HEADER_BYTES = LINE * HEADER_RING
# a header: the low bits of the generation and of the number of operations, then those of the fingerprint
FINGERPRINT_BITS, COUNT_BITS, GENERATION_BITS = 44, 12, 7
FINGERPRINT_MASK = (1 << FINGERPRINT_BITS) - 1

GENERATION_SHIFT = 40  # sequence numbers and epochs are generation << 40 | count, so that a reset outdates all words

# ---- reasons in the abort word
PEER_FAILED, PEER_LOST, PEER_MISMATCH, LOCAL_ABORT = 1, 2, 3, 4


def control_region_bytes(size: int) -> int:
    """Bytes of the control region of a communicator of `size` ranks."""
    return HEADERS + HEADER_BYTES * size
