"""Which element-wise reductions and row sums exist, the same on every target."""

from __future__ import annotations

import torch

from epcomm.errors import ConfigError, UnsupportedError

OPS = ("sum", "avg", "min", "max", "prod", "band", "bor", "bxor")
_ARITHMETIC = ("sum", "avg", "min", "max", "prod")

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_AS_UNSIGNED = dict(zip(_SIGNED, _UNSIGNED, strict=True))
_BOOL_OPS = {"sum": "bor", "max": "bor", "bor": "bor", "prod": "band", "min": "band", "band": "band", "bxor": "bxor"}

#: dtypes whose rows combine can sum
ROW_SUM_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
#: and the forms (``Quantizer.form``) of quantised rows
COMBINE_FORMS = ("float32", "power_of_two")


#: what NVLink's switch can reduce in vectors (PTX ISA, multimem.ld_reduce; it divides nothing, the GPU does)
SWITCH_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SWITCH_OPS = ("sum", "avg")


def supported_ops(dtype: torch.dtype) -> tuple[str, ...]:
    """The reductions that exist for a dtype; none for a dtype that can only be moved."""
    if dtype in _FLOATS:
        return _ARITHMETIC
    if dtype in _SIGNED or dtype in _UNSIGNED:
        return OPS
    if dtype is torch.bool:
        return tuple(op for op in OPS if op in _BOOL_OPS)
    return ("sum", "avg") if dtype in _COMPLEX else ()


def canonical_reduction(dtype: torch.dtype, op: str) -> tuple[torch.dtype, str]:
    """The dtype and op whose arithmetic gives the same bits: bool is or and and, complex numbers are two floats.

    Raises ConfigError for an unknown op, UnsupportedError for one that doesn't exist for the dtype.
    """
    if op not in OPS:
        raise ConfigError(f"reduction op must be one of {', '.join(OPS)}; got {op!r}")
    if op not in supported_ops(dtype):
        wanted = ", ".join(supported_ops(dtype)) or "no reductions, only operations that move data"
        raise UnsupportedError(f"{op} of {dtype} is not supported; {dtype} supports {wanted}")
    if dtype in _COMPLEX:
        return _COMPLEX[dtype], op
    if dtype is torch.bool:
        return torch.uint8, _BOOL_OPS[op]
    if dtype in _AS_UNSIGNED and op not in ("avg", "min", "max"):
        return _AS_UNSIGNED[dtype], op
    return dtype, op


def has_finish(op: str) -> bool:
    """True if a reduction does something to what it has accumulated."""
    return op == "avg"


def sum_of(op: str) -> str:
    """The reduction that accumulates what `op` finishes."""
    return "sum" if has_finish(op) else op


def partial_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """The dtype of some ranks' partial results: that of the inputs unless it would round what is rounded later."""
    is_rounded = dtype in (torch.float16, torch.bfloat16) and op not in ("min", "max")
    return torch.float32 if is_rounded else dtype


def partial_scale(dtype: torch.dtype, op: str) -> int:
    """Bytes of some ranks' partial result per byte of an input."""
    return partial_dtype(dtype, op).itemsize // dtype.itemsize


def check_row_sum(*dtypes: torch.dtype) -> None:
    """Raises UnsupportedError unless rows of all these dtypes can be summed."""
    for dtype in dtypes:
        if dtype not in ROW_SUM_DTYPES:
            wanted = ", ".join(str(dtype) for dtype in ROW_SUM_DTYPES)
            raise UnsupportedError(f"weighted sums of rows exist for {wanted}; got {dtype}")
