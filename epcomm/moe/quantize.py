"""Quantised dispatch: rows travel as float8 with a scale per 128 columns. What the numbers are, in torch.

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

BLOCK = 128  # as DeepEP, and as the GEMMs take it that are written for DeepSeek-V3's checkpoints
LARGEST = 448.0  # of float8_e4m3fn
SMALLEST_SCALE = 2.0**-126
X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_EXPONENT_BITS, _BELOW_EXPONENT = 0x7F800000, 0x007FFFFF  # of float32


@dataclass(frozen=True)
class Float8:
    """How `dispatch` quantises: to float8_e4m3fn, with a scale per `block` columns of each row.

    Args:
        block: 128; there is no other size yet.
        round_scales_to_power_of_two: scales are powers of two, so that multiplying by them is exact.
        packed_ue8m0: scales are their 8 exponent bits (UE8M0: byte b is 2^(b - 127)), four to an int32, the first block
            in the lowest byte; bytes past the last block are 0. Needs `round_scales_to_power_of_two`.

    Raises:
        ConfigError: an option isn't one of these.
    """

    block: int = BLOCK
    round_scales_to_power_of_two: bool = False
    packed_ue8m0: bool = False

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

    @property
    def scales(self) -> str:
        """What the scales are: "float32", "power_of_two" or "packed"."""
        return "packed" if self.packed_ue8m0 else "power_of_two" if self.round_scales_to_power_of_two else "float32"

    def result_like(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors without memory, of the dtypes and shapes of what `quantized` makes of x."""
        num_tokens, hidden = x.shape
        num_blocks = -(-hidden // BLOCK)
        width, dtype = (-(-num_blocks // 4), torch.int32) if self.packed_ue8m0 else (num_blocks, torch.float32)
        codes = torch.empty(num_tokens, hidden, dtype=torch.float8_e4m3fn, device="meta")
        return codes, torch.empty(num_tokens, width, dtype=dtype, device="meta")

    def quantized(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, quantised.

        Args:
            x: [num_tokens, hidden] of bfloat16, float16 or float32.

        Returns: float8_e4m3fn [num_tokens, hidden], and scales: float32 [num_tokens, ceil(hidden / 128)], or packed
        int32 [num_tokens, ceil(ceil(hidden / 128) / 4)]. Both contiguous.
        """
        hidden = x.shape[1]
        values = _in_blocks(x.detach().float())
        amax = values.abs().amax(dim=-1)
        is_finite = None
        if not amax.isfinite().all():
            is_finite = values.isfinite()
            amax = values.abs().masked_fill_(~is_finite, 0).amax(dim=-1)
        scales = _scales(amax, self.round_scales_to_power_of_two)
        codes = (values / scales[..., None]).clamp_(-LARGEST, LARGEST)
        if is_finite is not None:
            codes.masked_fill_(~is_finite, torch.nan)
        rows = codes.to(torch.float8_e4m3fn).flatten(1)[:, :hidden].contiguous()
        return rows, _packed(scales) if self.packed_ue8m0 else scales

    def dequantized(
        self, rows: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """rows * scales, as experts that compute in another format want them: of `dtype`, [..., hidden].

        Args:
            rows, scales: [..., hidden] and [..., blocks or words], such as ``received.x``.
        """
        if self.packed_ue8m0:
            scales = _unpacked(scales)
        hidden = rows.shape[-1]
        factors = scales.repeat_interleave(BLOCK, dim=-1)[..., :hidden]
        return (rows.float() * factors).to(dtype)


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, blocks, 128] of x [num_tokens, hidden], with zeros behind the last column."""
    num_tokens, hidden = x.shape
    num_blocks = -(-hidden // BLOCK)
    return torch.nn.functional.pad(x, (0, num_blocks * BLOCK - hidden)).reshape(num_tokens, num_blocks, BLOCK)


def _scales(amax: torch.Tensor, round_to_power_of_two: bool) -> torch.Tensor:
    """float32 scales of blocks whose largest magnitudes these are."""
    # by a tensor: torch divides by a number on a GPU by multiplying with its reciprocal
    scales = (amax / torch.full_like(amax, LARGEST)).clamp_(min=SMALLEST_SCALE)
    if round_to_power_of_two:
        scales = ((scales.view(torch.int32) + _BELOW_EXPONENT) & _EXPONENT_BITS).view(torch.float32)
    return scales.masked_fill_(amax == 0, 1.0)


def _packed(scales: torch.Tensor) -> torch.Tensor:
    """int32 [num_tokens, ceil(blocks / 4)] of powers of two [num_tokens, blocks]."""
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    return torch.nn.functional.pad(exponents, (0, -scales.shape[-1] % 4)).view(torch.int32)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """float32 [..., 4 * words]: the powers of two, 0 where a byte is 0."""
    exponents = words.contiguous().view(torch.uint8)
    return (exponents.int() << 23).view(torch.float32)
