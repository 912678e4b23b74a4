"""Parts: what goes to, or comes from, each rank. They lie side by side in one tensor, or each in a tensor of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from epcomm.collectives.checks import check_out, check_tensor
from epcomm.errors import ConfigError

Tensors = torch.Tensor | Sequence[torch.Tensor]


class Parts(NamedTuple):
    """Where the parts of all ranks lie: at `address` + `offsets[rank]`, or side by side if `offsets` is None."""

    address: int
    offsets: tuple[int, ...] | None
    num_bytes: int  # of all parts
    tensors: Any  # whose memory it is

    def offsets_of(self, num_bytes: Sequence[int]) -> list[int]:
        """Byte offset of each part, if they have so many bytes."""
        if self.offsets is not None:
            return list(self.offsets)
        return [sum(num_bytes[:rank]) for rank in range(len(num_bytes))]


def parts_of(tensors: Tensors) -> Parts:
    """The parts in a contiguous tensor, or those that are the contiguous tensors of a list."""
    if isinstance(tensors, torch.Tensor):
        return Parts(tensors.data_ptr(), None, tensors.nbytes, tensors)
    # an empty part may have any address, 0 included: it takes the one at which it would lie side by side
    base = min((part.data_ptr() for part in tensors if part.nbytes), default=0)
    offsets, end = [], 0
    for part in tensors:
        offsets.append(part.data_ptr() - base if part.nbytes else end)
        end = offsets[-1] + part.nbytes
    found = Parts(base, tuple(offsets), sum(part.nbytes for part in tensors), tensors)
    dense = found._replace(offsets=None)
    return dense if dense.offsets_of([part.nbytes for part in tensors]) == offsets else found


def check_parts(
    where: str, name: str, tensors: Sequence[torch.Tensor], size: int, device: torch.device, *, alike: bool
) -> list[torch.Tensor]:
    """Dense tensors on the device, one per rank, of one dtype and, if `alike`, of one shape; or an error."""
    if not isinstance(tensors, (list, tuple)) or len(tensors) != size:
        got = f"{len(tensors)} tensors" if isinstance(tensors, (list, tuple)) else type(tensors).__name__
        raise ConfigError(f"{where}: argument `{name}`: wanted a tensor, or a list of {size} of them, got {got}")
    parts = [check_tensor(where, f"{name}[{rank}]", part, device) for rank, part in enumerate(tensors)]
    if len({(part.dtype, part.shape if alike else None) for part in parts}) > 1:
        got = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in parts)
        raise ConfigError(f"{where}: argument `{name}`: wanted one dtype{' and shape' * alike} for all, got {got}")
    return parts


def check_whole(where: str, name: str, tensors: Any) -> Any:
    """What plans work on: one tensor (or None), not a list."""
    if isinstance(tensors, Sequence):
        wanted = f"wanted one tensor where there is an `algorithm`, got {len(tensors)}"
        raise ConfigError(f"{where}: argument `{name}`: {wanted}")
    return tensors


def check_out_parts(
    where: str, out: Sequence[torch.Tensor], size: int, shape: Sequence[int], like: torch.Tensor
) -> None:
    """Raises unless `out` is `size` tensors that fit, one per rank."""
    check_parts(where, "out", out, size, like.device, alike=False)
    for rank, part in enumerate(out):
        check_out(f"{where} from rank {rank}", part, shape, like)
