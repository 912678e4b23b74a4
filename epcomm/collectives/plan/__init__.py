"""Collectives as data: plans, the proof that they are right, and the formats they are kept in."""

from epcomm.collectives.plan.conditions import COLLECTIVES, Collective
from epcomm.collectives.plan.plan import BUFFERS, FIFO_DEPTH, Dependency, Location, Op, Plan, Position, Program, Step

__all__ = [
    "BUFFERS", "COLLECTIVES", "FIFO_DEPTH", "Collective", "Dependency", "Location", "Op", "Plan", "Position", "Program",
    "Step",
]  # fmt: skip
