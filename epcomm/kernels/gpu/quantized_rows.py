"""A token's row, read once, quantised in registers and stored at all its places: float8 and a scale per 128 columns.

``moe/quantize/`` defines the numbers; these are the same, bit for bit. The conversion to float8 is integer arithmetic
on every architecture: sm_80 has no instruction for it, and the interpreter's is another one.
"""

from __future__ import annotations

import triton.language as tl

from epcomm.device.gpu.machine import device, widened
from epcomm.device.gpu.memory import word
from epcomm.kernels.gpu.counts import base_of
from epcomm.kernels.gpu.rows import departing_row, departures, destination, place
from epcomm.kernels.protocol import expert_parallel as protocol

#: ``Quantizer.form`` of what these kernels make
FORMS = ("float32", "power_of_two", "packed")
BLOCK = tl.constexpr(128)  # columns that share a scale
TILE_BLOCKS = tl.constexpr(32)
NARROW_TILE_BLOCKS = tl.constexpr(8)

# float32, as integers
_INFINITY = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_ONE = tl.constexpr(0x3F800000)
_ONE_TWICE = tl.constexpr(0x7F000000)  # less the bits of a power of two: those of its reciprocal
_MANTISSA = tl.constexpr(0x007FFFFF)

# float8_e4m3fn
_LARGEST = tl.constexpr(448.0)
_LARGEST_CODE = tl.constexpr(0x7E)
_NAN_CODE = tl.constexpr(0x7F)
_FIRST_NORMAL = tl.constexpr(0x3C800000)  # 2^-6, as a float32
_DROPPED_BITS = tl.constexpr(20)  # of a float32's mantissa of 23
_LESS_THAN_HALF = tl.constexpr((1 << 19) - 1)  # of what is dropped
_LESS_BIAS = tl.constexpr((127 - 7) << 3)  # from float32's exponents to this format's, above its mantissa
_SUBNORMAL_ROUNDER = tl.constexpr(16384.0)  # its last place is 2^-9, the step of the subnormals
_SUBNORMAL_ROUNDER_BITS = tl.constexpr(0x46800000)


@device
def send_quantized_row(ctx, state, routing, tensors, token, places, epoch, X: tl.constexpr, SCALES: tl.constexpr,
                       EXPANDED: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr,
                       NETWORK: tl.constexpr):  # fmt: skip
    """Sends a token's row, of X, as float8 and scales: the first two records of `tensors` are of those."""
    record = tensors + 8 * protocol.TENSOR_WORDS  # of the scales
    hidden, offset = word(tensors, protocol.T_ROW_BYTES), word(tensors, protocol.T_OFFSET)
    scale_bytes, scale_offset = word(record, protocol.T_ROW_BYTES), word(record, protocol.T_OFFSET)
    source = word(tensors, protocol.T_ADDRESS) + token * word(tensors, protocol.T_STRIDE)
    start = tl.cast(0, tl.int64)
    while start < hidden:
        left = tl.minimum(hidden - start, BLOCK * BLOCKS)
        codes, scales = quantized(load_blocks(source + start * X.itemsize, left, X, WIDE, BLOCKS), SCALES)
        if SCALES == "packed":
            first_scale = start // BLOCK  # in bytes
        else:
            first_scale = start // BLOCK * 4
        for k in range(places):
            rank, row = place(ctx, state, routing, token, k, word(state, protocol.IS_BY_RANK))
            if rank >= 0:
                block = destination(ctx, state, rank, epoch, EXPANDED)
                code, scale = block + offset + row * hidden, block + scale_offset + row * scale_bytes
                if NETWORK != "none":
                    if base_of(state, rank) == 0:
                        row = departing_row(ctx, state, routing, token, k, word(state, protocol.IS_BY_RANK))
                        code = departures(ctx, state) + word(tensors, protocol.T_DEPARTURE) + row * hidden
                        scale = departures(ctx, state) + word(record, protocol.T_DEPARTURE) + row * scale_bytes
                store_codes(code + start, codes, left, WIDE, BLOCKS)
                to = scale + first_scale
                store_scales(to, scales, left, scale_bytes - first_scale, SCALES, BLOCKS)
        start += BLOCK * BLOCKS


