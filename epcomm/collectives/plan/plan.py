"""A plan is data: what each rank of a collective does, step by step.

A rank runs its programs side by side, each program its steps one after the other. A program has a channel; messages
from one rank to another over one channel arrive in the order in which they were sent, through a FIFO that holds
`fifo_depth` of them: a send waits for a free slot, a receive for a message. On each side one program at most uses a
FIFO. A step's source and destination are the same chunks or have none in common. It starts when the steps it names in
`after`, all of its own rank, are complete. Offsets and counts are in chunks; how many elements a chunk has is not the
plan's business. Its `protocol`, how a receiver knows that a message is there (`kernels.protocol.lines`), is for those
who run or price it: nothing that is proven depends on it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from epcomm.collectives.plan.conditions import Collective
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.lines import PROTOCOLS, SIMPLE

BUFFERS = ("input", "output", "scratch")
#: NCCL's number of slots per connection (NCCL_STEPS).
FIFO_DEPTH = 8
#: Chunks of a rank, ranks, channels: whoever reads a plan keeps something for each, and adds in 64 bits.
MOST = 1 << 24


class Op(enum.Enum):
    """What a step does. `message` is what it receives; a step that both receives and sends holds no chunk for long.

    A sum is of the local operand `src` and the message, also where `dst` is elsewhere; REDUCE adds `src` to `dst`.
    """

    NOP = "nop"  # waits for other steps
    SEND = "send"  # sends src
    RECV = "recv"  # dst = message
    COPY = "copy"  # dst = src
    REDUCE = "reduce"  # dst = dst + src
    RECV_COPY_SEND = "recv_copy_send"  # dst = message, and sends it
    RECV_REDUCE_COPY = "recv_reduce_copy"  # dst = src + message
    RECV_REDUCE_SEND = "recv_reduce_send"  # sends src + message
    RECV_REDUCE_COPY_SEND = "recv_reduce_copy_send"  # dst = src + message, and sends it

    # plain attributes, not properties: they are read for every step of every plan
    receives: bool
    sends: bool
    reduces: bool
    reads: bool  # src
    writes: bool  # dst
    flags: int  # these five as bits, as the proof's passes read them

    def __init__(self, text: str):
        parts = text.split("_")
        self.receives, self.sends, self.reduces = (part in parts for part in ("recv", "send", "reduce"))
        self.reads = text in ("send", "copy") or self.reduces
        self.writes = "copy" in parts or text in ("recv", "reduce")
        uses = (self.receives, self.sends, self.reduces, self.reads, self.writes)
        self.flags = sum(is_used << bit for bit, is_used in enumerate(uses))


class Location(NamedTuple):
    """The first of the chunks that a step reads or writes: a buffer ("input", "output", "scratch") and an offset."""

    buffer: str
    offset: int

    def __str__(self) -> str:
        return f"{self.buffer}[{self.offset}]"


class Dependency(NamedTuple):
    """A step of the same rank: the program's number within the rank, the step's within the program."""

    program: int
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on `count` chunks. What its operation doesn't use is None; ConfigError if that isn't so."""

    op: Op
    src: Location | None = None
    dst: Location | None = None
    count: int = 1
    receive_from: int | None = None
    send_to: int | None = None
    after: tuple[Dependency, ...] = ()

    def __post_init__(self) -> None:
        op = self.op
        used = (("src", op.reads), ("dst", op.writes), ("receive_from", op.receives), ("send_to", op.sends))
        for name, is_used in used:
            if (getattr(self, name) is not None) != is_used:
                raise ConfigError(f"a step that does {op.value} {'needs' if is_used else 'has no'} `{name}`")
        for location in (self.src, self.dst):
            if location is not None and (location.buffer not in BUFFERS or not 0 <= location.offset < MOST):
                wanted = f"{', '.join(BUFFERS)} at an offset from 0 to {MOST - 1}"
                raise ConfigError(f"a location is in {wanted}, got {location}")
        for peer in (self.receive_from, self.send_to):
            if peer is not None and not -1 <= peer < MOST:  # -1, no rank, is for the proof to refuse
                raise ConfigError(f"a peer is a rank, from 0 to {MOST - 1}, got {peer}")
        if not (op is not Op.NOP) <= self.count <= MOST:
            raise ConfigError(f"a step that does {op.value} needs a count from 1 to {MOST}, got {self.count}")

    def __str__(self) -> str:
        words = [self.op.value]
        words += [f"from {self.receive_from}"] if self.op.receives else []
        words += [f"to {self.send_to}"] if self.op.sends else []
        if self.src is not None or self.dst is not None:
            words.append(" -> ".join(str(location) for location in (self.src, self.dst) if location is not None))
        words += [f"x {self.count}"] if self.count != 1 else []
        return " ".join(words)


