"""Validation of what users pass to route, dispatch and combine: on the host, before anything is sent."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from epcomm.errors import CapacityError, ConfigError, UnsupportedError
from epcomm.kernels.protocol.arithmetic import COMBINE_FORMS
from epcomm.kernels.protocol.expert_parallel import MAX_TENSORS, quantized_row
from epcomm.moe.quantize import Quantizer

INDEX_DTYPES = (torch.int64, torch.int32)


def describe(tensor: Any) -> str:
    """dtype and shape of a tensor, or the type of something else."""
    if isinstance(tensor, torch.Tensor):
        return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    return type(tensor).__name__


def check_integer(where: str, name: str, value: Any, least: int) -> int:
    """An integer of any type, numpy's included, that is >= `least`."""
    try:
        integer = operator.index(value)
    except TypeError:
        integer = least - 1
    if integer < least:
        raise ConfigError(f"{where}: argument `{name}`: wanted an integer >= {least}, got {value!r}")
    return integer


def as_tuple(where: str, name: str, value: Any) -> tuple[torch.Tensor, ...]:
    """A tensor or tuple of tensors as a tuple of 1 to 16."""
    tensors = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(tensors) <= MAX_TENSORS:
        raise ConfigError(f"{where}: argument `{name}`: wanted 1 to {MAX_TENSORS} tensors, got {len(tensors)}")
    return tensors


def check_indices(
    where: str, topk_idx: Any, device: torch.device, max_tokens: int, max_topk: int
) -> torch.Tensor:
    """[num_tokens, topk] int32 or int64 on the device, contiguous."""
    if (
        not isinstance(topk_idx, torch.Tensor)
        or topk_idx.dim() != 2
        or topk_idx.dtype not in INDEX_DTYPES
        or topk_idx.device != device
    ):
        raise ConfigError(
            f"{where}: argument `topk_idx`: wanted int32 or int64 [num_tokens, topk] on {device}, got "
            f"{describe(topk_idx)}"
        )
    num_tokens, topk = topk_idx.shape
    if num_tokens > max_tokens:
        raise CapacityError(f"{where}: argument `topk_idx`: wanted at most max_tokens={max_tokens}, got {num_tokens}")
    if topk > max_topk:
        raise CapacityError(f"{where}: argument `topk_idx`: wanted at most topk={max_topk} per token, got {topk}")
    return topk_idx.contiguous()


def check_rows(
    where: str,
    name: str,
    tensor: Any,
    device: torch.device,
    leading: Sequence[int],
    dtypes: Sequence[torch.dtype] | None = None,
) -> torch.Tensor:
    """[*leading, any width >= 1] on the device, as rows at one stride: [rows, width], copied if they don't lie so."""
    wanted_dtype = "any dtype" if dtypes is None else " or ".join(str(dtype) for dtype in dtypes)
    if (
        not isinstance(tensor, torch.Tensor)
        or tuple(tensor.shape[:-1]) != tuple(leading)
        or tensor.dim() == 0
        or tensor.shape[-1] < 1
        or tensor.device != device
        or tensor.layout != torch.strided
        or (dtypes is not None and tensor.dtype not in dtypes)
    ):
        shape = ", ".join([*map(str, leading), "hidden"])
        wanted = f"[{shape}] of {wanted_dtype} on {device}"
        raise ConfigError(f"{where}: argument `{name}`: wanted {wanted}, got {describe(tensor)}")
    rows = tensor.detach()
    if rows.dim() != 2:
        rows = rows.reshape(math.prod(leading), rows.shape[-1])
    if rows.is_conj() or rows.is_neg():  # marked to be conjugated or negated by whoever reads them
        rows = rows.resolve_conj().resolve_neg()
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def check_weights(where: str, weights: Any, device: torch.device, num_tokens: int, topk: int) -> torch.Tensor:
    """[num_tokens, topk] of a float dtype on the device, as contiguous float32."""
    if (
        not isinstance(weights, torch.Tensor)
        or tuple(weights.shape) != (num_tokens, topk)
        or not weights.dtype.is_floating_point
        or weights.device != device
    ):
        raise ConfigError(
            f"{where}: argument `topk_weights`: wanted floats [{num_tokens}, {topk}] on {device}, got "
            f"{describe(weights)}"
        )
    return weights if weights.dtype == torch.float32 and weights.is_contiguous() else weights.float().contiguous()


