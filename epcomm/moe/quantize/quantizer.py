"""What the formats of quantised dispatch have in common.

Each is defined in torch by ``quantized``, bit by bit. ``kernels/cpu/quantize_rows.py`` makes the same bits of a row,
``kernels/gpu/quantized_rows.py`` those of `Float8`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

#: what can be quantised
X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Quantizer(ABC):
    """A format for rows that travel: codes, and a scale for each `block` columns of a row.

    Subclasses are frozen dataclasses. Their ``repr`` is part of what ranks compare before they exchange rows, so it
    names every option that changes a bit of the codes, of the scales or of what they mean.
    """

    block: int

    @property
    @abstractmethod
    def form(self) -> str:
        """Names the kernels that quantise rows so: `quantize_row(dtype, form)`."""

    @property
    def kernel_argument(self) -> int:
        """What those kernels take besides the row."""
        return 0

    @abstractmethod
    def result_like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors without memory, of the dtypes and shapes of what `quantized` makes of x."""

    @abstractmethod
    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of x [num_tokens, hidden] of bfloat16, float16 or float32, both contiguous."""

    def delivered(self, scales: torch.Tensor) -> torch.Tensor:
        """The scales that a dispatch delivered, [..., rows, width], as its caller wants them."""
        return scales

    def in_rows(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales that lie as `delivered` has them, row by row; what lies otherwise is returned as it is."""
        return scales

    def dequantized(
        self, rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32, hidden: int | None = None
    ) -> torch.Tensor:
        """The numbers that codes and scales stand for, as experts that compute in another format want them.

        Args:
            rows, scales: [..., width of each], such as ``received.x``.
            dtype: of the result. They are computed in float32; the largest float32s may have been rounded up to 2^128,
                which is infinite there.
            hidden: how many columns there are. Needed only where the codes don't tell, because they fill whole bytes.

        Returns: [..., hidden].
        """
        numbers = self._numbers(rows)[..., :hidden]
        return (numbers * per_column(self._factors(scales), self.block, numbers.shape[-1])).to(dtype)

    def error_bound(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """What code * scale is at most off by, in exact arithmetic, for each finite number of x: float64.

        Args:
            x: what was quantised.
            scales: what ``quantized(x)`` returned beside the codes.
        """
        return self._bound(x.double().abs(), per_column(self._factors(scales).double(), self.block, x.shape[-1]))

    @abstractmethod
    def _numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 numbers of codes, [..., columns]."""

    @abstractmethod
    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        """What each block's numbers are multiplied by: float32 [..., at least as many as there are blocks]."""

    @abstractmethod
    def _bound(self, magnitudes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """`error_bound` of numbers of these magnitudes in blocks with these factors, both float64."""


def num_blocks(hidden: int, block: int) -> int:
    return -(-hidden // block)


def in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [num_tokens, blocks, block] of x [num_tokens, hidden], with zeros behind the last column."""
    num_tokens, hidden = x.shape
    width = num_blocks(hidden, block) * block
    padded = torch.nn.functional.pad(x.detach().float(), (0, width - hidden))
    return padded.reshape(num_tokens, width // block, block)


def largest_finite(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(each block's largest finite magnitude, 0 if it has none; which values are finite, or None if all are)."""
    amax = values.abs().amax(dim=-1)
    if amax.isfinite().all():
        return amax, None
    is_finite = values.isfinite()
    return values.abs().masked_fill_(~is_finite, 0).amax(dim=-1), is_finite


def per_column(per_block: torch.Tensor, block: int, hidden: int) -> torch.Tensor:
    """[..., hidden] of what is the same in each block."""
    return per_block.repeat_interleave(block, dim=-1)[..., :hidden]
