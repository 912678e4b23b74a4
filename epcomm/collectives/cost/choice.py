"""Which plan does a collective best: algorithm, protocol, channels and pieces, by the price of each.

The price is that of the algorithm's rounds (`schedules`) on the machine's links at the protocol's costs; no plan is
made. It is a function of its arguments alone, so all ranks choose the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.machines import Machine
from epcomm.collectives.cost.protocols import PROTOCOLS, costs_of
from epcomm.collectives.cost.schedules import SCHEDULES, algorithms_of
from epcomm.collectives.cost.world import World
from epcomm.collectives.plan import Collective, Plan
from epcomm.collectives.plan.conditions import ROOTED
from epcomm.errors import ConfigError
from epcomm.simulation.costs import Costs
from epcomm.simulation.rounds import Schedule

if TYPE_CHECKING:
    from epcomm.simulation.timeline import Timeline

CHANNELS = (1, 2, 4, 8, 16)
PIECES = (1, 2, 4, 8)
#: Of more ranks only the fewest and the most of both are priced.
_MANY_RANKS = 512
#: What is no slower than that is as fast, and the fewest channels win: what NCCL's model of its symmetric kernels does.
_ABOUT = 1.025
#: bytes of an element
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1}
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Request:
    """A collective among a machine's ranks, with `num_bytes` of a dtype in its unit (see `Collective`): the whole
    tensor of an allreduce, broadcast or reduce, a rank's block of the others. ConfigError if there is none such.
    """

    num_bytes: int
    machine: Machine
    dtype: str = "float32"
    kind: str = "allreduce"
    root: int = 0

    def __post_init__(self) -> None:
        if self.root and self.kind not in ROOTED:
            raise ConfigError(f"argument `root`: {self.kind} has none, got {self.root!r}")
        Collective(self.kind, self.num_ranks, 1, self.root)
        if self.dtype not in DTYPES:
            raise ConfigError(f"argument `dtype`: wanted one of {', '.join(DTYPES)}, got {self.dtype!r}")
        size = DTYPES[self.dtype]
        if type(self.num_bytes) is not int or self.num_bytes < size or self.num_bytes % size:
            wanted = f"a multiple of {size}, the bytes of a {self.dtype}, and at least that"
            raise ConfigError(f"argument `bytes`: wanted {wanted}, got {self.num_bytes!r}")

    @property
    def num_ranks(self) -> int:
        return self.machine.num_ranks

    @property
    def collective(self) -> Collective:
        """What is wanted, with its unit as one chunk."""
        return Collective(self.kind, self.num_ranks, 1, self.root)

    @property
    def world(self) -> World:
        """Its ranks as schedules see them."""
        return replace(self.machine.world, root=self.root)

    @property
    def is_half(self) -> bool:
        """Does it sum in 16 bits, to be rounded once?"""
        return self.dtype in _HALVES and self.collective.is_reduction


@dataclass(frozen=True)
class Candidate:
    """One way to do a request, and its price in µs.

    `wide_sums`: partial sums are float32 wherever they are kept or travel, so that a 16-bit result rounds once.
    """

    request: Request
    algorithm: str
    protocol: str
    channels: int
    pieces: int
    wide_sums: bool
    microseconds: float

    @property
    def costs(self) -> Costs:
        machine = self.request.machine
        return costs_of(machine.kind, self.protocol, self.algorithm, self.channels, len(machine.nodes))

    @cached_property
    def plan(self) -> Plan:
        return self._plan(channels=self.channels, pieces=self.pieces)

    def _plan(self, **options: Any) -> Plan:
        request, algorithm = self.request, ALGORITHMS[self.algorithm]
        known = {"order": request.world.order, "ranks_per_node": request.world.ranks_per_node}
        given: dict[str, Any] = {name: value for name, value in known.items() if name in algorithm.options}
        return algorithm.plan(request.kind, request.num_ranks, root=request.root, **options, **given)

    @cached_property
    def roundings(self) -> int:
        """How often a result is rounded: as often as the algorithm's plan sums, or once if partial sums are wide."""
        from epcomm.collectives.plan.verify import verify  # loads Numba, as the simulation does

        sums = verify(self._plan()).roundings
        return min(sums, 1) if self.wide_sums else sums

    @property
    def rounds_once(self) -> bool:
        """Whether no result is rounded more than once; two ranks' sums never are."""
        return self.wide_sums or self.request.num_ranks <= 2

    def simulated(self) -> Timeline:
        """The plan, event by event on the machine's links."""
        from epcomm.simulation.events import simulate

        return simulate(
            self.plan, self.request.num_bytes, self.request.machine.routed, self.costs, wide_sums=self.wide_sums
        )


