"""epcomm's handles behind a buffer. DeepEP's calls tell only as they come how many experts and slots there are."""

from __future__ import annotations

from typing import Any

import torch

from epcomm.communicator import Communicator
from epcomm.moe.autograd import flat


class Handles:
    """The `ExpertParallel`s of one buffer, made when a call of their kind comes for the first time.

    All ranks make the same ones in the same order: what decides is the same on all ranks, or agreed on first.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._by_options: dict[Any, list[Any]] = {}
        self._fitted: dict[Any, tuple[Any, int, int]] = {}
        self._all: list[Any] = []

    def _make(self, options: dict[str, Any]) -> Any:
        ep = self._comm.expert_parallel(**options)
        self._all.append(ep)
        return ep

    def of(self, **options: Any) -> Any:
        """The handle for options that are the same on all ranks.

        Another one where a split operation of the first has not been finished: so any number may be under way.
        """
        handles = self._by_options.setdefault(tuple(options.items()), [])
        for ep in handles:
            if not ep.has_unfinished:
                return ep
        handles.append(self._make(options))
        return handles[-1]

    def fitting(self, num_tokens: int, row_bytes: int, **options: Any) -> Any:
        """Collective: the handle for calls of so many tokens and bytes per row as any rank has now.

        It grows to powers of two tokens. Smaller ones that it replaces stay, for routings along them, until `close`.
        """
        key = tuple(options.items())
        wanted = torch.tensor([num_tokens, row_bytes], device=self._comm.device)
        most_tokens, most_bytes = self._comm.allreduce(wanted, "max").tolist()
        ep, max_tokens, max_bytes = self._fitted.get(key, (None, 0, 0))
        if ep is None or most_tokens > max_tokens or most_bytes > max_bytes:
            max_tokens = max(max_tokens, 1 << max(0, most_tokens - 1).bit_length())
            max_bytes = max(max_bytes, most_bytes)
            ep = self._make(dict(options, max_tokens=max_tokens, hidden=max_bytes, dtype=torch.uint8))
            self._fitted[key] = ep, max_tokens, max_bytes
        return ep

    def close(self) -> None:
        """Collective: frees them all."""
        for ep in self._all:
            ep.close()


def bytes_per_row(x: Any, topk: int) -> int:
    """What a dispatch of x, and a combine in 16 bits with `topk` weights, need per row."""
    tensors = flat(x)
    moved = sum(tensor.shape[-1] * tensor.element_size() for tensor in tensors)
    return max(moved, 2 * tensors[0].shape[-1]) + 4 * topk
