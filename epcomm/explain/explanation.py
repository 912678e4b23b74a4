"""What there is to say about a request: the chosen plan, what was proved about it, its simulation, its bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from epcomm.collectives.cost.choice import Candidate, Request, candidates, cheapest, choose, schedule_of
from epcomm.errors import ConfigError
from epcomm.explain.alternatives import Alternative, priced
from epcomm.simulation.bounds import crossing, cut_bound, halves
from epcomm.simulation.network import Cluster
from epcomm.simulation.rounds import Schedule
from epcomm.simulation.timeline import Timeline

#: Larger plans are not made: their simulation takes minutes.
MOST_SIMULATED = 32
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
        """µs below which no plan on this machine is; None where there are too many pairs of ranks to look at."""
        request, network = self.request, self.request.machine.pricing_network
        groupings = [self._singly, self.request.machine.nodes]
        groupings += halves(request.num_ranks) if request.num_ranks <= _MOST_DIVIDED else []
        try:
            return cut_bound(
                network, request.collective, request.num_bytes, groupings, are_alike=isinstance(network, Cluster)
            )
        except ConfigError:
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
    def rounds(self) -> Schedule:
        """The chosen algorithm's rounds, of which the price is."""
        return schedule_of(self.request, self.chosen.algorithm)

    @cached_property
    def shares(self) -> dict[str, float]:
        """Of the simulated time: what goes into the launch, latencies and steps, bytes, and queues. Of a price: into
        the launch, what else no bytes at all would take, and bytes. Empty without either.
        """
        if self.timeline is not None:
            return {name: value / self.timeline.makespan for name, value in self.timeline.parts.items()}
        if not self.chosen.has_price:
            return {}
        chosen, costs = self.chosen, self.chosen.costs
        without = float(self.rounds.times(0, costs, channels=chosen.channels, pieces=chosen.pieces).max())
        parts = {"launch": costs.launch, "latency and steps": without - costs.launch}
        parts["bytes"] = self.microseconds - without
        return {name: value / self.microseconds for name, value in parts.items()}

    @cached_property
    def busiest_links(self) -> list[tuple[str, float]]:
        """Names and shares of the time of the links that are busy longest, in the simulation or in rounds."""
        if self.timeline is not None:
            return self.timeline.busiest_links()
        if not self.chosen.has_price:
            return []
        chosen, network = self.chosen, self.rounds.network
        busy = self.rounds.link_times(self.request.num_bytes, chosen.costs, wide_sums=chosen.wide_sums)
        order = [int(link) for link in (-busy).argsort(kind="stable")[:5] if busy[link]]
        return [(network.link_name(link), float(busy[link]) / self.microseconds) for link in order]

    @property
    def is_mostly_fixed(self) -> bool | None:
        """Whether launch, steps and latencies take most of the time; None if nobody knows."""
        return self.shares["bytes"] + self.shares.get("queue", 0.0) < 0.5 if self.shares else None


def explain(request: Request, algorithm: str = "auto", protocol: str = "auto") -> Explanation:
    """ConfigError if the algorithm or protocol isn't known, or can't do the request."""
    protocols = None if protocol == "auto" else (protocol,)
    found = candidates(request, protocols=protocols)
    if algorithm == protocol == "auto":
        return Explanation(request, found, choose(request))
    asked = found if algorithm == "auto" else candidates(request, algorithms=(algorithm,), protocols=protocols)
    return Explanation(request, found, cheapest(request, asked))
