"""Ranks with a gloo process group, as clients of torch.distributed have them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import torch.distributed as dist

from epcomm.testing.ranks import rank_outcomes, run_ranks
from epcomm.world import rendezvous


def with_process_group(
    world: int, body: Callable[..., Any], *args: Any, timeout: float = 60.0, expendable: Collection[int] = ()
) -> list[Any]:
    """Runs ``body(*args)`` on ranks whose default process group is one of gloo's; returns the results by rank.

    Ranks have torchrun's environment, too, which some frameworks read.
    With `expendable` ranks, which may kill themselves, each rank's result or what it raised.
    """

    def run(port: int) -> Any:
        launched = rendezvous.launched_rank.get()
        assert launched is not None
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        named = {"RANK": launched.rank, "LOCAL_RANK": launched.rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        with mock.patch.dict(os.environ, {name: str(number) for name, number in named.items()}):
            dist.init_process_group("gloo", store=store, rank=launched.rank, world_size=world)
            try:
                return body(*args)
            finally:
                dist.destroy_process_group()

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if expendable:
        return rank_outcomes(run, world, store.port, timeout=timeout, expendable=expendable)
    return run_ranks(run, world, store.port, timeout=timeout)
