"""Words and regions of an expert-parallel handle: what route, dispatch and combine of all ranks agree on.

A handle's symmetric segment holds signal words, the exchanged counts, receive blocks (written by peers) and output
blocks (read by peers). Words that carry a payload, and the counts they describe, exist twice by epoch parity; every
rank waits for every peer in each operation, so no one is ever more than one epoch ahead.

To a rank on another node rows travel packed: they are laid out in this rank's *departures* as they will lie there, and
put from there. What a combine brings back from other nodes arrives in the *returns*, in the order of the departures.

*By rank* a row travels once per (token, rank). In flat layout that is what the caller gets. In the others (``wire=
"rank"``) it travels through the *arrivals*, one more block: dispatch expands what arrived into the receive block, a row
per (token, expert), and combine sums those rows per (token, rank), weighted, before they travel back.
"""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.device.control import LINE
from epcomm.heap.layout import PAGE, Layout, align_up

# ---- layouts of the receive blocks
CONTIGUOUS, PADDED, FLAT = range(3)

# ---- signal words: [kind, source rank] lines in the handle's segment, raised by the source rank
COUNTS = 0  # (2, by parity) epoch << PAYLOAD_BITS | REQUIRES_GRAD; counts of an exchange are in the table
GRANT = 2  # (2, by parity) epoch << PAYLOAD_BITS | receive block that the sender may write to
ROWS = 4  # all rows of a dispatch are delivered
READY = 5  # (2, by parity) epoch << PAYLOAD_BITS | output block that holds the expert outputs
DONE = 7  # all rows of a combine were read
WEIGHTED = 8  # combine by rank: the weights of the rows that this rank sent are at their receiver
NUM_KINDS = 9
PAYLOAD_BITS = 8
PAYLOAD_MASK = (1 << PAYLOAD_BITS) - 1

# ---- handle state block (words)
NUM_EXPERTS, MAX_TOKENS, LAYOUT, ALIGNMENT = 0, 1, 2, 3
ROW_LIMIT = 4  # rows that a rank may receive
WINDOW = 5  # address of the window of the handle's segment
COUNT_TABLE = 6  # offset of [2, size, num_experts + size] int32 counts
BLOCKS, BLOCK_BYTES = 7, 8  # receive blocks
OUTPUTS, OUTPUT_BYTES = 9, 10  # output blocks
TOKEN_REGION, WEIGHT_REGION, INDEX_REGION = 11, 12, 13  # offsets in a receive block; see REGIONS
OWNER, LOCAL, ORDER = 14, 15, 16  # addresses of int32 [num_experts]: rank; local number; experts in that order
ORDER_START = 17  # address of int32 [size + 1]: where each rank's experts start in ORDER
MARKS = 18  # address of int32 scratch [2, num_experts] and [size]
SCRATCH, SCRATCH_BYTES = 19, 20  # address of scratch memory per program, bytes each: see scratch_bytes
COUNT_EPOCH, DISPATCH_EPOCH, COMBINE_EPOCH = 21, 22, 23
TICKET = 25  # programs of this rank that arrived at the end of a phase
DISPATCH_PHASE, COMBINE_PHASE = 26, 27  # epoch << PAYLOAD_BITS | status of program 0's phase, which others wait for
STREAMING_BYTES = 28  # rows go past the caches when all ranks together move more
NUM_BLOCKS, NUM_OUTPUTS = 29, 30
MOST_SOURCES = 31  # rows that one token's sum can have: of its slots or ranks, and a bias
IS_BY_RANK = 32  # 1 if dispatched rows travel once per (token, rank)
ARRIVALS = 33  # offset of the arrivals
ARRIVED_TOKEN, ARRIVED_WEIGHT, ARRIVED_PLACE, ARRIVED_FACTOR = 34, 35, 36, 37  # offsets of their regions; see REGIONS
BLOCK_ROWS = 38  # that a receive block has room for
OVERFLOW = 39  # what happens to rows past ROW_LIMIT, see below
TAIL = 40  # what a receive block's rows past its last are, see below
TELLS_LATER = 41  # 1 if the host doesn't wait to learn what a kernel finds
NODES = 42  # address of int32 [size]: the node of each rank
DEPARTURES = 43  # offset of the departures, 0 if all ranks are on one node
DEPARTING = 44  # (4 words) offsets of their regions; see REGIONS
RETURNS = 48  # offset of the returns
STATE_WORDS = 49
# ---- the order of a block's regions in these words, from TOKEN_REGION, ARRIVED_TOKEN or DEPARTING on: tokens; weights;
# local experts in flat layout, or places; combine's weights
REGIONS = R_TOKEN, R_WEIGHT, R_INDEX, R_FACTOR = 0, 1, 2, 3

