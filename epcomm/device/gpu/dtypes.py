"""Triton's names of torch's dtypes."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl


def triton_dtype(dtype: torch.dtype) -> Any:
    """The Triton dtype whose values are those of `dtype`."""
    name = str(dtype).removeprefix("torch.")
    return getattr(tl, {"bool": "int1"}.get(name, name))
