"""How long plans take on machines, without running them: event by event, or in rounds for worlds of any size.

Units everywhere: bytes, microseconds, GB/s of 1e9 bytes, one direction.
"""

from epcomm.simulation.costs import Costs
from epcomm.simulation.events import simulate
from epcomm.simulation.network import Cluster, Network, RoutedNetwork
from epcomm.simulation.rounds import Round, Schedule
from epcomm.simulation.timeline import Timeline

__all__ = ["Cluster", "Costs", "Network", "Round", "RoutedNetwork", "Schedule", "Timeline", "simulate"]
