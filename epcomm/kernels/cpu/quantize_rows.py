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
    constant_like,
    convert,
    vector_of,
)
from epcomm.device.cpu.compile import Kernel, kernel
from epcomm.device.cpu.memory import F32, I8, I32, I64, VECTOR_BYTES, copy_bytes, pointer, prefetch, zero_bytes
from epcomm.kernels.cpu.quantize_forms import (
    FORMS,
    MAGNITUDE,
    Form,
    as_floats,
    as_ints,
    mask_bits,
    quotients_of,
)
from epcomm.kernels.cpu.quantize_vectors import (
    LANES,
    all_set,
    is_quick,
    largest_finite,
    largest_of,
    largest_of_bfloat16,
    store,
    store_codes,
    store_signed_codes,
)

#: ``int64 f(int64 source, int64 codes, int64 scales, int64 num_columns, int64 argument)``
QUANTIZE_ROW_SIGNATURE = types.int64(*[types.int64] * 5)

_STEP = 128  # columns at a time: a multiple of all blocks, and whole vectors of all dtypes
_CHUNK = 8  # steps between the readings of a column: a row takes half the time that it does with one
#: fetched ahead of the first reading, into the row that comes next: hardware stops at each page's end
_PREFETCH_BYTES = 8192
_PAIRS = FORMATS[torch.bfloat16]  # what is computed with: vectors of even and of odd columns, in turns


def _passes(source: Format, form: Form, quick: bool) -> tuple[Any, Any]:
    """Two intrinsics that quantise 128 columns: the first finds scales and, of each group of vectors, factors.

    If `quick` it returns 1 where that is right, else 0; what it has stored is of no use then.
    """
    group_vectors = max(2, form.block // LANES)
    block_lanes = min(LANES, form.block // 2)
    group_code_bytes = group_vectors * LANES * form.code_bits // 8
    stored_scale = ir.IntType(8 * form.scale_bytes)

    def load_groups(builder: Any, row: Any) -> list[Values]:
        values: Values = []
        for at in range(0, _STEP * source.item_bytes, VECTOR_BYTES):
            values += source.load(builder, builder.add(row, I64(at)), vector=True)
        bits = [as_ints(builder, value) for value in convert(builder, values, source, _PAIRS)]
        return [bits[first : first + group_vectors] for first in range(0, len(bits), group_vectors)]

    def largest_of_groups(builder: Any, row: Any) -> Values:
        if quick and source is _PAIRS:
            num_vectors = group_vectors // 2
            at = range(0, _STEP * source.item_bytes, num_vectors * VECTOR_BYTES)
            addresses = [builder.add(row, I64(offset)) for offset in at]
            return [largest_of_bfloat16(builder, each, num_vectors, block_lanes) for each in addresses]
        groups = load_groups(builder, row)
        if not quick:
            return [largest_finite(builder, group, block_lanes) for group in groups]
        magnitudes = [[mask_bits(builder, bits, MAGNITUDE) for bits in group] for group in groups]
        return [largest_of(builder, group, block_lanes) for group in magnitudes]

    @intrinsic
    def scale(typingctx, row, scales, factors, argument):
        def codegen(context, builder, signature, args):
            row, scales, factors, argument = args
            if quick:
                for at in range(0, _STEP * source.item_bytes, VECTOR_BYTES):
                    prefetch(builder, builder.add(row, I64(_PREFETCH_BYTES + at)))
            lanes = range(0, LANES, block_lanes)
            are_quick = []
            for number, largest in enumerate(largest_of_groups(builder, row)):
                are_quick.append(is_quick(builder, largest, form.divides))
                computed, factor = form.scale(builder, largest, argument)
                store(builder, factor, builder.add(factors, I64(number * VECTOR_BYTES)))
                if quick and form.divides:
                    reciprocal = builder.fdiv(constant_like(factor, 1.0), factor)
                    store(builder, reciprocal, builder.add(factors, I64(_RECIPROCAL_AT + number * VECTOR_BYTES)))
                for index, lane in enumerate(lanes, number * len(lanes)):
                    item = builder.extract_element(computed, I32(lane))
                    item = builder.trunc(item, stored_scale) if form.scale_bytes < 4 else item
                    store(builder, item, builder.add(scales, I64(index * form.scale_bytes)))
            return builder.zext(all_set(builder, functools.reduce(builder.and_, are_quick)), I64)

        return types.int64(*[types.int64] * 4), codegen

    def load_factor(builder: Any, address: Any) -> Any:
        return builder.load(pointer(builder, address, vector_of(F32)), align=1)

    def encode_group(builder: Any, group: Values, factors: Any, codes: Any) -> None:
        factor, encoded = load_factor(builder, factors), []
        for bits in group:
            magnitudes = mask_bits(builder, bits, MAGNITUDE)
            divide = builder.fdiv if form.divides else builder.fmul
            quotients = divide(as_floats(builder, magnitudes), factor)
            encoded.append(form.encode(builder, bits, magnitudes, quotients))
        store_codes(builder, encoded, codes, form.code_bits)

    def encode_group_quickly(builder: Any, group: Values, factors: Any, codes: Any) -> None:
        factor = load_factor(builder, factors)
        magnitudes = [as_floats(builder, mask_bits(builder, bits, MAGNITUDE)) for bits in group]
        if form.divides:
            reciprocal = load_factor(builder, builder.add(factors, I64(_RECIPROCAL_AT)))
            quotients = [quotients_of(builder, values, factor, reciprocal) for values in magnitudes]
        else:
            quotients = [builder.fmul(values, factor) for values in magnitudes]
        encoded = [form.encode_finite(builder, values) for values in quotients]
        store_signed_codes(builder, encoded, group, codes, form.code_bits)

    @intrinsic
    def encode(typingctx, row, codes, factors):
        def codegen(context, builder, signature, args):
            row, codes, factors = args
            encode_one = encode_group_quickly if quick else encode_group
            for number, group in enumerate(load_groups(builder, row)):
                at = builder.add(factors, I64(number * VECTOR_BYTES))
                encode_one(builder, group, at, builder.add(codes, I64(number * group_code_bytes)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return scale, encode


# Memory of a call, in bytes: factors of a chunk, at most one per column; the padded copy, its codes and its scales.
_FACTOR_BYTES = 4 * _STEP
_RECIPROCAL_AT = _FACTOR_BYTES // 2  # of the factors, where those are divided by: there are half as many
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
            is_right = 1
            for i in range(first, last):
                to = factors + (i - first) * _FACTOR_BYTES
                is_right &= quick_scale(row + i * step_bytes, scales + i * step_scale_bytes, to, argument)
            if is_right:
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
