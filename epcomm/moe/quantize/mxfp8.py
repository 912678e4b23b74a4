"""`MXFP8`: float8_e4m3fn with a power of two per 32 columns, of the OCP Microscaling Formats (MX) Specification v1.0.

Per token and block of 32 columns (the last may be partial):

    amax   the largest finite magnitude in the block
    scale  the least power of two that is not less than amax / 448, at least 2^-126; 1 if amax is 0
    code   x / scale, to the nearest float8 (ties to even)

so that x is about code * scale. A scale is stored as its 8 exponent bits (UE8M0): byte b is 2^(b - 127), here always 1
to 247. Read back, byte 0 is 2^-127 and byte 255 NaN, as the specification has it. A block of zeros has codes of 0 and
the byte 127. inf, -inf and NaN become e4m3fn's NaN, and leave the other columns of their block and the scale alone.

**Rounding of scales.** The specification's own conversion (section 6.3) takes the largest power of two not above amax,
divided by 2^8, the largest power of two in e4m3fn. What is then between 448 and 512 times the scale doesn't fit and is
clamped: the largest number of a block may lose an eighth of itself. Here scales are rounded up instead, so that
nothing is clamped. "Recipes for Pre-training LLMs with MXFP8" (arXiv 2506.08027) found that training needs this, and
Transformer Engine does it. The two differ where amax is above 1.75 times a power of two, by a factor of 2.

**Error.** Dividing by a power of two is exact, down to quotients of 2^-126, and no quotient is above 448. What is left
is half a step of e4m3fn: at most 1/17 of a normal number (just above the middle of two, 1 + 1/16), and 2^-10 below
2^-6, where steps are 2^-9. For finite x therefore

    |code * scale - x| <= max(|x| / 17, 2^-10 scale)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from epcomm.moe.quantize.e4m3 import codes_of, exponents_of, scales_of
from epcomm.moe.quantize.quantizer import Quantizer, in_blocks, largest_finite, num_blocks


@dataclass(frozen=True)
class MXFP8(Quantizer):
    """How `dispatch` quantises: to float8_e4m3fn, with the exponent of a power of two per 32 columns of each row.

    ``scales.view(torch.float8_e8m0fnu)`` are the scales in torch's type for them.
    """

    block: int = field(default=32, init=False)

    @property
    def form(self) -> str:
        return "mxfp8"

    def result_like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, hidden = x.shape
        codes = torch.empty(num_tokens, hidden, dtype=torch.float8_e4m3fn, device="meta")
        return codes, torch.empty(num_tokens, num_blocks(hidden, self.block), dtype=torch.uint8, device="meta")

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float8_e4m3fn [num_tokens, hidden], and scales: uint8 [num_tokens, ceil(hidden / 32)]."""
        values = in_blocks(x, self.block)
        amax, is_finite = largest_finite(values)
        scales = scales_of(amax, round_to_power_of_two=True)
        return codes_of(values, scales, is_finite, x.shape[1]), exponents_of(scales)

    def _numbers(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.float()

    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.view(torch.float8_e8m0fnu).float()

    def _bound(self, magnitudes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return torch.maximum(magnitudes / 17, factors * 2.0**-10)
