"""Numbers of float8_e4m3fn with a float32 scale per block: what `Float8` and `MXFP8` share.

e4m3fn has 4 bits of exponent and 3 of mantissa: normal numbers are 2^-6 to 448, below lie multiples of 2^-9. There are
no infinities, and one NaN per sign.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32: no scale is 0 or subnormal

_EXPONENT_BITS, _BELOW_EXPONENT = 0x7F800000, 0x007FFFFF  # of float32


def scales_of(amax: torch.Tensor, round_to_power_of_two: bool) -> torch.Tensor:
    """float32 scales of blocks whose largest magnitudes these are; 1 where a block has nothing but zeros."""
    # by a tensor: torch divides by a number on a GPU by multiplying with its reciprocal
    scales = (amax / torch.full_like(amax, LARGEST)).clamp_(min=SMALLEST_SCALE)
    if round_to_power_of_two:
        scales = ((scales.view(torch.int32) + _BELOW_EXPONENT) & _EXPONENT_BITS).view(torch.float32)
    return scales.masked_fill_(amax == 0, 1.0)


def exponents_of(scales: torch.Tensor) -> torch.Tensor:
    """The exponent bits of powers of two, as uint8: UE8M0."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def codes_of(values: torch.Tensor, scales: torch.Tensor, is_finite: torch.Tensor | None, hidden: int) -> torch.Tensor:
    """float8_e4m3fn [num_tokens, hidden] nearest to values [num_tokens, blocks, block] divided by their scales."""
    codes = (values / scales[..., None]).clamp_(-LARGEST, LARGEST)
    if is_finite is not None:
        codes.masked_fill_(~is_finite, torch.nan)
    return codes.to(torch.float8_e4m3fn).flatten(1)[:, :hidden].contiguous()
