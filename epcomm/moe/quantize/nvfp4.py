"""`NVFP4`: float4 (e2m1) with a float8 scale per 16 columns, and one float32 scale for everything.

e2m1 has 2 bits of exponent and 1 of mantissa; codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and 8 to 15 the same with
the sign set. Per token and block of 16 columns (the last may be partial), all in float32, g being `global_scale`:

    amax   the largest finite magnitude in the block
    scale  amax * (1 / (6 * g)), at least 2^-8 and at most 448, to the nearest float8_e4m3fn (ties to even)
    code   x * (1 / (scale * g)), to the nearest float4 (ties to even), at most 6 in magnitude

so that x is about code * scale * g. Two codes share a byte, the first column in the low half; the high half of an odd
row's last byte is 0. No scale is 0 or NaN: a block of zeros has codes of 0 and the scale 2^-8.

float4 has neither infinities nor NaN: inf and -inf become 6 and -6, NaN becomes 6 (as in PTX's conversion with
``.satfinite``), and they leave the scale and the other columns of their block alone. So they can't be told from a
block's largest number: look for them before dispatch.

**The global scale** carries the range that an e4m3fn scale lacks: with g = 1 numbers from about 2^-9 to 2688 = 6 * 448
are in reach. It is usually the largest magnitude that is expected, divided by 2688; other libraries take its reciprocal
as the input's global scale. It is an option, not computed per call, because it has to be the same for all rows, on all
ranks: they compare it as they compare the other options, and a receiver knows it without being told.

**Error.** The nearest e2m1 is off by at most 1/5 of a number from 1.25 to 6 (5 becomes 4), and 1/4 below. Scales are
rounded, too: where one came out smaller than amax / (6 g), by at most 1/17 of that from 2^-6 on and by at most 1/5 from
2^-8 on, the block's largest numbers are clamped, by no more than 1/5 of themselves. If amax is above 2688 g, all that
exceeds 2688 g is lost. For finite x therefore

    |code * scale * g - x| <= (1 + 2^-19) max(|x| / 5, scale * g / 4, |x| - 2688 g)

where 2^-19 is room for what float32 rounds: three times 2^-24 in x * (1 / (scale * g)), which a tie's neighbour may
take to the farther float4, and three times in the scale.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import torch

from epcomm.errors import ConfigError
from epcomm.moe.quantize import e4m3
from epcomm.moe.quantize.quantizer import Quantizer, in_blocks, largest_finite, num_blocks

LARGEST = 6.0
SMALLEST_SCALE = 2.0**-8
#: with these `scale * g`, `6 * g` and their reciprocals are normal float32s
GLOBAL_SCALES = (2.0**-118, 2.0**116)

_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: the middles of neighbours; whether they go up, to the even code
_MIDDLES = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


@dataclass(frozen=True)
class NVFP4(Quantizer):
    """How `dispatch` quantises: to float4, two to a byte, with a float8 scale per 16 columns of each row.

    Args:
        global_scale: what all numbers are multiplied by on top of their block's scale; it is rounded to float32. A
            handle prepares a dispatch for each value, so take one for a layer, not one for a call.

    Raises:
        ConfigError: `global_scale` isn't a number from 2^-118 to 2^116.
    """

    global_scale: float = 1.0
    block: int = field(default=16, init=False)

    def __post_init__(self) -> None:
        scale, (least, most) = self.global_scale, GLOBAL_SCALES
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not least <= scale <= most:
            raise ConfigError(f"NVFP4: argument `global_scale`: wanted a number from {least} to {most}, got {scale!r}")
        object.__setattr__(self, "global_scale", struct.unpack("<f", struct.pack("<f", scale))[0])

    @property
    def form(self) -> str:
        return "nvfp4"

    @property
    def kernel_argument(self) -> int:
        """The bits of the global scale."""
        return struct.unpack("<i", struct.pack("<f", self.global_scale))[0]

    def result_like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, hidden = x.shape
        codes = torch.empty(num_tokens, -(-hidden // 2), dtype=torch.uint8, device="meta")
        blocks = num_blocks(hidden, self.block)
        return codes, torch.empty(num_tokens, blocks, dtype=torch.float8_e4m3fn, device="meta")

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [num_tokens, ceil(hidden / 2)], and scales: float8_e4m3fn [num_tokens, ceil(hidden / 16)].

        ``codes.view(torch.float4_e2m1fn_x2)`` are the codes in torch's type for them.
        """
        values = in_blocks(x, self.block)
        amax, _ = largest_finite(values)
        global_scale = torch.full_like(amax, self.global_scale)
        wanted = amax * torch.ones_like(amax).div_(global_scale * LARGEST)
        scales = wanted.clamp_(SMALLEST_SCALE, e4m3.LARGEST).to(torch.float8_e4m3fn)
        reciprocals = torch.ones_like(amax).div_(scales.float() * global_scale)
        codes = _codes(values, reciprocals[..., None]).flatten(1)
        codes = codes[:, : x.shape[1] + x.shape[1] % 2]  # what is behind an odd row's end is +0
        return codes[:, 0::2] | codes[:, 1::2] << 4, scales

    def _numbers(self, rows: torch.Tensor) -> torch.Tensor:
        signed = [*_NUMBERS, *(-number for number in _NUMBERS)]
        table = torch.tensor(signed, dtype=torch.float32, device=rows.device)
        return table[torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2).int()]

    def _factors(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.float() * self.global_scale

    def _bound(self, magnitudes: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        lost = magnitudes - LARGEST * e4m3.LARGEST * self.global_scale
        return torch.maximum(torch.maximum(magnitudes / 5, factors / 4), lost) * (1 + 2.0**-19)


def _codes(values: torch.Tensor, reciprocals: torch.Tensor) -> torch.Tensor:
    """uint8 codes of the float4 nearest to values * reciprocals; 6 for NaN."""
    magnitudes = (values.abs() * reciprocals).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for middle, goes_up in _MIDDLES:
        codes += magnitudes >= middle if goes_up else magnitudes > middle
    return codes | ((values.signbit() & ~values.isnan()).to(torch.uint8) << 3)
