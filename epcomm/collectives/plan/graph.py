"""A plan as arrays, and the checks that need no more than them: what steps name exists, and messages match.

Steps are numbered rank by rank and program by program; a step's predecessor in its program is the step before it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from epcomm.collectives.plan.passes import (
    COUNT,
    DST,
    END_DEPENDENCY,
    FIRST_DEPENDENCY,
    FLAGS,
    INDEX,
    MATCH,
    NUM_COLUMNS,
    PROGRAM,
    RANK,
    RECEIVES,
    SENDS,
    SRC,
)
from epcomm.collectives.plan.plan import BUFFERS, Plan, Position
from epcomm.errors import PlanError

_BUFFER_NUMBER = {buffer: number for number, buffer in enumerate(BUFFERS)}
_NONE = -1  # no peer, no buffer


class Graph:
    """A plan's steps as columns, int64 [num_steps] each; PlanError ("range", "message") unless they fit together."""

    def __init__(self, plan: Plan):
        self.plan = plan
        programs = [
            (rank, number, program)
            for rank, of_rank in enumerate(plan.programs) for number, program in enumerate(of_rank)
        ]  # fmt: skip
        self._steps = [step for _, _, program in programs for step in program.steps]
        self.num_steps = len(self._steps)
        lengths = np.array([len(program.steps) for _, _, program in programs], np.int64)
        firsts = np.cumsum(lengths) - lengths
        owners = np.array([(rank, number, program.channel) for rank, number, program in programs], np.int64)
        self.rank, self.program, self.channel = np.repeat(owners.reshape(-1, 3), lengths, axis=0).T
        self.index = np.arange(self.num_steps) - np.repeat(firsts, lengths)
        self._read_columns()
        self._check_peers()
        self._check_ranges()
        self._first_step = {(rank, number): int(first) for (rank, number, _), first in zip(programs, firsts)}
        num_after = [len(step.after) for step in self._steps]
        self.first_dependency = np.concatenate([[0], np.cumsum(num_after)]).astype(np.int64)
        self.dependencies = self._dependencies()
        self.match, self.slot_freed_by = self._matched_messages()

    def _read_columns(self) -> None:
        def column(values: list[int]) -> np.ndarray:
            return np.array(values, np.int64)

        steps, number = self._steps, _BUFFER_NUMBER
        self.flags = column([step.op.flags for step in steps])
        self.count = column([step.count for step in steps])
        self.src_buffer = column([_NONE if step.src is None else number[step.src.buffer] for step in steps])
        self.src_offset = column([0 if step.src is None else step.src.offset for step in steps])
        self.dst_buffer = column([_NONE if step.dst is None else number[step.dst.buffer] for step in steps])
        self.dst_offset = column([0 if step.dst is None else step.dst.offset for step in steps])
        self.receive_from = column([_NONE if step.receive_from is None else step.receive_from for step in steps])
        self.send_to = column([_NONE if step.send_to is None else step.send_to for step in steps])

    def position(self, number: int) -> Position:
        """Where the step of this number is."""
        return Position(*(int(column[number]) for column in (self.rank, self.program, self.index, self.channel)))

    def describe(self, number: int) -> str:
        """Position and contents of a step."""
        return f"{self.position(number)} ({self._steps[number]})"

    def error(self, kind: str, problem: str, number: int, other: int | None = None) -> PlanError:
        message = f"plan {self.plan.name}: {self.describe(number)}: {problem}"
        return PlanError(kind, message, self.position(number), None if other is None else self.position(other))

    def addressed(self, in_place: bool) -> np.ndarray:
        """The columns that `passes` read, int64 [num_steps, NUM_COLUMNS], with addresses in the rank's memory."""
        bases = np.array([self.plan.bases(rank, in_place)[:3] for rank in range(self.plan.num_ranks)])
        steps = np.empty((self.num_steps, NUM_COLUMNS), np.int64)
        steps[:, RANK], steps[:, PROGRAM], steps[:, INDEX] = self.rank, self.program, self.index
        steps[:, FLAGS], steps[:, COUNT], steps[:, MATCH] = self.flags, self.count, self.match
        steps[:, SRC] = bases[self.rank, self.src_buffer] + self.src_offset
        steps[:, DST] = bases[self.rank, self.dst_buffer] + self.dst_offset
        steps[:, FIRST_DEPENDENCY] = self.first_dependency[:-1]
        steps[:, END_DEPENDENCY] = self.first_dependency[1:]
        has_both = (self.src_buffer >= 0) & (self.dst_buffer >= 0)
        distance = np.abs(steps[:, SRC] - steps[:, DST])
        for number in np.flatnonzero(has_both & (distance > 0) & (distance < self.count)):
            raise self.error("range", "source and destination overlap without being the same", int(number))
        return steps

    def memory_of_rank(self, in_place: bool) -> np.ndarray:
        """Where each rank's memory begins among all ranks' chunks, int64 [num_ranks + 1]: its end is the next one's."""
        sizes = [self.plan.bases(rank, in_place)[-1] for rank in range(self.plan.num_ranks)]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def edges(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What must be complete before what, (earlier, later) steps: program order, dependencies, messages, slots."""
        later = np.flatnonzero(self.index > 0)
        yield later - 1, later
        yield self.dependencies, np.repeat(np.arange(self.num_steps), np.diff(self.first_dependency))
        for earlier in (self.match, self.slot_freed_by):
            later = np.flatnonzero(earlier >= 0)
            yield earlier[later], later

    def _check_peers(self) -> None:
        for peer, is_used in ((self.receive_from, self.flags & RECEIVES), (self.send_to, self.flags & SENDS)):
            bad = (is_used > 0) & ((peer < 0) | (peer >= self.plan.num_ranks) | (peer == self.rank))
            for number in np.flatnonzero(bad):
                problem = f"a peer is another rank below {self.plan.num_ranks}"
                raise self.error("range", problem, int(number))

    def _check_ranges(self) -> None:
        ranks = range(self.plan.num_ranks)
        sizes = np.array([[self.plan.buffer_chunks(buffer, rank) for buffer in BUFFERS] for rank in ranks])
        for buffer, offset in ((self.src_buffer, self.src_offset), (self.dst_buffer, self.dst_offset)):
            size = sizes[self.rank, buffer]
            for number in np.flatnonzero((buffer >= 0) & (offset + self.count > size)):
                problem = f"{BUFFERS[buffer[number]]} has {size[number]} chunks on this rank"
                raise self.error("range", problem, int(number))

    def _dependencies(self) -> np.ndarray:
        """The numbers of the steps that steps name, in the order of `first_dependency`."""
        found = []
        for waiting in np.flatnonzero(np.diff(self.first_dependency)).tolist():
            rank = int(self.rank[waiting])
            programs = self.plan.programs[rank]
            for program, step in self._steps[waiting].after:
                if not (0 <= program < len(programs) and 0 <= step < len(programs[program].steps)):
                    problem = f"waits for step {step} of program {program}, which isn't there"
                    raise self.error("range", problem, waiting)
                found.append(self._first_step[rank, program] + step)
        return np.array(found, np.int64)

    def _matched_messages(self) -> tuple[np.ndarray, np.ndarray]:
        """For each receiving step the step that sends its message; for each sending one the one that frees its slot.

        -1 for other steps, and for sends that find their FIFO with slots to spare.
        """
        sends, receives = (np.flatnonzero(self.flags & flag) for flag in (SENDS, RECEIVES))
        sends = self._by_fifo(sends, self.rank[sends], self.send_to[sends])
        receives = self._by_fifo(receives, self.receive_from[receives], self.rank[receives])
        send_fifos = [self.rank[sends], self.send_to[sends], self.channel[sends]]
        receive_fifos = [self.receive_from[receives], self.rank[receives], self.channel[receives]]
        if len(sends) != len(receives) or any((a != b).any() for a, b in zip(send_fifos, receive_fifos)):
            raise self._unmatched(sends, send_fifos, receives, receive_fifos)
        for at in np.flatnonzero(self.count[sends] != self.count[receives]):
            sender = self.describe(int(sends[at]))
            problem = f"the message that it receives has another count: it is sent by {sender}"
            raise self.error("message", problem, int(receives[at]), int(sends[at]))
        match, slot_freed_by = np.full((2, self.num_steps), -1)
        match[receives] = sends
        depth = self.plan.fifo_depth
        is_same = np.logical_and.reduce([fifo[depth:] == fifo[:-depth] for fifo in send_fifos])
        slot_freed_by[sends[depth:][is_same]] = receives[:-depth][is_same]
        return match, slot_freed_by

    def _by_fifo(self, steps: np.ndarray, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """Steps sorted by FIFO, in program order within each; all of one FIFO must be of one program."""
        keys = [src, dst, self.channel[steps]]
        order = np.lexsort([steps, *reversed(keys)])
        steps, keys = steps[order], [key[order] for key in keys]
        is_same = np.logical_and.reduce([key[1:] == key[:-1] for key in keys])
        for at in np.flatnonzero(is_same & (self.program[steps[1:]] != self.program[steps[:-1]])):
            other = int(steps[at])
            problem = f"another program uses the same FIFO: {self.describe(other)}; their order is open"
            raise self.error("message", problem, int(steps[at + 1]), other)
        return steps

    def _unmatched(self, sends: np.ndarray, send_fifos: list, receives: np.ndarray, receive_fifos: list) -> PlanError:
        """The error for a FIFO with more sends than receives, or fewer."""
        found: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
        for end, (steps, fifos) in enumerate(((sends, send_fifos), (receives, receive_fifos))):
            for number, src, dst, channel in zip(steps.tolist(), *(column.tolist() for column in fifos)):
                found.setdefault((src, dst, channel), ([], []))[end].append(number)
        fifo = min(fifo for fifo, (sent, received) in found.items() if len(sent) != len(received))
        sent, received = found[fifo]
        src, dst, channel = fifo
        ends = f"rank {src} sends {len(sent)} messages to rank {dst} on channel {channel}"
        counts = f"{ends}, which receives {len(received)}"
        if len(sent) > len(received):
            return self.error("message", f"its message is never received: {counts}", sent[len(received)])
        return self.error("message", f"its message is never sent: {counts}", received[len(sent)])