def candidates(
    request: Request, *, algorithms: Sequence[str] | None = None, protocols: Sequence[str] | None = None
) -> list[Candidate]:
    """The best candidate of each algorithm and protocol, cheapest first; of 16-bit sums with partial sums of either
    width.

    Algorithms that can't serve so many ranks are left out; ConfigError if none can, or for names that aren't known.
    """
    known = algorithms_of(request.kind)
    found: list[Candidate] = []
    problems = []
    for name in known if algorithms is None else algorithms:
        if name not in known:
            raise ConfigError(f"argument `algorithm`: wanted one of auto, {', '.join(known)}, got {name!r}")
        try:
            schedule = _schedule(request, name)
        except ConfigError as error:  # so many ranks are not what it is for, or no links join those that talk
            problems.append(f"{name}: {error}")
            continue
        for protocol, wide in product(protocols or _protocols(request), _widths(request)):
            found.append(_simplest(list(_priced(request, name, protocol, wide, schedule))))
    if not found:
        raise ConfigError(f"argument `algorithm`: {'; '.join(problems)}")
    return sorted(found, key=lambda each: each.microseconds)


def choose(request: Request, **limits: Sequence[str]) -> Candidate:
    """What `auto` means: the cheapest candidate, for 16-bit sums of those that round once."""
    return next(allowed(request, candidates(request, **limits)))


def allowed(request: Request, found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Those that `auto` may pick."""
    return (each for each in found if each.rounds_once or not request.is_half)


def _schedule(request: Request, algorithm: str) -> Schedule:
    """Its rounds on the request's machine, whose cores run one program each."""
    rounds, machine = SCHEDULES[algorithm][request.kind](request.world), request.machine
    return Schedule(rounds, machine.pricing_network, one_program=machine.kind == "two_socket_host")


def _protocols(request: Request) -> Sequence[str]:
    return ("simple",) if request.machine.kind == "two_socket_host" else tuple(PROTOCOLS)


def _widths(request: Request) -> Sequence[bool]:
    """Whether to widen partial sums: two ranks have none."""
    return (False, True) if request.is_half and request.num_ranks > 2 else (False,)


def _simplest(options: list[Candidate]) -> Candidate:
    """The one with the fewest channels and pieces of those that are about as fast as the fastest."""
    enough = _ABOUT * min(each.microseconds for each in options)
    rated = ((each.channels * each.pieces, each.microseconds, each) for each in options if each.microseconds <= enough)
    return min(rated, key=lambda rating: rating[:2])[-1]


def _priced(request: Request, algorithm: str, protocol: str, wide: bool, schedule: Schedule) -> Iterator[Candidate]:
    """A candidate for each number of channels and pieces; on CPUs one channel, which is a rank's thread."""
    machine = request.machine
    channel_counts = (1,) if machine.kind == "two_socket_host" else CHANNELS
    options = product(channel_counts, PIECES)
    if request.num_ranks > _MANY_RANKS:
        options = product({channel_counts[0], channel_counts[-1]}, {PIECES[0], PIECES[-1]})
    for channels, pieces in options:
        costs = costs_of(machine.kind, protocol, algorithm, channels, len(machine.nodes))
        times = schedule.times(request.num_bytes, costs, channels=channels, pieces=pieces, wide_sums=wide)
        yield Candidate(request, algorithm, protocol, channels, pieces, wide, float(times.max()))