@dataclass(frozen=True)
class Program:
    """Steps that run one after the other; their messages use `channel`."""

    channel: int
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.channel < MOST:
            raise ConfigError(f"a program's channel is an integer from 0 to {MOST - 1}, got {self.channel}")


class Position(NamedTuple):
    """Where a step is. Channel and program differ only where several programs of a rank share a channel."""

    rank: int
    program: int
    step: int
    channel: int

    def __str__(self) -> str:
        of_program = f" of program {self.program}" if self.program != self.channel else ""
        return f"rank {self.rank}, channel {self.channel}, step {self.step}{of_program}"


@dataclass(frozen=True)
class Plan:
    """How a collective is done. `programs[rank]` are the rank's; `scratch_chunks` are the chunks each rank needs
    besides.

    `in_place` and `out_of_place` say for which of the two the plan is meant; `verify` proves it for each of them.
    `wide_sums`: sums of some ranks' 16-bit floats, which are added in float32, are also kept and sent so; a result is
    rounded once, when it is the sum of all ranks' (`partial_sums`). Of other dtypes, and for min and max, it changes
    nothing.
    """

    name: str
    collective: Collective
    programs: tuple[tuple[Program, ...], ...]
    scratch_chunks: int = 0
    fifo_depth: int = FIFO_DEPTH
    in_place: bool = True
    out_of_place: bool = True
    protocol: str = SIMPLE
    wide_sums: bool = False

    def __post_init__(self) -> None:
        if len(self.programs) != self.num_ranks:
            raise ConfigError(f"plan {self.name}: programs: wanted {self.num_ranks} ranks', got {len(self.programs)}")
        for name, least in (("scratch_chunks", 0), ("fifo_depth", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"plan {self.name}: {name}: wanted at least {least}, got {getattr(self, name)}")
        most = max(self.bases(rank, in_place=False)[-1] for rank in range(self.num_ranks))
        if most > MOST:
            raise ConfigError(f"plan {self.name}: wanted up to {MOST} chunks on a rank, got {most}")
        if not (self.in_place or self.out_of_place):
            raise ConfigError(f"plan {self.name}: it has to be in place, out of place, or both")
        if self.protocol not in PROTOCOLS:
            wanted = f"wanted one of {', '.join(PROTOCOLS)}"
            raise ConfigError(f"plan {self.name}: protocol: {wanted}, got {self.protocol!r}")

    @property
    def num_ranks(self) -> int:
        return self.collective.num_ranks

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: bound operations are looked up by their plan."""
        try:
            shape = self.scratch_chunks, self.fifo_depth, self.protocol, self.wide_sums
            return hash((self.name, self.collective, self.programs, *shape))
        except TypeError:
            wanted = "wanted tuples throughout, so that it can't change"
            raise ConfigError(f"plan {self.name}: {wanted}; got lists") from None

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # other processes hash otherwise

    @cached_property
    def num_steps(self) -> int:
        return sum(len(program.steps) for programs in self.programs for program in programs)

    @cached_property
    def num_channels(self) -> int:
        return 1 + max((program.channel for programs in self.programs for program in programs), default=-1)

    @property
    def placements(self) -> tuple[bool, ...]:
        """For each way the plan is meant to run: is it in place?"""
        return tuple(way for way, is_meant in ((False, self.out_of_place), (True, self.in_place)) if is_meant)

    def buffer_chunks(self, buffer: str, rank: int) -> int:
        """How many chunks a rank's buffer has."""
        if buffer == "scratch":
            return self.scratch_chunks
        return self.collective.input_chunks(rank) if buffer == "input" else self.collective.output_chunks(rank)

    def bases(self, rank: int, in_place: bool) -> tuple[int, int, int, int]:
        """Addresses, in chunks of a rank's memory, at which input, output and scratch begin; and that memory's size."""
        num_input, num_output = self.collective.input_chunks(rank), self.collective.output_chunks(rank)
        first_input, first_output = self.collective.overlay(rank) if in_place else (0, num_input)
        scratch = max(first_input + num_input, first_output + num_output)
        return first_input, first_output, scratch, scratch + self.scratch_chunks

    def steps(self) -> Iterator[tuple[Position, Step]]:
        """All steps, rank by rank and program by program."""
        for rank, programs in enumerate(self.programs):
            for number, program in enumerate(programs):
                for index, step in enumerate(program.steps):
                    yield Position(rank, number, index, program.channel), step

    def show(self) -> None:
        """Prints the plan as a table: a row per step, with what it waits for."""
        from epcomm.collectives.plan.table import print_plan

        print_plan(self)
