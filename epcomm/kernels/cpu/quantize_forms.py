"""The arithmetic of quantised rows, as IR on vectors of float32: scales of largest magnitudes, codes of quotients.

``moe/quantize/`` defines the numbers. All of it is integer and float32 arithmetic that every CPU has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from epcomm.device.cpu.arithmetic import call_intrinsic, constant_like, splat_like, with_element
from epcomm.device.cpu.memory import F32, I32

# bits of float32s
_MANTISSA_BITS = 23
MAGNITUDE, _EXPONENT, INFINITY = 0x7FFFFFFF, 0x7F800000, 0x7F800000
_ONE = 127 << _MANTISSA_BITS
_SMALLEST_NORMAL = 1 << _MANTISSA_BITS


@dataclass(frozen=True)
class _Element:
    """A small float: what it takes to find the nearest one."""

    mantissa_bits: int
    first_normal: int  # the smallest one, as bits of a float32
    largest: float
    largest_bits: int  # of it as a float32

    @property
    def dropped_bits(self) -> int:
        return _MANTISSA_BITS - self.mantissa_bits


_E4M3 = _Element(3, (127 - 6) << _MANTISSA_BITS, 448.0, (127 + 8) << _MANTISSA_BITS | 6 << 20)
_E2M1 = _Element(1, 127 << _MANTISSA_BITS, 6.0, (127 + 2) << _MANTISSA_BITS | 1 << 22)
_E4M3_NAN = 0x7F
_SMALLEST_E4M3_SCALE = (127 - 8) << _MANTISSA_BITS  # of NVFP4


@dataclass(frozen=True)
class Form:
    """A way to quantise, as emitters of IR."""

    block: int  # columns that share a scale
    code_bits: int
    scale_bytes: int
    #: ``(builder, bits of blocks' largest finite magnitudes, argument) -> (scales as they are stored, factors)``
    scale: Callable[[Any, Any, Any], tuple[Any, Any]]
    #: ``(builder, bits, bits of magnitudes, quotients) -> codes``, as int32s of which the lowest bits are meant
    encode: Callable[[Any, Any, Any, Any], Any]
    #: the same where all numbers are finite, without signs
    encode_finite: Callable[[Any, Any], Any]
    divides: bool = False  # by the factors, instead of multiplying with them
    scales_alignment: int = 1  # a row's bytes of scales are filled up with zeros to a multiple


def _nearest(builder: Any, values: Any, element: _Element) -> tuple[Any, Any]:
    """(codes of the nearest elements to float32 numbers, ties to even; the elements): 0 <= values <= the largest.

    The sum with a power of two that is 2^dropped_bits times the number's own (or the first normal's) has the element's
    step as its last place. What this rounds to counts steps, from 0 for a subnormal, else from 2^mantissa_bits.
    Only the low byte of a code is meant: what the exponent's bias leaves there is added to the power of two, whose own
    is 0.
    """
    dropped = element.dropped_bits
    bias = -(element.first_normal >> dropped) & 0xFF  # even, so ties stay what they are
    powers = mask_bits(builder, as_ints(builder, values), _EXPONENT)
    powers = call_intrinsic(builder, "umax", powers, constant_like(powers, element.first_normal))
    rounders = builder.add(powers, constant_like(powers, (dropped << _MANTISSA_BITS) + bias))
    sums = builder.fadd(values, as_floats(builder, rounders))
    codes = builder.add(as_ints(builder, sums), builder.lshr(powers, constant_like(powers, dropped)))
    return codes, builder.fsub(sums, as_floats(builder, rounders))


def merge(builder: Any, mask: int, inside: Any, outside: Any) -> Any:
    """The bits of `inside` where the mask has ones, else those of `outside`."""
    return builder.or_(mask_bits(builder, inside, mask), mask_bits(builder, outside, ~mask))


def _scale_by_number(builder: Any, largest: Any, argument: Any) -> tuple[Any, Any]:
    """`Float8`: a float32."""
    values = as_floats(builder, largest)
    scales = as_ints(builder, builder.fdiv(values, constant_like(values, _E4M3.largest)))
    scales = call_intrinsic(builder, "umax", scales, constant_like(scales, _SMALLEST_NORMAL))
    scales = _one_if_zero(builder, scales, largest)
    return scales, as_floats(builder, scales)


def _scale_by_power(builder: Any, largest: Any, argument: Any) -> tuple[Any, Any]:
    """`Float8`: a float32 that is a power of two. 448 is 1.75 * 2^8, so a mantissa above 0.75 carries."""
    ceiling = builder.add(largest, constant_like(largest, (1 << 21) - 1))
    powers = mask_bits(builder, ceiling, _EXPONENT)
    eight = 8 << _MANTISSA_BITS
    powers = call_intrinsic(builder, "umax", powers, constant_like(powers, _SMALLEST_NORMAL + eight))
    scales = _one_if_zero(builder, builder.sub(powers, constant_like(powers, eight)), largest)
    return scales, as_floats(builder, builder.sub(constant_like(scales, 2 * _ONE), scales))  # the reciprocals


def _scale_by_exponent(builder: Any, largest: Any, argument: Any) -> tuple[Any, Any]:
    """`Float8` packed and `MXFP8`: UE8M0."""
    scales, factors = _scale_by_power(builder, largest, argument)
    return builder.lshr(scales, constant_like(scales, _MANTISSA_BITS)), factors


def _scale_by_float8(builder: Any, largest: Any, argument: Any) -> tuple[Any, Any]:
    """`NVFP4`: an e4m3, besides the global scale, whose bits are the argument."""
    global_scale = builder.bitcast(builder.trunc(argument, I32), F32)
    one = ir.Constant(F32, 1.0)
    factor = builder.fdiv(one, builder.fmul(global_scale, ir.Constant(F32, _E2M1.largest)))
    wanted = as_ints(builder, builder.fmul(as_floats(builder, largest), splat_like(builder, factor, largest)))
    wanted = call_intrinsic(builder, "umax", wanted, constant_like(wanted, _SMALLEST_E4M3_SCALE))
    wanted = call_intrinsic(builder, "umin", wanted, constant_like(wanted, _E4M3.largest_bits))
    codes, scales = _nearest(builder, as_floats(builder, wanted), _E4M3)
    steps = builder.fmul(scales, splat_like(builder, global_scale, scales))
    return codes, builder.fdiv(constant_like(steps, 1.0), steps)


def quotients_of(builder: Any, values: Any, divisors: Any, reciprocals: Any) -> Any:
    """values / divisors, of whose reciprocals the nearest float32s are known, as exact as the codes need it.

    The remainder of an approximate quotient is exact but for its last bits, so the corrected quotient is the nearest
    float32 to something within 2^-44 of the true one. That it may be another float32 than division gives matters only
    where one is the middle between two codes, and there it isn't (the tests have all such cases). Divisors are from
    2^-72 on, and below 2^120, so that nothing that matters underflows.
    """
    rough = builder.fmul(values, reciprocals)
    remainders = call_intrinsic(builder, "fma", builder.fneg(rough), divisors, values)
    return call_intrinsic(builder, "fma", remainders, reciprocals, rough)


def _encode_finite_float8(builder: Any, quotients: Any) -> Any:
    """No quotient is above 448 by more than a rounding."""
    return _nearest(builder, quotients, _E4M3)[0]


def _encode_float8(builder: Any, bits: Any, magnitudes: Any, quotients: Any) -> Any:
    """e4m3 with the sign; NaN for what isn't finite."""
    codes = _encode_finite_float8(builder, quotients)
    codes = merge(builder, 0x80, builder.lshr(bits, constant_like(bits, 24)), codes)
    is_finite = builder.icmp_unsigned("<", magnitudes, constant_like(magnitudes, INFINITY))
    return builder.select(is_finite, codes, constant_like(codes, _E4M3_NAN))


