"""`Float8`: float8_e4m3fn with a scale per 128 columns, as DeepSeek-V3's checkpoints and the GEMMs written for them.

Per token and block of 128 columns (the last may be partial), all in float32:

    amax   the largest finite magnitude in the block
    scale  amax / 448, at least 2^-126; or the next power of two that is not less; 1 if amax is 0
    code   x / scale, to the nearest float8 (ties to even), at most 448 in magnitude

so that x is about code * scale. 448 is the largest number of the format e4m3fn, 2^-126 the smallest normal float32:
with it no scale is 0 or subnormal. A block of zeros has codes of 0 and the scale 1. e4m3fn has no infinities: inf, -inf
and NaN become its NaN, and leave the other columns of their block alone.

**Error.** e4m3fn has 3 bits of mantissa and its normal numbers start at 2^-6; below lie multiples of 2^-9. The nearest
is off by at most half a step: 1/17 of a normal number, and 2^-10 below. For finite x therefore

    |code * scale - x| <= max(2^-4 |x|, (1 + 2^-20) 2^-10 scale)

From 1/17 to 2^-4, and in 2^-20, there is room for what float32 rounds: 2^-24 of x / scale, and a scale that came out
2^-24 too small, for which amax is clipped.

This is what the GPU target's kernels compute too (``kernels/gpu/quantized_rows.py``), bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epcomm.errors import ConfigError
from epcomm.moe.quantize.e4m3 import codes_of, exponents_of, scales_of
from epcomm.moe.quantize.quantizer import Quantizer, in_blocks, largest_finite, num_blocks

BLOCK = 128
_SCALE_LAYOUTS = ("row", "column")
_TMA_BYTES = 16  # what a GPU's tensor memory accelerator wants strides to be multiples of


@dataclass(frozen=True)
class Float8(Quantizer):
    """How `dispatch` quantises: to float8_e4m3fn, with a scale per `block` columns of each row.

    Args:
        block: 128; there is no other size yet.
        round_scales_to_power_of_two: scales are powers of two, so that multiplying by them is exact.
        packed_ue8m0: scales are their 8 exponent bits (UE8M0: byte b is 2^(b - 127)), four to an int32, the first block
            in the lowest byte; bytes past the last block are 0. Needs `round_scales_to_power_of_two`.
        scale_layout: how a result's scales lie in memory: "row" (contiguous), or "column": the same shape and numbers
            as `column_major` lays them out, which is what DeepGEMM reads. They travel row by row in either case, so
            `quantized` gives rows, and "column" costs the receiver a copy of the scales.

    Raises:
        ConfigError: an option isn't one of these.
    """

    block: int = BLOCK
    round_scales_to_power_of_two: bool = False
    packed_ue8m0: bool = False
    scale_layout: str = "row"

    def __post_init__(self) -> None:
        if type(self.block) is not int or self.block != BLOCK:
            raise ConfigError(f"Float8: argument `block`: wanted {BLOCK}, got {self.block!r}")
        for name in ("round_scales_to_power_of_two", "packed_ue8m0"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"Float8: argument `{name}`: wanted True or False, got {getattr(self, name)!r}")
        if self.packed_ue8m0 and not self.round_scales_to_power_of_two:
            raise ConfigError(
                "Float8: argument `packed_ue8m0`: wanted round_scales_to_power_of_two=True with it (an exponent holds "
                "nothing but a power of two), got False"
            )
        if self.scale_layout not in _SCALE_LAYOUTS:
            raise ConfigError(f"Float8: argument `scale_layout`: wanted 'row' or 'column', got {self.scale_layout!r}")

    @property
    def scales(self) -> str:
        """What the scales are: "float32", "power_of_two" or "packed"."""
        return "packed" if self.packed_ue8m0 else "power_of_two" if self.round_scales_to_power_of_two else "float32"

    @property
    def form(self) -> str:
        return self.scales

    def result_like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, hidden = x.shape
        blocks = num_blocks(hidden, BLOCK)
        width, dtype = (-(-blocks // 4), torch.int32) if self.packed_ue8m0 else (blocks, torch.float32)
        codes = torch.empty(num_tokens, hidden, dtype=torch.float8_e4m3fn, device="meta")
        return codes, torch.empty(num_tokens, width, dtype=dtype, device="meta")

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, quantised.

        Args:
            x: [num_tokens, hidden] of bfloat16, float16 or float32.

        Returns: float8_e4m3fn [num_tokens, hidden], and scales: float32 [num_tokens, ceil(hidden / 128)], or packed
        int32 [num_tokens, ceil(ceil(hidden / 128) / 4)]. Both contiguous.
        """
        values = in_blocks(x, BLOCK)
        amax, is_finite = largest_finite(values)
        scales = scales_of(amax, self.round_scales_to_power_of_two)
        codes = codes_of(values, scales, is_finite, x.shape[1])
        return codes, _packed(scales) if self.packed_ue8m0 else scales

    def delivered(self, scales: torch.Tensor) -> torch.Tensor:
        return column_major(scales) if self.scale_layout == "column" else scales

    def in_rows(self, scales: torch.Tensor) -> torch.Tensor:
        if self.scale_layout == "column" and scales.dim() > 1:
            as_delivered = column_major(scales.new_empty(scales.shape, device="meta"))
            if scales.stride() == as_delivered.stride():
                return scales.contiguous()
        return scales

    def _numbers(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float()

    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        return _unpacked(scales) if self.packed_ue8m0 else scales

    def _bound(self, magnitudes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return torch.maximum(magnitudes * 2.0**-4, factors * (2.0**-10 * (1 + 2.0**-20)))


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """A copy of scales [..., rows, width], with the same shape, whose columns are contiguous.

    Strides are 1 along rows and, from a column to the next, the number of rows rounded up to a multiple of 16 bytes, as
    a GPU's tensor memory accelerator loads them (DeepGEMM: "TMA-aligned, column-major"). What lies between the last
    row and the next column is 0. With a leading dimension, of experts, each expert's scales lie so, one after another.
    """
    *leading, rows, width = scales.shape
    items = _TMA_BYTES // scales.element_size()
    columns = scales.new_zeros(*leading, width, -(-rows // items) * items)
    result = columns.mT[..., :rows, :]
    return result.copy_(scales)


def _packed(scales: torch.Tensor) -> torch.Tensor:
    """int32 [num_tokens, ceil(blocks / 4)] of powers of two [num_tokens, blocks]."""
    return torch.nn.functional.pad(exponents_of(scales), (0, -scales.shape[-1] % 4)).view(torch.int32)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """float32 [..., 4 * words]: the powers of two, 0 where a byte is 0."""
    # a copy: a tensor with one column counts as contiguous whatever its stride, but has no view as bytes
    exponents = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return (exponents.int() << 23).view(torch.float32)
