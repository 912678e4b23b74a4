"""The protocols of plans' messages: how a receiver knows that a message, or a part of it, is there.

simple  Bytes as they are, then a word SENT, raised after them: one more round of waiting, and no byte more.
ll      Words of 8 bytes: 4 of data, then a flag of 4. A word arrives as a whole on every target, so whoever finds the
        flag has the data. Twice the bytes.
ll128   Lines of 128 bytes: 120 of data, then a flag of 8. CPUs store the flag after the data, so a line needn't arrive
        as a whole. GPUs store data and flag at once, which is right only where 128 bytes that a warp stores arrive as a
        whole: in a GPU's own memory and over NVLink, not over PCIe. 1/15 more bytes.

A line has 128 bytes on CPUs too: both targets share one layout, a flag costs half of what it would with 64, and CPUs
fetch lines of 64 in pairs.

Flags are numbers of messages: they count up through a rank's life, so what an earlier message left in a slot is always
less than what a receiver waits for. That takes three things. Messages of each protocol have a region of their own in
every segment, where nothing but that protocol is written, in which flags are always at the same places: whatever plan
lays out its slots over those of another one finds flags there, not data. All ranks count alike: an operation takes as
many numbers as the plan's longest FIFO has messages, and FIFOs share them, for no two FIFOs share a slot within one
operation. And before numbers run out (a flag of "ll" has 31 bits), or after a reset (when ranks may differ in what they
have counted), each rank sets its own region to 0 before it says that it is in the operation, and counts from 0 anew;
its peers write there only afterwards, and so does nobody's program read there before.

A message's flags order nothing but its own bytes. What else a plan has messages order, accesses of a rank's programs
to the rank's own chunks, lowering adds as steps to wait for (`collectives.plan.local_order`).
"""

from __future__ import annotations

SIMPLE, LL, LL128 = PROTOCOLS = ("simple", "ll", "ll128")
IN_LINES = (LL, LL128)  # those with flags in messages

LL_WORD_BYTES, LL_DATA_BYTES = 8, 4
LINE_BYTES, LINE_DATA_BYTES = 128, 120

MAX_FLAG = (1 << 31) - 1

#: Messages in lines are taken, computed and passed on in pieces of so many bytes, which are in between on a stage of
#: each worker: whole words and lines, and not more than a CPU's first cache holds beside what is computed with it.
PIECE_BYTES = 64 * LINE_DATA_BYTES
#: There a sum that is wider or narrower than the message which it is computed of has a place of its own.
STAGE_BYTES = 2 * PIECE_BYTES

#: Bytes of each region per channel of a communicator: 8 slots of a ring's channel have 64 KiB of "ll"'s data each.
LINES_BYTES = 1 << 20


def message_bytes(protocol: str, num_bytes: int) -> int:
    """What `num_bytes` take in a slot."""
    if protocol == LL:
        return -(-num_bytes // LL_DATA_BYTES) * LL_WORD_BYTES
    if protocol == LL128:
        return -(-num_bytes // LINE_DATA_BYTES) * LINE_BYTES
    return num_bytes


def data_bytes(protocol: str, num_bytes: int) -> int:
    """How much data fits in `num_bytes` of a slot."""
    if protocol == LL:
        return num_bytes // LL_WORD_BYTES * LL_DATA_BYTES
    if protocol == LL128:
        return num_bytes // LINE_BYTES * LINE_DATA_BYTES
    return num_bytes