def _encode_finite_float4(builder: Any, quotients: Any) -> Any:
    quotients = as_ints(builder, quotients)
    quotients = call_intrinsic(builder, "umin", quotients, constant_like(quotients, _E2M1.largest_bits))
    return _nearest(builder, as_floats(builder, quotients), _E2M1)[0]


def _encode_float4(builder: Any, bits: Any, magnitudes: Any, quotients: Any) -> Any:
    """e2m1 with the sign; the largest for what is more, infinite or NaN, whose sign is dropped."""
    codes = _encode_finite_float4(builder, quotients)
    is_number = builder.icmp_unsigned("<=", magnitudes, constant_like(magnitudes, INFINITY))
    signs = builder.select(is_number, builder.lshr(bits, constant_like(bits, 28)), constant_like(bits, 0))
    return merge(builder, 8, signs, codes)


FORMS = {
    "float32": Form(128, 8, 4, _scale_by_number, _encode_float8, _encode_finite_float8, divides=True),
    "power_of_two": Form(128, 8, 4, _scale_by_power, _encode_float8, _encode_finite_float8),
    "packed": Form(128, 8, 1, _scale_by_exponent, _encode_float8, _encode_finite_float8, scales_alignment=4),
    "mxfp8": Form(32, 8, 1, _scale_by_exponent, _encode_float8, _encode_finite_float8),
    "nvfp4": Form(16, 4, 1, _scale_by_float8, _encode_float4, _encode_finite_float4),
}


def as_ints(builder: Any, values: Any) -> Any:
    return builder.bitcast(values, with_element(values, I32))


def as_floats(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, with_element(bits, F32))


def mask_bits(builder: Any, bits: Any, mask: int) -> Any:
    return builder.and_(bits, constant_like(bits, mask))


def _one_if_zero(builder: Any, scales: Any, largest: Any) -> Any:
    is_zero = builder.icmp_unsigned("==", largest, constant_like(largest, 0))
    return builder.select(is_zero, constant_like(scales, _ONE), scales)
