"""What does a collective best: a plan, of which algorithm, protocol, channels and pieces; or a kernel written by hand.

The price is that of the algorithm's rounds (`schedules`) on the machine's links at the protocol's costs; no plan is
made. It is a function of its arguments alone, so all ranks choose the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.kernels import kernels_for, measured_kernel, octave
from epcomm.collectives.cost.machines import Machine
from epcomm.collectives.cost.protocols import KERNEL, costs_of, protocols_of
from epcomm.collectives.cost.schedules import SCHEDULES, algorithms_of
from epcomm.collectives.cost.world import World
from epcomm.collectives.plan import FIFO_DEPTH, Collective, Plan
from epcomm.collectives.plan.conditions import ROOTED
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.collectives import CHUNK_BYTES
from epcomm.kernels.protocol.lines import PROTOCOLS, SIMPLE
from epcomm.simulation.costs import Costs
from epcomm.simulation.rounds import Schedule

if TYPE_CHECKING:
    from epcomm.simulation.timeline import Timeline

CHANNELS = (1, 2, 4, 8, 16)
#: So many as half a FIFO holds, and more only of broadcasts and reduces: else ranks that send to each other around a
#: circle fill their FIFOs, and wait for each other.
PIECES = (1, 2, 4, 8)
#: Of more ranks only the fewest and the most of both are priced.
_MANY_RANKS = 512
#: What is no slower than that is as fast, and the fewest channels win: what NCCL's model of its symmetric kernels does.
_ABOUT = 1.025
#: A plan has to be so many times cheaper than a kernel: as far as prices and simulations may be apart, and no run
#: has confirmed prices yet.
SURE = 1.28
#: bytes of an element
DTYPES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1, "complex128": 16, "complex64": 8,
}  # fmt: skip
_HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Request:
    """A collective among a machine's ranks, with `num_bytes` of a dtype in its unit (see `Collective`): the whole
    tensor of an allreduce, broadcast or reduce, a rank's block of the others. ConfigError if there is none such.

    `num_programs`: how many programs each rank has: at most so many channels has a plan, and as many a kernel.
    `protocols`: those by which plans run there.
    """

    num_bytes: int
    machine: Machine
    dtype: str = "float32"
    kind: str = "allreduce"
    root: int = 0
    op: str = "sum"
    num_programs: int = CHANNELS[-1]
    protocols: tuple[str, ...] = PROTOCOLS

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
        if type(self.num_programs) is not int or self.num_programs < 1:
            raise ConfigError(f"argument `programs`: wanted an integer >= 1, got {self.num_programs!r}")

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
        return self.dtype in _HALVES and self.collective.is_reduction and self.op not in ("min", "max")


@dataclass(frozen=True)
class Candidate:
    """One way to do a request, and its price in µs: infinite if nobody knows it.

    `protocol`: KERNEL is the algorithm's kernel written by hand, all else a plan. `wide_sums`: partial sums are float32
    wherever they are kept or travel, so that a 16-bit result rounds once: kernels do that, and plans that say so.
    """

    request: Request
    algorithm: str
    protocol: str
    channels: int
    pieces: int
    wide_sums: bool
    microseconds: float

    @property
    def is_kernel(self) -> bool:
        return self.protocol == KERNEL

    @property
    def has_price(self) -> bool:
        return self.microseconds < math.inf

    @property
    def runs(self) -> bool:
        """Whether that is there: plans run by some protocols."""
        return self.is_kernel or self.protocol in self.request.protocols

    @property
    def costs(self) -> Costs:
        """What its steps cost, and what comes before: all ranks of a plan meet, those of a kernel don't."""
        machine = self.request.machine
        costs = costs_of(machine.kind, self.protocol, self.algorithm, self.channels, len(machine.nodes))
        return costs if self.is_kernel else replace(costs, launch=costs.launch + machine.meeting)

    @cached_property
    def plan(self) -> Plan:
        """The plan; of a kernel the one of its algorithm, to simulate it."""
        return self._plan(
            channels=self.channels, pieces=self.pieces, protocol=SIMPLE if self.is_kernel else self.protocol
        )

    def _plan(self, **options: Any) -> Plan:
        request, algorithm = self.request, ALGORITHMS[self.algorithm]
        known = {"order": request.world.order, "ranks_per_node": request.world.ranks_per_node}
        given: dict[str, Any] = {name: value for name, value in known.items() if name in algorithm.options}
        options |= {"root": request.root, "wide_sums": self.wide_sums}
        return algorithm.plan(request.kind, request.num_ranks, **options, **given)

    @cached_property
    def roundings(self) -> int:
        """How often a result is rounded: as often as the algorithm's plan says; avg, unless partial sums are wide, once
        more.
        """
        from epcomm.collectives.plan.verify import verify  # loads Numba, as the simulation does

        return verify(self._plan()).roundings + (self.request.op == "avg" and not self.wide_sums)

    @property
    def rounds_once(self) -> bool:
        """Whether no result is rounded more than once: two ranks' sums never are, their averages may be again."""
        return self.wide_sums or self.request.num_ranks <= 2 and self.request.op != "avg"

    def simulated(self) -> Timeline:
        """The plan, event by event on the machine's links."""
        from epcomm.simulation.events import simulate

        machine = self.request.machine
        num_workers = 1 if machine.is_of_cores else None  # of cores each rank is taken to have one
        return simulate(
            self.plan, self.request.num_bytes, machine.routed, self.costs,
            wide_sums=self.wide_sums, num_workers=num_workers,
        )  # fmt: skip


