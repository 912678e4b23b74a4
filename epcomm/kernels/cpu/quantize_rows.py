"""A row of 16- or 32-bit floats, quantised: codes and scales, the bits that ``moe/quantize/`` defines in torch.

128 columns at a time are read twice: their blocks' largest magnitudes become scales, then their quotients are rounded
to codes by integer arithmetic, on vectors of 64 bytes all the way. A block's scale is computed in every lane that holds
one of its columns, so it never leaves the vectors. The second reading follows the first by some steps: each column's
chain of dependent instructions is as long as a step, and a CPU looks ahead little further than that.

The quick way is for numbers that are all finite, in blocks whose largest is not so small that a quotient's remainder
could underflow. A chunk that turns out to have others is done again, the careful way.

Where a row ends within 128 columns, the rest is quantised in a padded copy: zeros change no scale.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from epcomm.device import control
from epcomm.device.cpu.arithmetic import (
    FORMATS,
    Format,
    Values,
    I16,
    call_intrinsic,
    constant_like,
    convert,
    shuffle,
    vector_of,
    with_element,
)
from epcomm.device.cpu.compile import Kernel, kernel
from epcomm.device.cpu.memory import F32, I8, I32, I64, VECTOR_BYTES, copy_bytes, pointer, zero_bytes
from epcomm.kernels.cpu.quantize_forms import (
    FORMS,
    INFINITY,
    MAGNITUDE,
    Form,
    as_floats,
    as_ints,
    mask_bits,
    merge,
    quotients_of,
)

#: ``int64 f(int64 source, int64 codes, int64 scales, int64 num_columns, int64 argument)``
QUANTIZE_ROW_SIGNATURE = types.int64(*[types.int64] * 5)

_STEP = 128  # columns at a time: a multiple of all blocks, and whole vectors of all dtypes
_CHUNK = 8  # steps between the readings of a column: a row takes half the time that it does with one
_LANES = VECTOR_BYTES // 4
_PAIRS = FORMATS[torch.bfloat16]  # what is computed with: vectors of even and of odd columns, in turns
_LEAST_LARGEST = (127 - 60) << 23  # 2^-60, as a float32: of a block the quick way, if it isn't all zeros


def _passes(source: Format, form: Form, quick: bool) -> tuple[Any, Any]:
    """Two intrinsics that quantise 128 columns: the first finds scales and, of each group of vectors, factors.

    If `quick` it returns 1 where that is right, else 0; what it has stored is of no use then.
    """
    group_vectors = max(2, form.block // _LANES)
    block_lanes = min(_LANES, form.block // 2)
    group_code_bytes = group_vectors * _LANES * form.code_bits // 8
    stored_scale = ir.IntType(8 * form.scale_bytes)

    def load_groups(builder: Any, row: Any) -> list[Values]:
        values: Values = []
        for at in range(0, _STEP * source.item_bytes, VECTOR_BYTES):
            values += source.load(builder, builder.add(row, I64(at)), vector=True)
        bits = [as_ints(builder, value) for value in convert(builder, values, source, _PAIRS)]
        return [bits[first : first + group_vectors] for first in range(0, len(bits), group_vectors)]

    def largest_of_groups(builder: Any, row: Any) -> Values:
        if not quick:
            return [_largest_finite(builder, group, block_lanes) for group in load_groups(builder, row)]
        if source is not _PAIRS:
            groups = [[mask_bits(builder, bits, MAGNITUDE) for bits in group] for group in load_groups(builder, row)]
            return [_largest(builder, group, block_lanes) for group in groups]
        result = []
        for first in range(0, _STEP // _LANES, group_vectors):  # 16 bits at a time
            at = range(first * _LANES * 2, (first + group_vectors) * _LANES * 2, VECTOR_BYTES)
            items = [builder.load(pointer(builder, builder.add(row, I64(byte)), vector_of(I16)), align=1) for byte in at]
            largest = _maximum(builder, [mask_bits(builder, item, MAGNITUDE >> 16) for item in items])
            pairs = builder.bitcast(largest, vector_of(I32))
            halves = [builder.shl(pairs, constant_like(pairs, 16)), mask_bits(builder, pairs, 0xFFFF << 16)]
            result.append(_largest(builder, halves, block_lanes))
        return result

    @intrinsic
    def scale(typingctx, row, scales, factors, argument):
        def codegen(context, builder, signature, args):
            row, scales, factors, argument = args
            lanes = range(0, _LANES, block_lanes)
            are_fine = []
            for number, largest in enumerate(largest_of_groups(builder, row)):
                are_fine.append(_is_fine(builder, largest, form.divides))
                computed, factor = form.scale(builder, largest, argument)
                _store(builder, factor, builder.add(factors, I64(number * VECTOR_BYTES)))
                if quick and form.divides:
                    reciprocal = builder.fdiv(constant_like(factor, 1.0), factor)
                    _store(builder, reciprocal, builder.add(factors, I64(_FACTOR_BYTES // 2 + number * VECTOR_BYTES)))
                for index, lane in enumerate(lanes, number * len(lanes)):
                    item = builder.extract_element(computed, I32(lane))
                    item = builder.trunc(item, stored_scale) if form.scale_bytes < 4 else item
                    _store(builder, item, builder.add(scales, I64(index * form.scale_bytes)))
            is_fine = functools.reduce(builder.and_, are_fine)
            return builder.zext(_all(builder, is_fine), I64)

        return types.int64(*[types.int64] * 4), codegen

    @intrinsic
    def encode(typingctx, row, codes, factors):
        def codegen(context, builder, signature, args):
            row, codes, factors = args
            for number, group in enumerate(load_groups(builder, row)):
                at = builder.add(factors, I64(number * VECTOR_BYTES))
                factor = builder.load(pointer(builder, at, vector_of(F32)), align=1)
                if quick and form.divides:
                    at = builder.add(factors, I64(_FACTOR_BYTES // 2 + number * VECTOR_BYTES))
                    reciprocal = builder.load(pointer(builder, at, vector_of(F32)), align=1)
                encoded = []
                for bits in group:
                    magnitudes = mask_bits(builder, bits, MAGNITUDE)
                    if quick:
                        values = as_floats(builder, magnitudes)
                        if form.divides:
                            quotients = quotients_of(builder, values, factor, reciprocal)
                        else:
                            quotients = builder.fmul(values, factor)
                        encoded.append(form.encode_finite(builder, quotients))
                        continue
                    divide = builder.fdiv if form.divides else builder.fmul
                    quotients = divide(as_floats(builder, magnitudes), factor)
                    encoded.append(form.encode(builder, bits, magnitudes, quotients))
                at = builder.add(codes, I64(number * group_code_bytes))
                if quick:
                    _store_signed_codes(builder, encoded, group, at, form.code_bits)
                else:
                    _store_codes(builder, encoded, at, form.code_bits)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return scale, encode


def _largest_finite(builder: Any, group: Values, block_lanes: int) -> Any:
    """In each lane, the bits of the largest finite magnitude of the block of `block_lanes` lanes that it is in."""
    zero, infinity = constant_like(group[0], 0), constant_like(group[0], INFINITY)
    values = [mask_bits(builder, bits, MAGNITUDE) for bits in group]
    values = [builder.select(builder.icmp_unsigned("<", each, infinity), each, zero) for each in values]
    return _largest(builder, values, block_lanes)


def _maximum(builder: Any, values: Values) -> Any:
    """Of vectors, lane by lane; there are 2^n."""
    while len(values) > 1:
        values = [call_intrinsic(builder, "umax", *pair) for pair in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _largest(builder: Any, magnitudes: Values, block_lanes: int) -> Any:
    """In each lane, the largest of the block of `block_lanes` lanes that it is in."""
    largest = _maximum(builder, magnitudes)
    distance = block_lanes // 2
    while distance:
        partners = shuffle(builder, largest, largest, [lane ^ distance for lane in range(_LANES)])
        largest = call_intrinsic(builder, "umax", largest, partners)
        distance //= 2
    return largest


def _is_fine(builder: Any, largest: Any, divides: bool) -> Any:
    """Whether what has these largest magnitudes can be done the quick way."""
    least = _LEAST_LARGEST if divides else 0
    above = builder.sub(largest, constant_like(largest, least))
    is_fine = builder.icmp_unsigned("<", above, constant_like(largest, INFINITY - least))
    if divides:
        is_fine = builder.or_(is_fine, builder.icmp_unsigned("==", largest, constant_like(largest, 0)))
    return is_fine


def _all(builder: Any, flags: Any) -> Any:
    """Whether all elements of a vector of i1 are set."""
    bits = builder.bitcast(flags, ir.IntType(flags.type.count))
    return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, -1))


def _store_signed_codes(builder: Any, codes: Values, bits: Values, address: Any, code_bits: int) -> None:
    """`_store_codes` of codes without signs, which are those of the numbers with these bits."""
    half = 16
    for index, (even, odd) in enumerate(zip(codes[::2], codes[1::2], strict=True)):
        pairs = merge(builder, 0xFFFF, even, builder.shl(odd, constant_like(odd, half)))
        numbers = merge(builder, 0xFFFF, builder.lshr(bits[2 * index], constant_like(even, half)), bits[2 * index + 1])
        signs = builder.lshr(numbers, constant_like(numbers, half - code_bits))
        sign = 1 << (code_bits - 1)
        pairs = merge(builder, sign | sign << half, signs, pairs)
        if code_bits == 8:
            items = builder.bitcast(pairs, ir.VectorType(I16, 2 * _LANES))
            packed = builder.trunc(items, ir.VectorType(I8, 2 * _LANES))
        else:
            pairs = merge(builder, (1 << code_bits) - 1, pairs, builder.lshr(pairs, constant_like(pairs, half - code_bits)))
            packed = builder.trunc(pairs, ir.VectorType(I8, _LANES))
        _store(builder, packed, builder.add(address, I64(index * _LANES * 2 * code_bits // 8)))


def _store_codes(builder: Any, codes: Values, address: Any, code_bits: int) -> None:
    """Stores codes (the lowest bits of int32s) in the order of their columns, without gaps."""
    code_pair = ir.IntType(2 * code_bits)
    for index, (even, odd) in enumerate(zip(codes[::2], codes[1::2], strict=True)):
        pairs = merge(builder, (1 << code_bits) - 1, even, builder.shl(odd, constant_like(odd, code_bits)))
        at = builder.add(address, I64(index * _LANES * code_pair.width // 8))
        _store(builder, builder.trunc(pairs, with_element(pairs, code_pair)), at)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, pointer(builder, address, value.type), align=1)


# Memory of a call, in bytes: factors of a chunk, at most one per column; the padded copy, its codes and its scales.
_FACTOR_BYTES = 4 * _STEP
_COPY_AT = _CHUNK * _FACTOR_BYTES
_CODES_AT, _SCALES_AT, _SCRATCH_BYTES = _COPY_AT + 4 * _STEP, _COPY_AT + 5 * _STEP, _COPY_AT + 6 * _STEP


@intrinsic
def _scratch(typingctx):
    """The address of `_SCRATCH_BYTES` of this call's, with anything in them."""

    def codegen(context, builder, signature, args):
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(I8, _SCRATCH_BYTES))
        memory.align = VECTOR_BYTES
        return builder.ptrtoint(memory, I64)

    return types.int64(), codegen


