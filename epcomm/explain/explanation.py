"""What there is to say about a request: the chosen plan, what was proved about it, its simulation, its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from epcomm.collectives.cost.choice import Candidate, Request, candidates, cheapest, choose
from epcomm.errors import ConfigError
from epcomm.explain.alternatives import Alternative, priced
from epcomm.simulation.bounds import crossing, cut_bound, halves
from epcomm.simulation.timeline import Timeline

#: Larger plans are not made: their simulation takes minutes.
MOST_SIMULATED = 32
_MOST_BOUNDED = 1024
#: Of no more ranks all ways to divide them in two are looked at.
_MOST_DIVIDED = 8


@dataclass(frozen=True)
class Explanation:
    """`candidates`, cheapest first, and what is `chosen`: what `auto` is, or of the algorithm or protocol asked for the
    cheapest, if one runs of those that do.
    """

    request: Request
    candidates: Sequence[Candidate]
    chosen: Candidate

    @cached_property
    def timeline(self) -> Timeline | None:
        """The chosen plan's simulation, of a kernel that of its algorithm's plan; None without a price, and where there
        are too many ranks to make a plan.
        """
        is_simulated = self.request.num_ranks <= MOST_SIMULATED and self.chosen.has_price
        return self.chosen.simulated() if is_simulated else None

    @property
    def microseconds(self) -> float:
        """Of the simulation, or else the price."""
        return self.chosen.microseconds if self.timeline is None else self.timeline.makespan

    @cached_property
    def bound(self) -> float | None:
        """µs below which no plan on this machine is; None where there are too many ranks to look at all pairs."""
        request, machine = self.request, self.request.machine
        if request.num_ranks > _MOST_BOUNDED:
            return None
        groupings = [self._singly, machine.nodes]
        groupings += halves(request.num_ranks) if request.num_ranks <= _MOST_DIVIDED else []
        try:
            return cut_bound(machine.pricing_network, request.collective, request.num_bytes, groupings)
        except ConfigError:  # two nodes may have too many pairs even so
            return None

    @cached_property
    def bytes_sent(self) -> float:
        """Bytes that have to leave a rank, on average, if ranks alone add and copy."""
        request = self.request
        return crossing(request.collective, self._singly).total * request.num_bytes / request.num_ranks

    @property
    def _singly(self) -> list[list[int]]:
        return [[rank] for rank in range(self.request.num_ranks)]

    @cached_property
    def alternatives(self) -> list[tuple[Alternative, float]]:
        """What may be enough instead, and its price in µs."""
        return list(priced(self.request))

    @cached_property
    def shares(self) -> dict[str, float]:
        """Of the simulated time: what goes into the launch, latencies and steps, bytes, and queues; empty without."""
        if self.timeline is None:
            return {}
        return {name: value / self.timeline.makespan for name, value in self.timeline.parts.items()}

    @property
    def is_mostly_fixed(self) -> bool | None:
        """Whether launch, steps and latencies take most of the critical path; without a simulation, whether the bound
        is less than a quarter of the price; None if that isn't known either.
        """
        if self.shares:
            return self.shares["bytes"] + self.shares["queue"] < 0.5
        return None if self.bound is None else self.bound < 0.25 * self.microseconds


def explain(request: Request, algorithm: str = "auto", protocol: str = "auto") -> Explanation:
    """ConfigError if the algorithm or protocol isn't known, or can't do the request."""
    protocols = None if protocol == "auto" else (protocol,)
    found = candidates(request, protocols=protocols)
    if algorithm == protocol == "auto":
        return Explanation(request, found, choose(request))
    asked = found if algorithm == "auto" else candidates(request, algorithms=(algorithm,), protocols=protocols)
    return Explanation(request, found, cheapest(request, asked))
