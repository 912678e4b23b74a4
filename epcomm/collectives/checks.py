"""Validation of what users pass to collectives, before anything is sent. Errors name rank, operation and argument."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from epcomm.errors import ConfigError, UnsupportedError
from epcomm.kernels.protocol.arithmetic import supported_ops
from epcomm.runtime import LONGEST_TIMEOUT


def is_plain(tensor: object, device: torch.device) -> bool:
    """True for what needs no further look: a contiguous tensor on the device whose memory holds the values it shows."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device == device
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_quantized)
    )


def check_tensor(where: str, name: str, tensor: object, device: torch.device) -> torch.Tensor:
    """A strided tensor on the device, or an error."""
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{where}: argument `{name}`: wanted a tensor, got {type(tensor).__name__}")
    if tensor.device != device:
        raise ConfigError(f"{where}: argument `{name}`: wanted a tensor on {device}, got one on {tensor.device}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnsupportedError(f"{where}: argument `{name}`: wanted a dense tensor, got layout {tensor.layout}")
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def check_out(where: str, out: torch.Tensor | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """`out` if it fits, else an error; a new tensor if there is none."""
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    if is_plain(out, like.device) and out.dtype is like.dtype and out.shape == shape:
        return out
    check_tensor(where, "out", out, like.device)
    if out.dtype != like.dtype or tuple(out.shape) != tuple(shape):
        raise ConfigError(
            f"{where}: argument `out`: wanted {like.dtype} {tuple(shape)}, got {out.dtype} {tuple(out.shape)}"
        )
    if not out.is_contiguous() or out.is_conj() or out.is_neg():
        wanted = "wanted a contiguous tensor that is no conjugated or negated view"
        raise ConfigError(f"{where}: argument `out`: {wanted}, got strides {out.stride()}")
    return out


def check_op(where: str, dtype: torch.dtype, op: object) -> None:
    """Refuses a reduction that doesn't exist for the dtype."""
    if op not in supported_ops(dtype):
        raise ConfigError(f"{where}: argument `op`: wanted one of {supported_ops(dtype)} for {dtype}, got {op!r}")


def check_rank(where: str, name: str, rank: int, size: int) -> int:
    """A rank of the communicator, or an error."""
    if not hasattr(rank, "__index__") or not 0 <= operator.index(rank) < size:
        raise ConfigError(f"{where}: argument `{name}`: wanted a rank from 0 to {size - 1}, got {rank!r}")
    return operator.index(rank)


def check_timeout(where: str, timeout: float | None) -> None:
    """None, or a number of seconds."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout <= LONGEST_TIMEOUT):
        raise ConfigError(f"{where}: argument `timeout`: wanted seconds > 0, got {timeout!r}")


def check_divisible(where: str, x: torch.Tensor, size: int) -> int:
    """Rows of dim 0 per rank, or an error."""
    rows = x.shape[0] if x.dim() else None
    if rows is None or rows % size:
        raise ConfigError(f"{where}: argument `x`: wanted a dim 0 that {size} ranks divide, got shape {tuple(x.shape)}")
    return rows // size


def check_splits(where: str, name: str, splits: Sequence[int], rows: int | None, size: int) -> list[int]:
    """`size` row counts >= 0 that sum to `rows` (if given), or an error."""
    try:
        values = [operator.index(value) for value in splits]
    except TypeError:
        raise ConfigError(f"{where}: argument `{name}`: wanted {size} integers, got {splits!r}") from None
    if len(values) != size or min(values, default=0) < 0 or (rows is not None and sum(values) != rows):
        total = "" if rows is None else f" that sum to {rows}"
        raise ConfigError(f"{where}: argument `{name}`: wanted {size} counts >= 0{total}, got {values}")
    return values


def check_overlap(where: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Refuses an `out` that shares memory with `x`, where an operation can't work in place."""
    x_end, out_end = x.data_ptr() + x.numel() * x.element_size(), out.data_ptr() + out.numel() * out.element_size()
    if x.data_ptr() < out_end and out.data_ptr() < x_end:
        raise ConfigError(f"{where}: argument `out`: shares memory with `x`, and this operation can't work in place")
