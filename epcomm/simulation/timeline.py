"""What came of a simulation: when each step ran, what it waited for, the critical path, how busy links were."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from epcomm.simulation.costs import Costs
from epcomm.simulation.network import Network

if TYPE_CHECKING:
    from epcomm.collectives.plan.graph import Graph  # loads Numba


class Cause(enum.Enum):
    """What a step waited for longest; the value is how it is told."""

    BEGINNING = "the beginning"
    PROGRAM = "the step before"
    AFTER = "a dependency"
    MESSAGE = "a message"
    SLOT = "a free slot"


BEGINNING = (Cause.BEGINNING, -1)

#: What time on a critical path goes into: before any step; steps' and messages' fixed costs; moving bytes; waiting for
#: a link that others use.
PARTS = ("launch", "steps", "latency", "bytes", "queue")


@dataclass(frozen=True)
class Segment:
    """A part of a critical path, from `begin` to `end` µs: a step at work, or the message it sent on its way."""

    step: int
    is_message: bool
    begin: float
    end: float
    parts: dict[str, float]  # its µs by what they go into, of PARTS


@dataclass(frozen=True)
class Timeline:
    """Times in µs, by the numbers of `graph`'s steps: float64 [num_steps] each; `link_busy` float64 [num_links].

    `cause` is what a step waited for longest, and of which step. `arrival` is when a step's message had arrived;
    `queued` how long it waited for links, `queued_first` for the first of them.
    """

    graph: Graph
    network: Network
    costs: Costs
    start: np.ndarray
    complete: np.ndarray
    cause: tuple[tuple[Cause, int], ...]
    arrival: np.ndarray
    queued: np.ndarray
    queued_first: np.ndarray
    latency: np.ndarray
    overhead: np.ndarray
    link_busy: np.ndarray

    @cached_property
    def makespan(self) -> float:
        """µs until all steps are complete, the launch included."""
        return float(self.complete.max(initial=self.costs.launch))

    @cached_property
    def critical_path(self) -> tuple[Segment, ...]:
        """Segments without gaps from the launch to the last step's end: what has to get shorter for the whole to."""
        segments: list[Segment] = []
        number = int(self.complete.argmax()) if self.graph.num_steps else -1
        end, is_message = self.makespan, False
        while number >= 0:
            segments.append(self._segment(number, is_message, end))
            end = segments[-1].begin
            cause, number = self.cause[number]
            is_message = cause is Cause.MESSAGE
        return tuple(reversed(segments))

    def _segment(self, number: int, is_message: bool, end: float) -> Segment:
        """A step until it is complete, or until its message has arrived."""
        begin = float(self.start[number])
        parts = {
            "steps": float(self.overhead[number]),
            "latency": float(self.latency[number]) if is_message else 0.0,
            "queue": float((self.queued if is_message else self.queued_first)[number]),
        }
        parts["bytes"] = end - begin - sum(parts.values())
        return Segment(number, is_message, begin, end, parts)

    @cached_property
    def parts(self) -> dict[str, float]:
        """The makespan by what it goes into along the critical path: PARTS, µs."""
        total = dict.fromkeys(PARTS, 0.0) | {"launch": self.costs.launch}
        for segment in self.critical_path:
            for name, value in segment.parts.items():
                total[name] += value
        return total

    @cached_property
    def link_use(self) -> np.ndarray:
        """The share of the makespan that each link is busy, float64 [num_links]."""
        return self.link_busy / self.makespan if self.makespan else np.zeros_like(self.link_busy)

    def busiest_links(self, most: int = 5) -> list[tuple[str, float]]:
        """Names and shares of the links that are busy longest."""
        used = self.link_use
        order = [int(link) for link in np.argsort(-used, kind="stable")[:most] if used[link]]
        return [(self.network.link_name(link), float(used[link])) for link in order]