def candidates(
    request: Request, *, algorithms: Sequence[str] | None = None, protocols: Sequence[str] | None = None
) -> list[Candidate]:
    """The best candidate of each algorithm and protocol, cheapest first, of equals kernels; of 16-bit sums with partial
    sums of either width.

    Algorithms that can't serve so many ranks are left out; ConfigError if none can, or for names that aren't known.
    """
    known = algorithms_of(request.kind)
    for name in algorithms or ():
        if name not in known:
            raise ConfigError(f"argument `algorithm`: wanted one of auto, {', '.join(known)}, got {name!r}")
    found, problems = _priced(request, algorithms or known, protocols or (KERNEL, *protocols_of(request.machine.kind)))
    if not found:
        raise ConfigError(f"argument `algorithm`: {'; '.join(problems)}")
    return found


def choose(request: Request) -> Candidate:
    """What `auto` means for an allreduce. Other collectives take plans only when told to: for them this is the
    cheapest, of 16-bit sums of those that round once.

    An allreduce among several nodes has one kernel. Where ranks are cores, or bandwidths aren't known, it takes the
    kernel that was measured to be the best of its size. Elsewhere it takes the cheapest kernel, or the cheapest plan
    that runs if the kernel's price is more than `SURE` times its own, at the next power of two of bytes; of 16-bit sums
    those that round once. Should none of these have a price, because links
    don't join all pairs of ranks, it takes that kernel nevertheless: load and store reach every rank of a node.
    """
    if request.kind != "allreduce":
        return next(each for each in candidates(request) if each.rounds_once or not request.is_half)
    machine, num_nodes = request.machine, len(request.machine.nodes)
    kernel, found = measured_kernel(request.num_bytes, num_nodes), list[Candidate]()
    if machine.has_speeds:
        if num_nodes > 1 or machine.is_of_cores:
            found, _ = _priced(request, (kernel,), (KERNEL,))
        else:
            class_of_size = replace(request, num_bytes=octave(request.num_bytes))
            found, _ = _priced(class_of_size, algorithms_of(request.kind), (KERNEL, *request.protocols))
            found.sort(key=lambda each: each.microseconds / (SURE if each.is_kernel else 1.0))
    chosen = replace(next(allowed(request, found), _kernel(request, kernel)), request=request)
    return _price(chosen, schedule_of(request, chosen.algorithm)) if chosen.has_price else chosen


