"""The weighted sum of quantised rows: what combine does with the rows of one token's experts that travelled as float8.

A row is what `protocol.quantized_row` says: float8_e4m3fn codes, then float32 scales of 128 columns each. It is read
once: codes become float32s by integer arithmetic, in registers, and a block's scale is part of its row's weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from epcomm.device import control
from epcomm.device.cpu.arithmetic import FORMATS, Format, Values, call_intrinsic, constant_like, convert, splat_like
from epcomm.device.cpu.compile import Kernel, kernel
from epcomm.device.cpu.fold import ACCUMULATORS, load_word, loop_over_sources, prefetch, prefetch_line
from epcomm.device.cpu.memory import F32, I8, I32, I64, VECTOR_BYTES, pointer, word, zero_bytes
from epcomm.kernels.cpu.quantize_forms import INFINITY, as_floats, as_ints, mask_bits
from epcomm.kernels.cpu.row_sum import ROW_SUM_SIGNATURE
from epcomm.kernels.protocol.arithmetic import check_row_sum
from epcomm.kernels.protocol.expert_parallel import SCALES_ALIGNMENT

BLOCK = 128  # columns that share a scale
_LANES = VECTOR_BYTES // 4
#: columns in registers at a time: within a block, of which there is one factor
_STEP = min(BLOCK, ACCUMULATORS * _LANES)
_PREFETCH_BYTES, _LEAST_PREFETCH_BYTES = 4096, 256  # ahead of the loads, of all rows and of each
_LEAST_ADDRESS = 4096  # tells a flag from an address: see fold.py

# float8_e4m3fn's bits where float32 has them, but for the exponent's bias
_NAN = 0x7F << 20
_FIRST_NORMAL = 1 << 23
_MORE_BIAS = (127 - 7) << 23
_SUBNORMAL_BIAS = (127 - 6) << 23  # numbers from 2^-6 on, whose steps are those of the subnormals


def decode(builder: Any, codes: Any) -> Any:
    """float32s of float8_e4m3fn codes, which are int32s from 0 to 255."""
    magnitudes = builder.shl(mask_bits(builder, codes, 0x7F), constant_like(codes, 20))
    above = as_floats(builder, builder.add(magnitudes, constant_like(codes, _SUBNORMAL_BIAS)))
    subnormals = as_ints(builder, builder.fsub(above, constant_like(above, 2.0**-6)))
    normals = builder.add(magnitudes, constant_like(codes, _MORE_BIAS))
    is_subnormal = builder.icmp_unsigned("<", magnitudes, constant_like(codes, _FIRST_NORMAL))
    bits = builder.select(is_subnormal, subnormals, normals)
    is_nan = builder.icmp_unsigned("==", magnitudes, constant_like(codes, _NAN))
    bits = builder.select(is_nan, constant_like(codes, INFINITY | 1 << 22), bits)
    signs = mask_bits(builder, builder.shl(codes, constant_like(codes, 24)), -(1 << 31))
    return as_floats(builder, builder.or_(bits, signs))


def _columns(output: Format, items: int, streaming: bool = False) -> Any:
    """Sums columns first .. first + items - 1, which are in one block; one item is done in scalars.

    The streaming one also prefetches as many codes of `ahead_sources`, from the byte offset `ahead` on.
    """
    single, numbers = items == 1, FORMATS[torch.float32]

    @intrinsic
    def columns(typingctx, destination, sources, weights, num_sources, scales_at, first, ahead_sources, ahead):
        def codegen(context, builder, signature, args):
            destination, sources, weights, num_sources, scales_at, first, ahead_sources, ahead = args
            # without weights every source's weight is read from the same constant
            one = builder.ptrtoint(cgutils.global_constant(builder, "one", ir.Constant(F32, 1.0)), I64)
            plain = builder.icmp_signed("==", weights, I64(0))
            weights = builder.select(plain, one, weights)
            weight_bytes = builder.select(plain, I64(0), I64(4))
            scale_offset = builder.add(scales_at, builder.shl(builder.lshr(first, I64(7)), I64(2)))

            def add_source(k, accumulators):
                source = load_word(builder, sources, k)
                weight = builder.load(pointer(builder, builder.add(weights, builder.mul(k, weight_bytes)), F32))
                scale = builder.load(pointer(builder, builder.add(source, scale_offset), F32), align=1)
                factor = builder.fmul(weight, scale)
                if streaming:
                    ahead_source = builder.add(load_word(builder, ahead_sources, k), ahead)
                    for line in range(0, items, VECTOR_BYTES):
                        prefetch(builder, builder.add(ahead_source, I64(line)))
                at, updated = builder.add(source, first), []
                element = I8 if single else ir.VectorType(I8, _LANES)
                extended = I32 if single else ir.VectorType(I32, _LANES)
                for index in range(1 if single else items // _LANES):
                    codes = builder.load(pointer(builder, builder.add(at, I64(index * _LANES)), element), align=1)
                    value = decode(builder, builder.zext(codes, extended))
                    splat = splat_like(builder, factor, value)
                    if accumulators is None:
                        updated.append(builder.fmul(value, splat))
                    else:
                        updated.append(call_intrinsic(builder, "fma", value, splat, accumulators[index]))
                return updated

            results: Values = loop_over_sources(builder, num_sources, add_source)
            results = convert(builder, results, numbers, output)
            out_bytes = items * output.item_bytes
            per_vector = 1 if single else len(results) * VECTOR_BYTES // out_bytes
            to = builder.add(destination, builder.mul(first, I64(output.item_bytes)))
            for index in range(0, len(results), per_vector):
                at = builder.add(to, I64(index // per_vector * VECTOR_BYTES))
                output.store(builder, results[index : index + per_vector], at, streaming)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return columns


@functools.cache
def float8_row_sum(output_dtype: torch.dtype) -> Kernel:
    """The kernel that writes the sum over k of ``(weights[k] * scale) * code`` to ``destination[i]``, rounded once.

    Its arguments are those of `row_sum`; the sources are quantised rows of `num_elements` columns. The product of a
    weight and a scale is rounded to float32; those with codes are added in the order of k with fused multiply-adds, in
    float32.
    """
    check_row_sum(output_dtype)
    output = FORMATS[output_dtype]
    output.check_available()
    item, step, stream = _columns(output, 1), _columns(output, _STEP), _columns(output, _STEP, streaming=True)
    output_bytes = output.item_bytes

    def add_rows(destination, sources, weights, num_sources, num_elements, streaming):
        if num_sources == 0:
            zero_bytes(destination, num_elements * output_bytes)
            return control.OK
        scales_at = (num_elements + SCALES_ALIGNMENT - 1) & -SCALES_ALIGNMENT
        done = 0
        if streaming != 0 and destination & (VECTOR_BYTES - 1) == 0:
            has_following = streaming >= _LEAST_ADDRESS
            following = streaming if has_following else sources
            distance = min(max(_PREFETCH_BYTES // num_sources, _LEAST_PREFETCH_BYTES), num_elements)
            scales_end = scales_at + (num_elements + BLOCK - 1) // BLOCK * 4
            for k in range(num_sources):
                for at in range(scales_at, scales_end, VECTOR_BYTES):
                    prefetch_line(word(following, k) + at)
                if not has_following:
                    for at in range(0, distance, VECTOR_BYTES):
                        prefetch_line(word(sources, k) + at)
            while done + _STEP <= num_elements:
                ahead_sources, ahead = sources, done + distance
                if ahead >= num_elements:
                    ahead_sources, ahead = following, ahead - num_elements
                stream(destination, sources, weights, num_sources, scales_at, done, ahead_sources, ahead)
                done += _STEP
        while done + _STEP <= num_elements:
            step(destination, sources, weights, num_sources, scales_at, done, 0, 0)
            done += _STEP
        while done < num_elements:
            item(destination, sources, weights, num_sources, scales_at, done, 0, 0)
            done += 1
        return control.OK

    return kernel(f"float8_row_sum-{str(output_dtype).removeprefix('torch.')}", ROW_SUM_SIGNATURE)(add_rows)
