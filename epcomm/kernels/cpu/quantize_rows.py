"""A row of 16- or 32-bit floats, quantised: codes and scales, the bits that ``moe/quantize/`` defines in torch.

128 columns at a time are read twice: their blocks' largest magnitudes become scales, then their quotients are rounded
to codes by integer arithmetic, on vectors of 64 bytes all the way. A block's scale is computed in every lane that holds
one of its columns, so it never leaves the vectors. The second reading follows the first by some steps: each column's
chain of dependent instructions is as long as a step, and a CPU looks ahead little further than that.

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
    call_intrinsic,
    constant_like,
    convert,
    shuffle,
    vector_of,
    with_element,
)
from epcomm.device.cpu.compile import Kernel, kernel
from epcomm.device.cpu.memory import F32, I8, I32, I64, VECTOR_BYTES, copy_bytes, pointer, zero_bytes
from epcomm.kernels.cpu.quantize_forms import FORMS, INFINITY, MAGNITUDE, Form, as_floats, as_ints, mask_bits, merge

#: ``int64 f(int64 source, int64 codes, int64 scales, int64 num_columns, int64 argument)``
QUANTIZE_ROW_SIGNATURE = types.int64(*[types.int64] * 5)

_STEP = 128  # columns at a time: a multiple of all blocks, and whole vectors of all dtypes
_CHUNK = 4  # steps between the readings of a column: with 4 or more a row takes 0.6 of the time it does with one
_LANES = VECTOR_BYTES // 4
_PAIRS = FORMATS[torch.bfloat16]  # what is computed with: vectors of even and of odd columns, in turns


def _passes(source: Format, form: Form) -> tuple[Any, Any]:
    """Two intrinsics that quantise 128 columns: the first finds scales and, of each group of vectors, factors."""
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

    @intrinsic
    def scale(typingctx, row, scales, factors, argument):
        def codegen(context, builder, signature, args):
            row, scales, factors, argument = args
            lanes = range(0, _LANES, block_lanes)
            for number, group in enumerate(load_groups(builder, row)):
                largest = _largest_finite(builder, group, block_lanes)
                computed, factor = form.scale(builder, largest, argument)
                _store(builder, factor, builder.add(factors, I64(number * VECTOR_BYTES)))
                for index, lane in enumerate(lanes, number * len(lanes)):
                    item = builder.extract_element(computed, I32(lane))
                    item = builder.trunc(item, stored_scale) if form.scale_bytes < 4 else item
                    _store(builder, item, builder.add(scales, I64(index * form.scale_bytes)))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    @intrinsic
    def encode(typingctx, row, codes, factors):
        def codegen(context, builder, signature, args):
            row, codes, factors = args
            for number, group in enumerate(load_groups(builder, row)):
                at = builder.add(factors, I64(number * VECTOR_BYTES))
                factor = builder.load(pointer(builder, at, vector_of(F32)), align=1)
                encoded = []
                for bits in group:
                    magnitudes = mask_bits(builder, bits, MAGNITUDE)
                    divide = builder.fdiv if form.divides else builder.fmul
                    quotients = divide(as_floats(builder, magnitudes), factor)
                    encoded.append(form.encode(builder, bits, magnitudes, quotients))
                at = builder.add(codes, I64(number * group_code_bytes))
                _store_codes(builder, encoded, at, form.code_bits)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), codegen

    return scale, encode


def _largest_finite(builder: Any, group: Values, block_lanes: int) -> Any:
    """In each lane, the bits of the largest finite magnitude of the block of `block_lanes` lanes that it is in."""
    zero, infinity = constant_like(group[0], 0), constant_like(group[0], INFINITY)
    values = [mask_bits(builder, bits, MAGNITUDE) for bits in group]
    values = [builder.select(builder.icmp_unsigned("<", each, infinity), each, zero) for each in values]
    while len(values) > 1:
        values = [call_intrinsic(builder, "umax", *pair) for pair in zip(values[::2], values[1::2], strict=True)]
    (largest,) = values
    distance = block_lanes // 2
    while distance:
        partners = shuffle(builder, largest, largest, [lane ^ distance for lane in range(_LANES)])
        largest = call_intrinsic(builder, "umax", largest, partners)
        distance //= 2
    return largest


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
    scale, encode = _passes(source, layout)
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
            for i in range(first, last):
                to = factors + (i - first) * _FACTOR_BYTES
                scale(row + i * step_bytes, scales + i * step_scale_bytes, to, argument)
            for i in range(first, last):
                encode(row + i * step_bytes, codes + i * step_code_bytes, factors + (i - first) * _FACTOR_BYTES)
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