def cheapest(request: Request, found: Sequence[Candidate]) -> Candidate:
    """The first of the candidates that `auto` may pick, else that runs, else of all."""
    return next(allowed(request, found), next((each for each in found if each.runs), found[0]))


def allowed(request: Request, found: Sequence[Candidate]) -> Iterator[Candidate]:
    """Those that `auto` may pick."""
    return (each for each in found if each.runs and (each.rounds_once or not request.is_half))


def _priced(
    request: Request, algorithms: Sequence[str], protocols: Sequence[str]
) -> tuple[list[Candidate], list[str]]:
    """The candidates, cheapest first, and why algorithms have none."""
    found: list[Candidate] = []
    problems = []
    for name in algorithms:
        try:
            schedule = schedule_of(request, name)
        except ConfigError as error:  # so many ranks are not what it is for, or no links join those that talk
            problems.append(f"{name}: {error}")
            continue
        for protocol in protocols:
            variants = list(_variants(request, name, protocol))
            found += [_simplest([_price(way, schedule) for way in ways]) for ways in variants]
            if not variants:
                problems.append(f"{name}: it has no {protocol} for {request.num_bytes} bytes on {request.machine.name}")
    return sorted(found, key=lambda each: (each.microseconds, not each.is_kernel)), problems


def schedule_of(request: Request, algorithm: str) -> Schedule:
    """An algorithm's rounds on the request's machine, whose cores run one program each."""
    rounds, machine = SCHEDULES[algorithm][request.kind](request.world), request.machine
    return Schedule(rounds, machine.pricing_network, one_program=machine.is_of_cores)


def _simplest(options: list[Candidate]) -> Candidate:
    """The one with the fewest channels and pieces of those that are about as fast as the fastest."""
    enough = _ABOUT * min(each.microseconds for each in options)
    rated = ((each.channels * each.pieces, each.microseconds, each) for each in options if each.microseconds <= enough)
    return min(rated, key=lambda rating: rating[:2])[-1]


def _variants(request: Request, algorithm: str, protocol: str) -> Iterator[list[Candidate]]:
    """What to price: of each list the simplest is wanted. Of a plan for each number of channels and pieces, and by how
    wide partial sums are.
    """
    if protocol == KERNEL:
        if request.kind == "allreduce" and algorithm in kernels_for(request.num_bytes, len(request.machine.nodes)):
            yield [_kernel(request, algorithm)]
        return
    counts = _channel_counts(request)
    pieces = PIECES if request.kind in ROOTED else [each for each in PIECES if each <= FIFO_DEPTH // 2]
    options = [*product(counts, pieces)]
    if request.num_ranks > _MANY_RANKS:
        options = [*product({counts[0], counts[-1]}, {pieces[0], pieces[-1]})]
    has_partial = request.num_ranks > 2 or request.op == "avg"  # also a sum that is still to be divided
    for wide in (False, True) if request.is_half and has_partial else (False,):
        yield [Candidate(request, algorithm, protocol, *option, wide, math.inf) for option in options]


def _channel_counts(request: Request) -> Sequence[int]:
    """Of plans; on CPUs one channel, which is a rank's thread."""
    return (1,) if request.machine.is_of_cores else [each for each in CHANNELS if each <= request.num_programs]


def _kernel(request: Request, algorithm: str) -> Candidate:
    """An algorithm's kernel, without a price: chunks that follow one another on each channel are its pieces."""
    channels = 1 if algorithm == "one_shot" or request.machine.is_of_cores else request.num_programs
    pieces = min(max(1, -(-request.num_bytes // (channels * CHUNK_BYTES))), PIECES[-1])
    return Candidate(request, algorithm, KERNEL, channels, pieces, request.is_half, math.inf)


def _price(candidate: Candidate, schedule: Schedule) -> Candidate:
    """The candidate with its price."""
    times = schedule.times(
        candidate.request.num_bytes, candidate.costs, channels=candidate.channels, pieces=candidate.pieces,
        wide_sums=candidate.wide_sums,
    )  # fmt: skip
    return replace(candidate, microseconds=float(times.max()))
