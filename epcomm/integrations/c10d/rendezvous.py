"""``init_method="epcomm://"``: a store for the ranks of `epcomm.launch`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def meet(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Iterator[tuple[dist.Store, int, int]]:  # noqa: B008
    """Yields a store, this rank and the number of ranks; outside of `epcomm.launch` those of the environment."""
    from epcomm.world import bootstrap
    from epcomm.world.rendezvous import launched_rank

    launched = launched_rank.get()
    if launched is None:
        yield from dist.rendezvous("env://", timeout=timeout)
        return
    seconds = timeout.total_seconds()
    hub = bootstrap.connect(launched, seconds)
    try:
        store = None
        if hub.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        own = b"" if store is None else str(store.port).encode()
        (port, _), *_ = hub.allgather(own, timeout=seconds, check=launched.check)
        if store is None:
            store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
        hub.barrier(timeout=seconds, check=launched.check)  # rank 0 is needed until all have connected
    finally:
        hub.close()
    yield store, launched.rank, launched.size
