"""Which transport the GPUs of a communicator take: what the user asked for, or what "auto" finds.

"auto" takes the first of `TRANSPORTS` that no rank refuses: peer memory, which is for one host and GPUs that reach each
other, then NVSHMEM, then NCCL's GIN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from epcomm.errors import UnsupportedError
from epcomm.heap.choice import Exchange, agreed, first_taken, require_same
from epcomm.heap.cuda import require_peer_access
from epcomm.heap.nccl import NcclNetwork
from epcomm.heap.network import Network
from epcomm.heap.nvshmem import NvshmemNetwork

_NETWORKS: dict[str, type[Network]] = {network.name: network for network in (NvshmemNetwork, NcclNetwork)}
#: in the order in which "auto" tries them
TRANSPORTS = ("peer_memory", *_NETWORKS)


def connect(wanted: str, rank: int, hosts: Sequence[int], device: torch.device, exchange: Exchange) -> Network | None:
    """Collective: the network that the ranks take; None: they take peer memory. `hosts` are by rank.

    Raises, on all ranks, ConfigError if they don't want the same, UnsupportedError with the reasons if they can't.
    """
    gpus = require_same(wanted, exchange, device.index)

    def peer_memory() -> None:
        agreed("peer memory can't be used", exchange, lambda: require_peer_memory(hosts, device, gpus))

    def network_of(kind: Callable[..., Network]) -> Callable[[], Network]:
        return lambda: kind(rank, device, exchange)

    attempts: dict[str, Callable[[], Any]] = {"peer_memory": peer_memory}
    attempts |= {name: network_of(kind) for name, kind in _NETWORKS.items()}
    return first_taken(wanted, attempts)


def require_peer_memory(hosts: Sequence[int], device: torch.device, gpus: Sequence[int]) -> None:
    """Raises UnsupportedError unless ranks on these hosts and GPUs reach each other by load and store."""
    if len(set(hosts)) > 1:
        raise UnsupportedError(f"the ranks are on {len(set(hosts))} hosts, by rank {list(hosts)}")
    for gpu in gpus:
        require_peer_access(device, gpu)


def explained(device: torch.device) -> list[tuple[str, str]]:
    """(network, whether "auto" would take it on this host, or all that speaks against it), in the order of trial."""
    taken = "taken by auto between hosts"
    rows = []
    for name, network in _NETWORKS.items():
        reasons = network.refusals(device)
        rows.append((name, f"not taken by auto: {'; '.join(reasons)}" if reasons else taken))
        if not reasons:
            taken = f"taken by auto between hosts where {name} is refused"
    return rows
