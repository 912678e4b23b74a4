"""What ranks tell each other at `init`, once they have met, so that all of them go by the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from epcomm.errors import ConfigError
from epcomm.world.hub import Hub

if TYPE_CHECKING:
    from epcomm.topology import Topology


@dataclass(frozen=True)
class Terms:
    """What a rank brings: how many programs it would run, its kind of device, its topology's name and fingerprint."""

    num_programs: int
    kind: str
    topology: str = "none"


def agree(hub: Hub, own: Terms, timeout: float) -> int:
    """How many programs each rank runs: the least that any asks for.

    ConfigError, on all ranks, unless all are on the same kind of device and were given the same topology.
    """
    payload = json.dumps(asdict(own)).encode()
    messages = hub.allgather(payload, timeout=timeout, check=lambda: None)
    terms = [Terms(**json.loads(message)) for message, _ in messages]
    kinds = [each.kind for each in terms]
    if len(set(kinds)) > 1:
        raise ConfigError(f"init: argument `device`: wanted the same kind on all ranks, got {', '.join(kinds)} by rank")
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(terms):
        ranks_of.setdefault(each.topology, []).append(rank)
    if len(ranks_of) > 1:
        got = ", ".join(f"{topology} on rank(s) {ranks}" for topology, ranks in ranks_of.items())
        raise ConfigError(f"init: argument `topology`: wanted the same on all ranks, got {got}")
    return min(each.num_programs for each in terms)


def check_topology(topology: Topology, nodes: Sequence[int]) -> None:
    """ConfigError unless the topology has as many ranks as there are, and machines for nodes; `nodes` is by rank."""
    if topology.num_ranks != len(nodes):
        got = f"one of {topology.num_ranks}, {topology.name}"
        raise ConfigError(f"init: argument `topology`: wanted a machine of {len(nodes)} ranks, got {got}")
    wanted = {tuple(rank for rank, node in enumerate(nodes) if node == each) for each in nodes}
    if set(topology.nodes) != wanted:
        raise ConfigError(
            f"init: argument `topology`: wanted these ranks in each machine, which share memory: {sorted(wanted)}, got "
            f"{sorted(topology.nodes)} of {topology.name}"
        )