def check_quantizer(where: str, quantize: Any) -> None:
    """One of the formats."""
    if not isinstance(quantize, Quantizer):
        got = f"the class {quantize.__name__}" if isinstance(quantize, type) else type(quantize).__name__
        raise ConfigError(f"{where}: argument `quantize`: wanted None or an epcomm.Float8, MXFP8 or NVFP4, got {got}")


def check_quantized_combine(where: str, y: Any, quantize: Any, bias: Any) -> None:
    """What combine can do with a format."""
    check_quantizer(where, quantize)
    if quantize.form not in COMBINE_FORMS:
        raise UnsupportedError(
            f"{where}: argument `quantize`: wanted Float8() or Float8(round_scales_to_power_of_two=True), whose rows "
            f"combine can sum, got {quantize}"
        )
    if len(y) != 1:
        raise ConfigError(f"{where}: argument `y`: wanted one tensor with quantize, got {len(y)}")
    if bias is not None:
        raise ConfigError(f"{where}: argument `bias`: wanted None with quantize, got one: add it to the result")


def combined_row_bytes(quantize: Quantizer, row: torch.Tensor) -> int:
    """Bytes of a row like this one of a combine that quantises."""
    codes, scales = quantize.result_like(row)
    return quantized_row(codes.shape[-1], scales.shape[-1] * scales.element_size())


def check_row_bytes(
    where: str, name: str, tensors: Sequence[torch.Tensor], most: int, total: int | None = None
) -> None:
    """The rows of all tensors together must fit in a row of the memory that was reserved."""
    if total is None:
        total = sum(tensor.shape[-1] * tensor.element_size() for tensor in tensors)
    if total > most:
        raise CapacityError(
            f"{where}: argument `{name}`: wanted rows of at most {most} bytes together (hidden * dtype of "
            f"expert_parallel), got {total}"
        )


def check_out(
    where: str,
    out: Any,
    device: torch.device,
    shapes: Sequence[tuple[int, ...]],
    default_dtypes: Sequence[torch.dtype],
    dtypes: Sequence[torch.dtype] = (),
) -> tuple[torch.Tensor, ...]:
    """The caller's result tensors if they fit, else an error; new ones if there are none. No `dtypes`: the default."""
    if out is None:
        return tuple(
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, default_dtypes, strict=True)
        )
    outs = as_tuple(where, "out", out)
    if len(outs) != len(shapes):
        raise ConfigError(f"{where}: argument `out`: wanted {len(shapes)} tensors, got {len(outs)}")
    for tensor, shape, default_dtype in zip(outs, shapes, default_dtypes, strict=True):
        allowed = dtypes or (default_dtype,)
        is_strided_rows = isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.stride(1) == 1
        if (
            not isinstance(tensor, torch.Tensor)
            or tuple(tensor.shape) != shape
            or tensor.dtype not in allowed
            or tensor.device != device
            or not (tensor.is_contiguous() or is_strided_rows)
        ):
            names = " or ".join(str(dtype) for dtype in allowed)
            raise ConfigError(
                f"{where}: argument `out`: wanted {shape} of {names} on {device}, rows contiguous, got "
                f"{describe(tensor)}"
            )
    return outs


def check_flat_combine(where: str, has_weights: bool, reduce: bool) -> None:
    """In the flat layout a row is already the sum of a token's weighted expert outputs on that rank."""
    if has_weights:
        raise ConfigError(f"{where}: argument `topk_weights`: wanted None in the flat layout, got some")
    if not reduce:
        raise ConfigError(f"{where}: argument `reduce`: wanted True in the flat layout, got False")


def check_bias(
    where: str, bias: Any, rows: Sequence[torch.Tensor], num_tokens: int, reduce: bool
) -> list[torch.Tensor]:
    """One addend per tensor of y, of its dtype and width."""
    if not reduce:
        raise ConfigError(f"{where}: argument `bias`: wanted None with reduce=False, which adds nothing up; got one")
    biases = as_tuple(where, "bias", bias)
    if len(biases) != len(rows):
        raise ConfigError(f"{where}: argument `bias`: wanted {len(rows)} tensors like y, got {len(biases)}")
    checked = []
    for addend, row in zip(biases, rows, strict=True):
        checked.append(check_rows(where, "bias", addend, row.device, (num_tokens,), (row.dtype,)))
        if addend.shape[1] != row.shape[1]:
            raise ConfigError(f"{where}: argument `bias`: wanted width {row.shape[1]}, got {addend.shape[1]}")
    return checked
