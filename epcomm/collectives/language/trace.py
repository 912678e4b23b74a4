"""What a program in the language says: copies and sums of chunks, in an order in which one thread could do them."""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass

from epcomm.collectives.language.compiler import compile_trace
from epcomm.collectives.language.operations import Operation, Place
from epcomm.collectives.plan import BUFFERS, FIFO_DEPTH, Collective, Location, Plan
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.lines import SIMPLE

_current: ContextVar[Trace] = ContextVar("trace")


class Trace:
    """Records what `chunk` does inside of its `with`, for one collective; `plan` compiles it.

    `in_place` and `out_of_place`: what the program is meant for. Chunks are those of `collective`; scratch has as many
    as the program names.
    """

    def __init__(self, name: str, collective: Collective, *, in_place: bool = True, out_of_place: bool = True):
        self.name, self.collective = name, collective
        self.in_place, self.out_of_place = in_place, out_of_place
        self.operations: list[Operation] = []
        self.scratch_chunks = 0
        self._written: dict[tuple[int, str, int], int] = {}  # chunk: how many operations there were then
        self._tokens: list[Token[Trace]] = []

    def __enter__(self) -> Trace:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _current.reset(self._tokens.pop())

    def chunk(self, rank: int, buffer: str, index: int = 0, count: int = 1) -> Chunk:
        """`count` chunks of a rank's buffer from `index` on, with what they hold now."""
        if not 0 <= rank < self.collective.num_ranks:
            raise ConfigError(f"{self.name}: rank: wanted one below {self.collective.num_ranks}, got {rank}")
        if buffer not in BUFFERS:
            raise ConfigError(f"{self.name}: buffer: wanted one of {', '.join(BUFFERS)}, got {buffer!r}")
        size = index + count
        if buffer == "scratch":
            self.scratch_chunks = max(self.scratch_chunks, size)
        else:
            collective = self.collective
            size = collective.input_chunks(rank) if buffer == "input" else collective.output_chunks(rank)
        if index < 0 or count < 1 or index + count > size:
            wanted = f"within the {size} chunks of rank {rank}'s {buffer}"
            raise ConfigError(f"{self.name}: chunks: wanted {wanted}, got {count} from {index} on")
        return Chunk(self, Place(rank, Location(buffer, index)), count, len(self.operations))

    def record(self, operation: Operation) -> Chunk:
        """Adds an operation; returns what it wrote."""
        self.operations.append(operation)
        written = Chunk(self, operation.dst, operation.count, len(self.operations))
        self._written |= dict.fromkeys(written.keys(), len(self.operations))
        return written

    def check_current(self, chunk: Chunk) -> None:
        """ConfigError if the chunk doesn't hold any more what it held when it was made."""
        if any(self._written.get(key, 0) > chunk.made for key in chunk.keys()):
            raise ConfigError(f"{self.name}: {chunk.place} was overwritten since: chunk(...) gives what it holds now")

    def plan(
        self, *, channels: int = 1, pieces: int = 1, fifo_depth: int = FIFO_DEPTH, protocol: str = SIMPLE
    ) -> Plan:
        """Compiles the program.

        `channels` instances of it run side by side, each on channels of its own and on its part of every chunk, which
        it moves in `pieces`, so that pieces follow one another from rank to rank: all chunk counts are
        `channels * pieces` times the program's. Messages go by `protocol`: "simple", "ll" or "ll128". ConfigError if no
        order of its steps is found that FIFOs of `fifo_depth` messages don't block.
        """
        return compile_trace(self, channels, pieces, fifo_depth, protocol)


@dataclass(frozen=True)
class Chunk:
    """`count` chunks at a place, with what they held after `made` operations."""

    trace: Trace
    place: Place
    count: int
    made: int

    def copy(self, rank: int, buffer: str | None = None, index: int | None = None, *, channel: int = 0) -> Chunk:
        """Copies to a rank's buffer, by default to the same place there; through a channel if that is another rank."""
        self.trace.check_current(self)
        buffer, index = self._place(buffer, index)
        dst = self.trace.chunk(rank, buffer, index, self.count).place
        if dst == self.place:
            return self
        return self.trace.record(Operation(self.place, dst, None, self.count, channel))

    def reduce(
        self, other: Chunk, buffer: str | None = None, index: int | None = None, *, channel: int = 0
    ) -> Chunk:
        """This chunk plus `other`, of any rank; the sum is put where this rank's buffer says, by default in place."""
        for operand in (self, other):
            self.trace.check_current(operand)
        if other.count != self.count:
            raise ConfigError(f"{self.trace.name}: reduce: wanted {self.count} chunks, got {other.count}")
        buffer, index = self._place(buffer, index)
        dst = self.trace.chunk(self.place.rank, buffer, index, self.count).place
        if other.place.rank != self.place.rank or dst == self.place:
            return self.trace.record(Operation(other.place, dst, self.place, self.count, channel))
        if dst == other.place:
            return self.trace.record(Operation(self.place, dst, dst, self.count, channel))
        return self.copy(dst.rank, buffer, index, channel=channel).reduce(other, channel=channel)

    def _place(self, buffer: str | None, index: int | None) -> tuple[str, int]:
        here = self.place.location
        return here.buffer if buffer is None else buffer, here.offset if index is None else index

    def keys(self) -> list[tuple[int, str, int]]:
        """(rank, buffer, index) of each of its chunks."""
        rank, (buffer, first) = self.place
        return [(rank, buffer, index) for index in range(first, first + self.count)]


def chunk(rank: int, buffer: str, index: int = 0, count: int = 1) -> Chunk:
    """`Trace.chunk` of the trace whose `with` this is called in."""
    try:
        return _current.get().chunk(rank, buffer, index, count)
    except LookupError:
        raise ConfigError("chunk(...) is called inside of `with Trace(...)`") from None