@functools.cache
def quantize_row(dtype: torch.dtype, form: str) -> Kernel:
    """The kernel that quantises a row of a dtype in a form: that of ``Quantizer.form``.

    It takes the addresses, of any alignment, of the row, of its codes and of its scales; the number of columns; and
    ``Quantizer.kernel_argument``. It writes exactly a row of what ``Quantizer.result_like`` describes.
    """
    source, layout = FORMATS[dtype], FORMS[form]
    source.check_available()
    scale, encode = _passes(source, layout, quick=False)
    quick_scale, quick_encode = _passes(source, layout, quick=True)
    item_bytes, code_bits, block = source.item_bytes, layout.code_bits, layout.block
    scale_bytes, scales_alignment = layout.scale_bytes, layout.scales_alignment
    step_bytes, step_code_bytes, step_scale_bytes = (
        _STEP * item_bytes,
        _STEP * code_bits // 8,
        _STEP // block * scale_bytes,
    )

    def quantize(row, codes, scales, num_columns, argument):
        factors = _scratch()
        num_steps = num_columns // _STEP
        for first in range(0, num_steps, _CHUNK):
            last = min(first + _CHUNK, num_steps)
            is_fine = 1
            for i in range(first, last):
                to = factors + (i - first) * _FACTOR_BYTES
                is_fine &= quick_scale(row + i * step_bytes, scales + i * step_scale_bytes, to, argument)
            if is_fine:
                for i in range(first, last):
                    to = factors + (i - first) * _FACTOR_BYTES
                    quick_encode(row + i * step_bytes, codes + i * step_code_bytes, to)
            else:
                for i in range(first, last):
                    scale(row + i * step_bytes, scales + i * step_scale_bytes, factors, argument)
                    encode(row + i * step_bytes, codes + i * step_code_bytes, factors)
        left = num_columns - num_steps * _STEP
        if left > 0:
            copy, last_codes, last_scales = factors + _COPY_AT, factors + _CODES_AT, factors + _SCALES_AT
            zero_bytes(copy, step_bytes)
            copy_bytes(copy, row + num_steps * step_bytes, left * item_bytes)
            scale(copy, last_scales, factors, argument)
            encode(copy, last_codes, factors)
            copy_bytes(codes + num_steps * step_code_bytes, last_codes, (left * code_bits + 7) // 8)
            num_bytes = (left + block - 1) // block * scale_bytes
            copy_bytes(scales + num_steps * step_scale_bytes, last_scales, num_bytes)
        if scales_alignment > 1:
            written = (num_columns + block - 1) // block * scale_bytes
            zero_bytes(scales + written, -written % scales_alignment)
        return control.OK

    return kernel(f"quantize_row-{str(dtype).removeprefix('torch.')}-{form}", QUANTIZE_ROW_SIGNATURE)(quantize)