# ---- more rows for a rank than ROW_LIMIT, which all ranks see alike
STOP, DROP, DROP_AND_TELL = range(3)  # nothing is sent; they aren't sent; they aren't, and the host is told later
# ---- rows that are behind the last one of a block whose shape doesn't depend on how many there are
UNDEFINED, MARKED, ZERO = range(3)  # marked: of no token, without experts and weights; zero: zeros, too

# ---- routing block (words), private memory; arrays are int32
NUM_TOKENS, TOPK, INDEX_BYTES = 0, 1, 2
EXPERT = 3  # address of [tokens, topk]: expert; -1 none; -2 - j: the same expert as slot j of this token
POSITION = 4  # address of [tokens, topk]: the row's place among this rank's rows for that expert
RANK_POSITION = 5  # address of [tokens, size]: the token's place among this rank's rows for that rank, or -1 (by rank)
OWN_COUNTS = 6  # address of [num_experts + size]: rows per expert, then tokens per rank
TABLE = 7  # address of [size, num_experts + size]: everyone's counts, once exchanged
BASE = 8  # address of [num_experts + size]: receiver's row of this rank's first row, per expert and per rank
ROWS_OF = 9  # address of [size]: rows of each rank's receive block
MOST_ROWS = 10  # the largest of them: what a capacity error asks for
TOTAL_ROWS = 11  # rows that all ranks receive
BAD_SLOT = 12  # first index out of range
NUM_ARRIVED = 13  # rows that this rank receives by rank
PLACES = 14  # address of [arrivals, topk]: receive block's row of each slot of what arrived, or -1; set by dispatch
REQUIRES_GRAD = 15  # 1 if this rank wants gradients
ANY_REQUIRES_GRAD = 16  # 1 if any rank does; since route has exchanged counts
DEPARTURE = 17  # address of [num_experts + size]: departures' row of the first for each expert and rank of other nodes
ROUTING_WORDS = 18

# ---- parameter block
STATE = 7
LATENCY = 11  # dispatch: exchange counts with the grants
NUM_TENSORS = 8
ROW_BYTES_TOTAL = 9
ROUTING, TENSORS, WEIGHTS, BLOCK = 0, 1, 2, 3  # call words: addresses, and the block this rank grants or outputs in
INDEX = 1  # route: address of topk_idx
STAGE_AFTER = 4  # combine: copy y into the block once this epoch's combine was read by all; -1: y is in the block
SEND_ONLY = 5  # 1: the operation's second half, which receives, is launched later
REDUCE = 10  # combine: 1 sums a token's rows, 0 writes one row per slot
BY_RANK = 12  # 1 if this operation's rows travel once per (token, rank)
HAS_WEIGHTS = 13  # 1 if there are weights, on all ranks: the address of no tokens' weights may be 0
NUM_WORDS = 14

