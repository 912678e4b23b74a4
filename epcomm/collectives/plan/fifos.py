"""Where the FIFOs of a plan are: slots and words in every rank's segment, see `kernels.protocol.plans`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from epcomm.collectives.plan.plan import Plan
from epcomm.errors import ConfigError
from epcomm.kernels.protocol import lines
from epcomm.kernels.protocol import plans as protocol


@dataclass(frozen=True)
class FifoMemory:
    """What all plans of a communicator share of every rank's segment: the offset of words; by protocol, that of slots.

    `nodes`: each rank's. What is put to other nodes is in `departure_bytes` bytes from `departures` on. `flag_counts`:
    by protocol, the place among a rank's counts of its first worker's count of flags.
    """

    nodes: tuple[int, ...]
    words: int
    slots: Mapping[str, int]
    num_bytes: Mapping[str, int]
    departures: int
    departure_bytes: int
    flag_counts: Mapping[str, int]


class Fifos:
    """A plan's FIFOs, each (receiver, sender, channel).

    ConfigError if the plan has too many channels for these ranks, or messages in lines between ranks of two nodes.
    """

    def __init__(self, plan: Plan, memory: FifoMemory):
        self.memory, self._plan = memory, plan
        fifos = {
            (position.rank, step.receive_from, position.channel)
            for position, step in plan.steps()
            if step.receive_from is not None
        }
        most = protocol.max_channels(max(memory.nodes) + 1)
        if plan.num_channels > most:
            raise ConfigError(f"plan {plan.name}: wanted at most {most} channels, got {plan.num_channels}")
        put = {(dst, src, channel) for dst, src, channel in fifos if memory.nodes[src] != memory.nodes[dst]}
        if put and plan.protocol in lines.IN_LINES:
            dst, src, _ = min(put)
            wanted = f"wanted ranks of one node, or {lines.SIMPLE}; got a message from rank {src} to rank {dst}"
            raise ConfigError(f"plan {plan.name}: protocol {plan.protocol}: {wanted}")
        self._incoming = _numbered(fifos, of=0)
        self._departing = _numbered(put, of=1)
        #: of a slot
        self.slot_bytes = min(
            protocol.MAX_SLOT_BYTES,
            self._share(memory.num_bytes[plan.protocol], self._incoming),
            self._share(memory.departure_bytes, self._departing) if put else protocol.MAX_SLOT_BYTES,
        )  # fmt: skip

    def _share(self, num_bytes: int, numbers: dict[tuple[int, int, int], int]) -> int:
        """Bytes of a slot, if the rank with the most FIFOs has so many bytes for them."""
        num_slots = (max(numbers.values(), default=0) + 1) * self._plan.fifo_depth
        return num_bytes // num_slots & -lines.LINE_BYTES

    def record(self, rank: int, is_sending: bool, peer: int, channel: int, num_messages: int) -> list[int]:
        """Of one end of a FIFO, which has so many messages in a tile."""
        size, memory = len(self.memory.nodes), self.memory
        src, dst = (rank, peer) if is_sending else (peer, rank)
        sent = protocol.sent_word(memory.words, size, channel, src)
        taken = protocol.taken_word(memory.words, size, channel, dst)
        fifo_bytes, fifo = self._plan.fifo_depth * self.slot_bytes, (dst, src, channel)
        slots = memory.slots[self._plan.protocol] + self._incoming[fifo] * fifo_bytes
        departures = memory.departures + self._departing.get(fifo, 0) * fifo_bytes
        count = (is_sending * protocol.MAX_CHANNELS + channel) * size + peer
        return [peer, sent, taken, slots, num_messages, count, departures]


def _numbered(fifos: set[tuple[int, int, int]], of: int) -> dict[tuple[int, int, int], int]:
    """A number for each FIFO among those of its receiver (of=0) or sender (of=1)."""
    numbers: dict[tuple[int, int, int], int] = {}
    count: dict[int, int] = defaultdict(int)
    for fifo in sorted(fifos):
        numbers[fifo] = count[fifo[of]]
        count[fifo[of]] += 1
    return numbers
