"""From a plan that is proven to the table of integers that a rank's kernel interprets: see `kernels.protocol.plans`.

A rank's steps keep the order that the proof found. A worker has the steps of some of the rank's programs, in that
order: so there can be one worker or many, and they wait for one another in no circle. The plan runs once for each tile,
one after the other in every worker: tiles are different data, and in the order that was proven all FIFOs are empty
between them.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from epcomm.collectives.plan.chunks import Chunks, check_sizes, moved_bytes
from epcomm.collectives.plan.fifos import FifoMemory, Fifos
from epcomm.collectives.plan.graph import Graph
from epcomm.collectives.plan.local_order import local_order
from epcomm.collectives.plan.partial_sums import NARROW, PartialSums, Widths, partial_sums
from epcomm.collectives.plan.plan import BUFFERS, Location, Op, Plan, Position, Step
from epcomm.collectives.plan.verify import Proof, execution_order, verify
from epcomm.errors import ConfigError
from epcomm.heap.layout import align_up
from epcomm.kernels.protocol import lines
from epcomm.kernels.protocol import plans as protocol

_MOST_ROWS = 1 << protocol.DONE_BITS
#: one end of a FIFO: (is it the sending one, the other rank, channel)
_End = tuple[bool, int, int]


@dataclass(frozen=True)
class ProvenPlan:
    """A plan with its proof. `order` are all steps in an order in which they can run.

    Made by `prove` only. `fingerprint` stands for all of the plan.
    """

    plan: Plan
    proof: Proof
    order: tuple[Position, ...]
    fingerprint: str

    @functools.cached_property
    def partial_sums(self) -> PartialSums:
        """Where sums are wide, if they are."""
        return partial_sums(self.plan, self.order)


@functools.lru_cache(maxsize=64)
def prove(plan: Plan) -> ProvenPlan:
    """Proves a plan, once: equal plans have one proof. PlanError if it is wrong."""
    proof = verify(plan)
    graph = Graph(plan)
    order = execution_order(graph)
    fingerprint = hashlib.blake2b(repr(plan).encode(), digest_size=6).hexdigest()
    return ProvenPlan(plan, proof, tuple(map(graph.position, order.tolist())), fingerprint)


def lower(
    proven: ProvenPlan, rank: int, num_workers: int, block_bytes: int, memory: FifoMemory, has_finish: bool = False,
    is_wide: bool = False,
) -> np.ndarray:  # fmt: skip
    """The table of a rank, int64. `block_bytes`: of the collective's unit. `has_finish`: results are sums to finish.
    `is_wide`: partial sums have `protocol.WIDE` times the bytes, and whoever makes the sum of all ranks finishes it.

    ConfigError if the plan has too many channels, FIFOs or chunks for these ranks' memory, messages in lines between
    nodes, chunks of several sizes of which it keeps one where a smaller one belongs, or wide sums that differ in place.
    """
    chunks, fifos = Chunks(proven.plan.collective, block_bytes), Fifos(proven.plan, memory)
    return _Lowering(proven, rank, num_workers, chunks, fifos, has_finish and not is_wide, is_wide).table()


def scratch_bytes(proven: ProvenPlan, rank: int, block_bytes: int, is_wide: bool = False) -> int:
    """Bytes that a rank needs besides its input and output: chunks of scratch, then shadows of partial sums."""
    num_shadows = proven.partial_sums.num_shadows[rank] if is_wide else 0
    num_chunks = proven.plan.scratch_chunks + protocol.WIDE * num_shadows
    return num_chunks * Chunks(proven.plan.collective, block_bytes).chunk_bytes


class _Lowering:
    """What is known of one rank's table while it is made."""

    def __init__(
        self, proven: ProvenPlan, rank: int, num_workers: int, chunks: Chunks, fifos: Fifos, has_finish: bool,
        is_wide: bool,
    ):  # fmt: skip
        self._proven, self._plan, self._rank, self._chunks, self._fifos = proven, proven.plan, rank, chunks, fifos
        self._num_workers, self._has_finish = num_workers, has_finish
        self._widths = proven.partial_sums.widths if is_wide else {}
        self._most_width = protocol.WIDE if is_wide else 1
        self._order = [position for position in proven.order if position.rank == rank]
        check_sizes(self._plan, proven.order, chunks)
        self._moved = {} if chunks.are_equal else moved_bytes(self._plan, proven.order, chunks)
        has_lines = self._plan.protocol in lines.IN_LINES
        self._local_order = local_order(self._plan, rank, self._order) if has_lines else {}
        self._num_tiles, self._tile_bytes = self._tiles()
        self._rows: list[list[list[Any]]] = [[] for _ in range(num_workers)]  # with ends instead of FIFOs' places
        self._done_at: dict[tuple[int, int], int] = {}  # (program, step): rows of its worker that are done then
        self._ends: dict[_End, tuple[int, int]] = {}  # (worker, number of messages)
        self._after: list[list[tuple[int, int]]] = []  # (worker, rows that it must have done), by steps that wait

    def table(self) -> np.ndarray:
        final = self._final_chunks()
        for position in self._order:
            self._add(position, final)
        if self._has_finish:
            self._add_finish()
        if max(map(len, self._rows)) * self._num_tiles >= _MOST_ROWS:
            raise self._error(f"wanted fewer than {_MOST_ROWS} steps on pieces of chunks, got more")
        return self._assembled()

    # ---- rows

    def _step(self, position: Position) -> Step:
        return self._plan.programs[position.rank][position.program].steps[position.step]

    def _add(self, position: Position, final: set[tuple[Position, int]]) -> None:
        """The rows of a step."""
        worker, step = position.program % self._num_workers, self._step(position)
        rows = self._rows[worker]
        receive = self._message(worker, False, step.receive_from, position.channel)
        send = self._message(worker, True, step.send_to, position.channel)
        after: dict[int, int] = {}
        for program, at in {*step.after, *self._local_order.get(position, ())}:
            if (other := program % self._num_workers) != worker:
                after[other] = max(self._done_at[program, at], after.get(other, 0))
        self._after.append([*after.items()])
        moved = self._moved.get(position) or [self._chunks.chunk_bytes] * max(step.count, 1)
        for place, num_bytes in enumerate(moved):
            flags = step.op.flags
            flags |= protocol.IS_FIRST * (place == 0) | protocol.IS_LAST * (place == len(moved) - 1)
            flags |= protocol.IS_FINAL * ((position, place) in final)
            widths = self._widths[position][place] if self._widths and step.op is not Op.NOP else Widths()
            for flag, width in zip((protocol.WIDE_SRC, protocol.WIDE_OTHER, protocol.WIDE_RESULT), widths, strict=True):
                flags |= flag * (width != NARROW)
            locations = step.src, step.dst if step.op is Op.REDUCE else None, step.dst
            operands: list[int] = []
            for location, width in zip(locations, widths, strict=True):
                operands += [0, 0] if location is None else self._operand(location, place, width)
            rows.append([flags, num_bytes, *operands, place, *receive, *send, len(self._after) - 1, len(after)])
        self._done_at[position.program, position.step] = len(rows)

    def _operand(self, location: Location, place: int, shadow: int) -> tuple[int, int]:
        """(buffer, byte offset) of a chunk of a step, or of its shadow."""
        buffer, chunk = location.buffer, location.offset + place
        if shadow != NARROW:
            buffer, chunk = "scratch", self._plan.scratch_chunks + protocol.WIDE * shadow
        return BUFFERS.index(buffer), self._chunks.offset(buffer, chunk)

    def _message(self, worker: int, is_sending: bool, peer: int | None, channel: int) -> tuple[_End | None, int]:
        """(the FIFO's end on this rank, number of the message in a tile) of a step's message, if any."""
        if peer is None:
            return None, 0
        end = (is_sending, peer, channel)
        _, number = self._ends.get(end, (worker, 0))
        self._ends[end] = (worker, number + 1)
        return end, number

    def _add_finish(self) -> None:
        """Rows that make results of sums, once all of this rank's workers have done all else in a tile."""
        ends = [(worker, len(rows)) for worker, rows in enumerate(self._rows) if rows]
        for chunk in range(self._plan.buffer_chunks("output", self._rank)):
            worker = chunk % self._num_workers
            self._after.append([(other, rows) for other, rows in ends if other != worker])
            flags = protocol.FINISHES | protocol.IS_FIRST | protocol.IS_LAST
            place = [0, 0, 0, 0, protocol.OUTPUT, self._chunks.offset("output", chunk)]
            num_bytes = self._chunks.num_bytes("output", chunk)
            after = [len(self._after) - 1, len(self._after[-1])]
            self._rows[worker].append([flags, num_bytes, *place, 0, None, 0, None, 0, *after])

    def _final_chunks(self) -> set[tuple[Position, int]]:
        """Where in which steps chunks of results are written that this rank doesn't access again."""
        if self._has_finish:
            return set()
        found = []
        for in_place in self._plan.placements:
            bases = self._plan.bases(self._rank, in_place)
            used: set[int] = set()
            final: set[tuple[Position, int]] = set()
            for position in reversed(self._order):
                step = self._step(position)
                places = [place for place in (step.src, step.dst) if place is not None]
                first = [bases[BUFFERS.index(place.buffer)] + place.offset for place in places]
                if step.dst is not None and step.dst.buffer == "output":
                    final |= {(position, at) for at in range(step.count) if first[-1] + at not in used}
                used.update(at + offset for at in first for offset in range(step.count))
            found.append(final)
        return set.intersection(*found)

    # ---- memory

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"plan {self._plan.name}: {problem}")

    def _tiles(self) -> tuple[int, int]:
        """(number of tiles, bytes of each chunk in one)."""
        chunk_bytes = self._chunks.chunk_bytes
        largest = max((step.count for _, step in self._plan.steps() if step.op.sends), default=1)
        most = lines.data_bytes(self._plan.protocol, self._fifos.slot_bytes // largest)
        most = most // self._most_width & -protocol.TILE_ALIGNMENT
        if most == 0:
            slot = f"slots of {self._fifos.slot_bytes} bytes"
            raise self._error(f"its FIFOs have {slot}, too few for {largest} chunks: wanted fewer FIFOs or less depth")
        num_tiles = -(-chunk_bytes // most)
        return num_tiles, align_up(-(-chunk_bytes // num_tiles), protocol.TILE_ALIGNMENT) if num_tiles else most

    def _assembled(self) -> np.ndarray:
        """Header, workers, rows, FIFOs, steps to wait for: with numbers replaced by places."""
        num_rows = [len(rows) for rows in self._rows]
        first_row = protocol.HEADER_WORDS + protocol.WORKER_WORDS * self._num_workers
        first_fifo = first_row + protocol.ROW_WORDS * sum(num_rows)
        first_after = first_fifo + protocol.FIFO_WORDS * len(self._ends)
        by_worker = sorted(self._ends, key=lambda end: self._ends[end][0])
        fifo_at = {end: first_fifo + protocol.FIFO_WORDS * place for place, end in enumerate(by_worker)}
        after_at = first_after + protocol.AFTER_WORDS * np.cumsum([0, *map(len, self._after)])
        awaited = {entry for after in self._after for entry in after}
        way, memory = self._plan.protocol, self._fifos.memory
        words = [self._num_tiles, self._tile_bytes, self._fifos.slot_bytes, self._plan.fifo_depth, memory.words]
        words += [lines.PROTOCOLS.index(way), lines.message_bytes(way, self._most_width * self._tile_bytes)]
        words += [self._num_flags()]
        words += [memory.flag_counts[way], memory.slots[way], memory.num_bytes[way]]
        row_at, at = first_row, first_fifo
        for worker in range(self._num_workers):
            num_fifos = sum(owner == worker for owner, _ in self._ends.values())
            words += [row_at, num_rows[worker], at, num_fifos]
            row_at += protocol.ROW_WORDS * num_rows[worker]
            at += protocol.FIFO_WORDS * num_fifos
        for worker, rows in enumerate(self._rows):
            for number, row in enumerate(rows):
                row[protocol.FLAGS] |= protocol.IS_AWAITED * ((worker, number + 1) in awaited)
                for column in (protocol.RECEIVE, protocol.SEND):
                    row[column] = fifo_at.get(row[column], 0)
                row[protocol.FIRST_AFTER] = after_at[row[protocol.FIRST_AFTER]]
                words += row
        for end in by_worker:
            words += self._fifos.record(self._rank, *end, self._ends[end][1])
        words += [word for after in self._after for worker, done in after for word in (worker, num_rows[worker], done)]
        return np.array(words, np.int64)

    def _num_flags(self) -> int:
        """As many as the longest FIFO, of all ranks, has messages; none if they have no flags."""
        if self._plan.protocol not in lines.IN_LINES:
            return 0
        sends = ((position, step.send_to) for position, step in self._plan.steps() if step.op.sends)
        num_messages = Counter((position.rank, peer, position.channel) for position, peer in sends)
        return self._num_tiles * max(num_messages.values(), default=0)
