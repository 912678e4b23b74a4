"""Ranks on several hosts: parts of this machine that share no memory, joined by TCP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

import epcomm
from epcomm.testing.hosts import pretend_hosts
from epcomm.testing.ranks import run_ranks
from epcomm.world import rendezvous

WORLDS = {"1+1": [0, 1], "2+2": [0, 0, 1, 1], "1+2": [0, 1, 1], "1+2+1": [0, 1, 1, 2], "interleaved": [0, 1, 0, 1]}
EVERY_WORLD = pytest.mark.parametrize("hosts", WORLDS.values(), ids=WORLDS)


def on_hosts(hosts: list[int], port: int, body: Callable[..., Any], *args: Any, timeout: float = 30.0,
             **init: Any) -> list[Any]:  # fmt: skip
    """What ``body(communicator, *args)`` returns on ranks that take themselves for ranks of `hosts`."""

    def run() -> Any:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with pretend_hosts(hosts):
            comm = epcomm.init(
                store=store,
                rank=rendezvous.launched_rank.get().rank,
                world_size=len(hosts),
                timeout=timeout,
                **init,
            )
        with comm:
            return body(comm, *args)

    return run_ranks(run, len(hosts), timeout=120.0)