# ---- tensors table: one record per tensor of x (dispatch) or y (combine)
T_ADDRESS, T_STRIDE, T_ROW_BYTES, T_OFFSET = 0, 1, 2, 3  # bytes; offset of its rows in the block that they travel to
T_EXPANDED = 4  # dispatch by rank: offset of its rows in the receive block, once expanded
T_OUT, T_OUT_STRIDE, T_ELEMENTS, T_ROW_SUM, T_BIAS, T_BIAS_STRIDE = 5, 6, 7, 8, 9, 10  # combine only
T_PARTIAL_SUM = 11  # combine by rank: what sums a token's rows on one rank
# What quantises a row of T_ELEMENTS numbers, and what it takes besides; 0: rows travel as they are. In dispatch the
# table has two records, of the codes and of the scales, the first with the address and stride of the numbers. In
# combine it has one, whose rows are codes and scales: see quantized_row.
T_QUANTIZE, T_QUANTIZE_ARGUMENT = 12, 13
T_DEPARTURE = 14  # dispatch: offset of its rows in the departures
T_RETURN = 15  # combine: offset of its rows in the returns
TENSOR_WORDS = 16
MAX_TENSORS = 16


@dataclass(frozen=True)
class BlockRegions:
    """Byte offsets in one receive block."""

    token: int  # [capacity] int32: the row's token on its source rank
    weight: int  # float32 [capacity] or [capacity, topk] (flat)
    index: int  # [capacity, topk] of the caller's index dtype (flat)
    rows: int
    size: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """In the order of REGIONS."""
        return self.token, self.weight, self.index


def block_regions(layout: int, capacity: int, topk: int, row_bytes: int) -> BlockRegions:
    """Where a receive block of `capacity` rows of `row_bytes` keeps its rows and what describes them."""
    per_row = topk if layout == FLAT else 1
    regions = Layout()
    return BlockRegions(
        token=regions.add("token", capacity * 4),
        weight=regions.add("weight", capacity * per_row * 4),
        index=regions.add("index", capacity * topk * 8 if layout == FLAT else 0),
        rows=regions.add("rows", rows_bytes(capacity, row_bytes)),
        size=align_up(regions.size, PAGE),
    )


@dataclass(frozen=True)
class ArrivalRegions:
    """Byte offsets in the arrivals."""

    token: int  # [capacity] int32: the row's token on its source rank
    weight: int  # float32 [capacity, topk]: delivered with the rows
    place: int  # int32 [capacity, topk]: the receive block's row of each slot's expert, or -1
    factor: int  # float32 [capacity, topk]: combine's weights
    rows: int
    size: int

    @property
    def offsets(self) -> tuple[int, ...]:
        """In the order of REGIONS."""
        return self.token, self.weight, self.place, self.factor


def arrival_regions(capacity: int, topk: int, row_bytes: int) -> ArrivalRegions:
    """Where the arrivals keep `capacity` rows of `row_bytes` and what describes them."""
    regions = Layout()
    return ArrivalRegions(
        token=regions.add("token", capacity * 4),
        weight=regions.add("weight", capacity * topk * 4),
        place=regions.add("place", capacity * topk * 4),
        factor=regions.add("factor", capacity * topk * 4),
        rows=regions.add("rows", rows_bytes(capacity, row_bytes)),
        size=align_up(regions.size, PAGE),
    )


SCALES_ALIGNMENT = 16


def quantized_row(columns: int, scale_bytes: int) -> int:
    """Bytes of a combine's quantised row: the codes of its columns, a byte each, then from a multiple of 16 on scales.

    It is filled up to a multiple of 16, so that all rows are aligned.
    """
    return align_up(columns, SCALES_ALIGNMENT) + align_up(scale_bytes, SCALES_ALIGNMENT)


def scratch_bytes(most_sources: int, row_bytes: int) -> int:
    """What each program has: for what a token's sum needs, and for a row of float32s or a quantised one.

    Of at most `row_bytes` once quantised, which are at least as many as there are columns.
    """
    return align_up(8 * 2 * (1 + 6 * most_sources), LINE) + align_up(4 * row_bytes, LINE) + 8 * LINE


def rows_bytes(capacity: int, row_bytes: int) -> int:
    """Bytes of `capacity` rows that several tensors share, each aligned to a line."""
    return align_up(capacity * row_bytes + MAX_TENSORS * LINE, PAGE)