@device
def quantized(values, SCALES: tl.constexpr):
    """(codes, uint8 [blocks, 128]; bits of the float32 scales, int32 [blocks]) of float32 [blocks, 128]."""
    bits = values.to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    is_finite = magnitudes < _INFINITY
    magnitudes = tl.where(is_finite, magnitudes, 0)
    scales = _scales(tl.max(magnitudes, axis=1), SCALES)
    magnitudes = magnitudes.to(tl.float32, bitcast=True)
    if SCALES == "float32":
        quotients = tl.div_rn(magnitudes, tl.broadcast_to(scales.to(tl.float32, bitcast=True)[:, None], values.shape))
    else:  # the reciprocal is a power of two as well: multiplying rounds as dividing does
        reciprocals = tl.full(scales.shape, _ONE_TWICE, tl.int32) - scales
        quotients = magnitudes * reciprocals.to(tl.float32, bitcast=True)[:, None]
    signs = (bits >> 24) & 0x80
    return tl.where(is_finite, float8_codes(quotients) | signs, _NAN_CODE).to(tl.uint8), scales


@device
def _scales(largest, SCALES: tl.constexpr):
    """Bits of the scales of blocks whose largest magnitudes have these bits."""
    quotients = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full(largest.shape, _LARGEST, tl.float32))
    scales = tl.maximum(quotients.to(tl.int32, bitcast=True), _SMALLEST_NORMAL)
    if SCALES != "float32":
        scales = (scales + _MANTISSA) & _INFINITY
    return tl.where(largest == 0, _ONE, scales)


@device
def float8_codes(values):
    """int32 codes of float8_e4m3fn nearest to float32 numbers >= 0, ties to even; at most that of 448."""
    bits = values.to(tl.int32, bitcast=True)
    last_bit = (bits >> _DROPPED_BITS) & 1
    normal = ((bits + _LESS_THAN_HALF + last_bit) >> _DROPPED_BITS) - _LESS_BIAS
    # the addition rounds to multiples of the subnormals' step, which then count in the last places
    subnormal = (values + _SUBNORMAL_ROUNDER).to(tl.int32, bitcast=True) - _SUBNORMAL_ROUNDER_BITS
    return tl.minimum(tl.where(bits < _FIRST_NORMAL, subnormal, normal), _LARGEST_CODE)


@device
def columns_of(num_columns, BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    """(column numbers, mask) of a tile; `num_columns` is a multiple of VECTOR, which Triton then knows."""
    at = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return at, at < num_columns // VECTOR * VECTOR


@device
def load_blocks(address, num_columns, X: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """The first `num_columns` numbers at an address, then zeros: float32 [BLOCKS, 128]."""
    pointer = address.to(tl.pointer_type(X))
    if WIDE:
        at, is_inside = columns_of(num_columns, BLOCKS, 16)
        values = tl.load(tl.multiple_of(pointer, 16) + at, mask=is_inside, other=0)
    else:
        at, is_inside = columns_of(num_columns, BLOCKS, 1)
        values = tl.load(pointer + at, mask=is_inside, other=0)
    return widened(values, tl.float32)


@device
def store_codes(address, codes, num_columns, WIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """The counterpart of `load_blocks`, of codes."""
    pointer = address.to(tl.pointer_type(tl.uint8))
    if WIDE:
        at, is_inside = columns_of(num_columns, BLOCKS, 16)
        tl.store(tl.multiple_of(pointer, 16) + at, codes, mask=is_inside)
    else:
        at, is_inside = columns_of(num_columns, BLOCKS, 1)
        tl.store(pointer + at, codes, mask=is_inside)


@device
def store_scales(address, scales, num_columns, num_bytes, SCALES: tl.constexpr, BLOCKS: tl.constexpr):
    """The scales of a tile's columns: in 4 bytes each, or packed in one, up to the end of `num_bytes` with zeros."""
    at = tl.arange(0, BLOCKS)
    if SCALES == "packed":
        exponents = tl.where(at * BLOCK < num_columns, scales >> 23, 0)
        tl.store(address.to(tl.pointer_type(tl.uint8)) + at, exponents.to(tl.uint8), mask=at < num_bytes)
    else:
        tl.store(address.to(tl.pointer_type(tl.int32)) + at, scales, mask=at * 4 < num_bytes)
