"""Vectors of numbers that are quantised, as IR: the largest of each block, and codes on their way to memory.

Vectors of even and of odd columns come in turns, as int32s that are the bits of float32s.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from epcomm.device.cpu.arithmetic import I16, Values, call_intrinsic, constant_like, shuffle, vector_of, with_element
from epcomm.device.cpu.memory import I8, I32, I64, VECTOR_BYTES, pointer
from epcomm.kernels.cpu.quantize_forms import INFINITY, MAGNITUDE, mask_bits, merge

LANES = VECTOR_BYTES // 4
LEAST_LARGEST = (127 - 60) << 23  # 2^-60, as a float32: of a block the quick way, if it isn't all zeros


def largest_finite(builder: Any, group: Values, block_lanes: int) -> Any:
    """In each lane, the bits of the largest finite magnitude of the block of `block_lanes` lanes that it is in."""
    zero, infinity = constant_like(group[0], 0), constant_like(group[0], INFINITY)
    values = [mask_bits(builder, bits, MAGNITUDE) for bits in group]
    values = [builder.select(builder.icmp_unsigned("<", each, infinity), each, zero) for each in values]
    return largest_of(builder, values, block_lanes)


def maximum(builder: Any, values: Values) -> Any:
    """Of vectors, lane by lane; there are 2^n."""
    while len(values) > 1:
        values = [call_intrinsic(builder, "umax", *pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def largest_of(builder: Any, magnitudes: Values, block_lanes: int) -> Any:
    """In each lane, the largest of the block of `block_lanes` lanes that it is in."""
    largest = maximum(builder, magnitudes)
    distance = block_lanes // 2
    while distance:
        partners = shuffle(builder, largest, largest, [lane ^ distance for lane in range(LANES)])
        largest = call_intrinsic(builder, "umax", largest, partners)
        distance //= 2
    return largest


def largest_of_bfloat16(builder: Any, address: Any, num_vectors: int, block_lanes: int) -> Any:
    """`largest_of` of so many vectors of 64 bytes, which are compared 16 bits at a time."""
    at = [builder.add(address, I64(offset)) for offset in range(0, num_vectors * VECTOR_BYTES, VECTOR_BYTES)]
    items = [builder.load(pointer(builder, each, vector_of(I16)), align=1) for each in at]
    largest = maximum(builder, [mask_bits(builder, item, MAGNITUDE >> 16) for item in items])
    pairs = builder.bitcast(largest, vector_of(I32))
    halves = [builder.shl(pairs, constant_like(pairs, 16)), mask_bits(builder, pairs, 0xFFFF << 16)]
    return largest_of(builder, halves, block_lanes)


def is_quick(builder: Any, largest: Any, divides: bool) -> Any:
    """Whether what has these largest magnitudes can be done the quick way."""
    least = LEAST_LARGEST if divides else 0
    above = builder.sub(largest, constant_like(largest, least))
    fine = builder.icmp_unsigned("<", above, constant_like(largest, INFINITY - least))
    if divides:
        fine = builder.or_(fine, builder.icmp_unsigned("==", largest, constant_like(largest, 0)))
    return fine


def all_set(builder: Any, flags: Any) -> Any:
    """Whether all elements of a vector of i1 are set."""
    bits = builder.bitcast(flags, ir.IntType(flags.type.count))
    return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, -1))


def store_signed_codes(builder: Any, codes: Values, bits: Values, address: Any, code_bits: int) -> None:
    """`store_codes` of codes without signs, which are those of the numbers with these bits."""
    half = 16
    for index, (even, odd) in enumerate(zip(codes[::2], codes[1::2], strict=True)):
        pairs = merge(builder, 0xFFFF, even, builder.shl(odd, constant_like(odd, half)))
        numbers = merge(builder, 0xFFFF, builder.lshr(bits[2 * index], constant_like(even, half)), bits[2 * index + 1])
        signs = builder.lshr(numbers, constant_like(numbers, half - code_bits))
        sign = 1 << (code_bits - 1)
        pairs = merge(builder, sign | sign << half, signs, pairs)
        if code_bits == 8:
            items = builder.bitcast(pairs, ir.VectorType(I16, 2 * LANES))
            packed = builder.trunc(items, ir.VectorType(I8, 2 * LANES))
        else:
            odd = builder.lshr(pairs, constant_like(pairs, half - code_bits))
            pairs = merge(builder, (1 << code_bits) - 1, pairs, odd)
            packed = builder.trunc(pairs, ir.VectorType(I8, LANES))
        store(builder, packed, builder.add(address, I64(index * LANES * 2 * code_bits // 8)))


def store_codes(builder: Any, codes: Values, address: Any, code_bits: int) -> None:
    """Stores codes (the lowest bits of int32s) in the order of their columns, without gaps."""
    code_pair = ir.IntType(2 * code_bits)
    for index, (even, odd) in enumerate(zip(codes[::2], codes[1::2], strict=True)):
        pairs = merge(builder, (1 << code_bits) - 1, even, builder.shl(odd, constant_like(odd, code_bits)))
        at = builder.add(address, I64(index * LANES * code_pair.width // 8))
        store(builder, builder.trunc(pairs, with_element(pairs, code_pair)), at)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, pointer(builder, address, value.type), align=1)
