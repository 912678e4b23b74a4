"""Bidirectional ring: two rings that turn in opposite directions, each with half of the data, so that both directions
of a link carry it."""

from __future__ import annotations

from epcomm.collectives.algorithms.algorithm import Algorithm
from epcomm.collectives.algorithms.ring import ring_forms

BIDIRECTIONAL_RING = Algorithm("bidirectional_ring", ring_forms(2), options=("order",))
