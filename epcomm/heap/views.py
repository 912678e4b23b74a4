"""Tensors on memory that is known by its address only, such as a peer's."""

from __future__ import annotations

import torch


def memory_view(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 tensor [num_bytes] on memory that `device` can address; whoever uses it keeps that memory alive.

    Memory of another GPU passes for one of `device`: copies then run on `device`'s stream, to which torch would add the
    other GPU's if it knew.
    """
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
