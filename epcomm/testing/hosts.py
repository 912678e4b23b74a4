"""Ranks of one machine that take themselves for ranks of several hosts: without privileges, without shared memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from epcomm.world import bootstrap
from epcomm.world.rendezvous import launched_rank


@contextlib.contextmanager
def pretend_hosts(node_of_rank: Sequence[int]) -> Iterator[None]:
    """While the context is open, `init` takes a launched rank's host for a part of this machine.

    The ranks must then meet through a store or a process group: `epcomm.launch` knows one machine only.
    """
    actual = bootstrap.host_identity

    def pretended() -> str:
        launched = launched_rank.get()
        if launched is None:
            raise RuntimeError("pretend_hosts: wanted a rank of `run_ranks` or `launch`, got another process or thread")
        return f"{actual()}/part {node_of_rank[launched.rank]}"

    bootstrap.host_identity = pretended
    try:
        yield
    finally:
        bootstrap.host_identity = actual
