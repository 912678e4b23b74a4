"""A process group of torch on a test's ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from epcomm.rendezvous import launched_rank


@contextmanager
def process_group(path: str) -> Iterator[tuple[int, int]]:
    """gloo's, which meets in a folder, and torchrun's environment, which frameworks read; yields rank and size."""
    launched = launched_rank.get()
    assert launched is not None
    rank, size = launched.rank, launched.size
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    with mock.patch.dict(os.environ, {name: str(number) for name, number in named.items()}):
        dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", size), rank=rank, world_size=size)
        try:
            yield rank, size
            dist.barrier()
        finally:
            dist.destroy_process_group()
