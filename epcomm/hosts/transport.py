"""How CPU ranks of several hosts reach each other: what the user asked for, or what "auto" finds.

"auto" takes UCX where all ranks have it and it can use an RDMA device, else TCP. Ranks of one host share memory.
"""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from epcomm.errors import EpcommError, UnsupportedError
from epcomm.heap import ucx
from epcomm.heap.choice import Exchange, agreed, first_taken, require_same
from epcomm.hosts.tcp_proxy import NoProxy, Proxy, connect_tcp
from epcomm.hosts.ucx_proxy import UcxProxy
from epcomm.world.hub import Hub
from epcomm.world.tcp import interface_of

#: in the order in which "auto" tries them
TRANSPORTS = ("shared_memory", "ucx", "tcp")


def connect_proxy(
    hub: Hub, wanted: str, timeout: float, check: Callable[[], None], fail: weakref.ref[Callable[[EpcommError], Any]]
) -> NoProxy | Proxy | UcxProxy:
    """Collective: the way to ranks on other hosts; `fail` is called if what they send can't be.

    Raises, on all ranks, ConfigError if they don't want the same, UnsupportedError with the reasons if they can't; also
    `TimeoutError` if a rank doesn't come, or what `check` raises.
    """
    if len(hub.leaders) == 1:
        return NoProxy()

    def exchange(payload: bytes) -> list[bytes]:
        return [message for message, _ in hub.allgather(payload, timeout=timeout, check=lambda: None)]

    def shared_memory() -> NoProxy:
        raise UnsupportedError(f"the ranks are on {len(hub.leaders)} hosts, by rank {list(hub.nodes)}")

    def by_ucx() -> UcxProxy:
        settings = _ucx_settings(hub, exchange, needs_rdma=wanted == "auto")
        return UcxProxy(hub.rank, hub.nodes, settings, exchange, timeout)

    def by_tcp() -> Proxy:
        return connect_tcp(hub, timeout, check, fail)

    require_same(wanted, exchange)
    attempts: dict[str, Callable[[], NoProxy | Proxy | UcxProxy]] = dict(
        zip(TRANSPORTS, (shared_memory, by_ucx, by_tcp), strict=True)
    )
    return first_taken(wanted, attempts)


def _ucx_settings(hub: Hub, exchange: Exchange, needs_rdma: bool) -> Mapping[str, str]:
    """Collective: what is asked of UCX. If `needs_rdma`, raises UnsupportedError unless all ranks can use it."""
    try:
        agreed("UCX can't be used", exchange, ucx.require_rdma)
        return ucx.SETTINGS["RDMA"]
    except UnsupportedError:
        if needs_rdma:
            raise
    agreed("UCX can't be used", exchange, _require_ordered_stores)
    return {**ucx.SETTINGS["TCP"], **_devices(hub.addresses[hub.rank], exchange)}


def _require_ordered_stores() -> None:
    """UCX copies what comes over TCP by plain stores: a word is seen after its bytes if the CPU keeps their order."""
    if platform.machine() != "x86_64":
        raise UnsupportedError(f"over TCP it needs the order in which x86_64 stores, got {platform.machine()}")


def _devices(address: str, exchange: Exchange) -> dict[str, str]:
    """Collective: UCX's setting of the interface that has this rank's address, by which the ranks have met.

    UCX doesn't connect a loopback interface with any other, so that it is taken by all ranks or by none.
    """
    kinds = exchange(b"loopback" if address.startswith("127.") else b"")
    if address.startswith("127.") and b"" in kinds:
        return {"NET_DEVICES": "^lo"}
    interface = interface_of(address)
    return {} if interface is None else {"NET_DEVICES": interface}


def explained() -> list[tuple[str, str]]:
    """(transport, whether "auto" would take it between this host and others, or what speaks against it)."""
    reason = ucx.refusal_of_rdma()
    if reason:
        return [("ucx", f"not taken by auto: {reason}"), ("tcp", "taken by auto between hosts")]
    return [("ucx", "taken by auto between hosts"), ("tcp", "taken by auto between hosts where ucx is refused")]
