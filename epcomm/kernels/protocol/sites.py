"""Every place where a kernel waits for a peer: a number for the kernel, a text for the error message.

RAW: the awaited data is visible. WAR: the peer has finished reading what is about to be overwritten.
"""

from __future__ import annotations

from epcomm.device.control import OUTBOX_SITE

BARRIER = 1
ONE_SHOT_STAGED = 2
TWO_SHOT_STAGED, TWO_SHOT_REDUCED = 3, 4
EXCHANGE_SENT, EXCHANGE_TAKEN = 5, 6
MESSAGE_SENT, MESSAGE_TAKEN = 7, 8
ROUTE_COUNTS = 9
DISPATCH_GRANT, DISPATCH_ROWS, DISPATCH_READ = 10, 11, 12
COMBINE_READ, COMBINE_READY, COMBINE_WEIGHTED = 13, 14, 15
EXCHANGE_FORWARDED, RAILS_PARTIAL = 16, 17
RAILS_REDUCED, BROADCAST_ARRIVED, BROADCAST_ENTERED = 18, 19, 20
PLAN_ARRIVED, PLAN_MESSAGE, PLAN_SLOT, PLAN_STEP = 21, 22, 23, 24

_TEXTS = {
    OUTBOX_SITE: "to take what was sent to it before (WAR)",
    BARRIER: "to enter the barrier",
    ONE_SHOT_STAGED: "to stage its input (RAW)",
    TWO_SHOT_STAGED: "to stage a chunk of its input (RAW)",
    TWO_SHOT_REDUCED: "to reduce its part of a chunk (RAW)",
    EXCHANGE_SENT: "to stage a chunk for this rank (RAW)",
    EXCHANGE_TAKEN: "to take the chunk whose slot is needed (WAR)",
    EXCHANGE_FORWARDED: "to stage a chunk that another rank passes on (RAW)",
    RAILS_PARTIAL: "to reduce its host's part of a chunk (RAW)",
    PLAN_ARRIVED: "to begin the plan (WAR)",
    PLAN_MESSAGE: "to send the plan's next message (RAW)",
    PLAN_SLOT: "to take the message whose slot is needed (WAR)",
    PLAN_STEP: "to do a step of the plan that others of its rank follow",
    RAILS_REDUCED: "to reduce its share of all hosts' parts of a chunk (RAW)",
    BROADCAST_ARRIVED: "to receive the chunk that it passes on (WAR)",
    BROADCAST_ENTERED: "to enter the broadcast (RAW)",
    MESSAGE_SENT: "to send (RAW)",
    MESSAGE_TAKEN: "to receive what was sent before (WAR)",
    ROUTE_COUNTS: "to send its token counts (RAW)",
    DISPATCH_GRANT: "to grant a receive block (WAR)",
    DISPATCH_ROWS: "to deliver its rows (RAW)",
    DISPATCH_READ: "to finish reading the last combine's rows (WAR)",
    COMBINE_READ: "to finish reading the output block (WAR)",
    COMBINE_WEIGHTED: "to send the weights of its rows (RAW)",
    COMBINE_READY: "to finish its expert outputs (RAW)",
}


def describe_site(site: int) -> str:
    """What a rank stuck at `site` was waiting for its peer to do."""
    return _TEXTS.get(site, f"at wait {site}")
