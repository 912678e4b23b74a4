"""Element formats: how 64 bytes of a tensor become vectors that LLVM can add, and back, as IR emitted by intrinsics.

A format loads and stores either a *vector* (64 bytes) or one *item*. Both give a list of accumulators, IR values of the
type that results are computed in: one per 64 bytes, or two for 16-bit floats, which are computed in float32. An item
gives one scalar. Operations on accumulators don't care which, so a tail done item by item has the bits of a vector.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numba
import torch
from llvmlite import ir
from numba.core import cgutils

from epcomm.device.cpu.memory import F32, I8, I32, I64, VECTOR_BYTES, mark_streaming, pointer
from epcomm.errors import UnsupportedError

I16, F16, F64 = ir.IntType(16), ir.HalfType(), ir.DoubleType()

Values = list[Any]  # IR values of one type


@functools.cache
def cpu_features() -> frozenset[str]:
    """LLVM's names of what kernels may use: what this CPU has, or what Numba is told to compile for."""
    if numba.config.CPU_NAME:
        return frozenset(name[1:] for name in (numba.config.CPU_FEATURES or "").split(",") if name.startswith("+"))
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def vector_of(element: Any) -> Any:
    """The vector of 64 bytes with this element."""
    return ir.VectorType(element, VECTOR_BYTES // size_of(element))


def size_of(element: Any) -> int:
    """Bytes of a number."""
    if isinstance(element, ir.IntType):
        return element.width // 8
    return {F16: 2, F32: 4, F64: 8}[element]


def is_float(value: Any) -> bool:
    return element_of(value) in (F16, F32, F64)


def element_of(value: Any) -> Any:
    """The type of a scalar, or of a vector's elements."""
    return value.type.element if isinstance(value.type, ir.VectorType) else value.type


def with_element(value: Any, element: Any) -> Any:
    """The type of `value` with another element: scalar stays scalar, and a vector keeps its number of elements."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def constant_like(value: Any, number: float) -> Any:
    """`number` in every element of a constant of the type of `value`."""
    if isinstance(value.type, ir.VectorType):
        return ir.Constant(value.type, [number] * value.type.count)
    return ir.Constant(value.type, number)


def shuffle(builder: Any, first: Any, second: Any, indices: Any) -> Any:
    """The elements at `indices` of the two vectors put end to end."""
    mask = list(indices)
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(mask)), mask))


def splat_like(builder: Any, scalar: Any, value: Any) -> Any:
    """`scalar` in every element of a value shaped as `value`."""
    if not isinstance(value.type, ir.VectorType):
        return scalar
    vector = ir.VectorType(scalar.type, value.type.count)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, I32(0))
    return shuffle(builder, single, single, [0] * vector.count)


def call_intrinsic(builder: Any, name: str, *arguments: Any) -> Any:
    """A math intrinsic of LLVM on scalars or vectors: `call_intrinsic(builder, "fma", a, b, c)`."""
    result = arguments[0].type
    element = element_of(arguments[0])
    suffix = f"i{element.width}" if isinstance(element, ir.IntType) else f"f{8 * size_of(element)}"
    if isinstance(result, ir.VectorType):
        suffix = f"v{result.count}{suffix}"
    signature = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
    return builder.call(function, list(arguments))


class Format:
    """Numbers that are computed with in the type they are stored in."""

    #: accumulators hold elements 0, 2, .. and 1, 3, .. of 64 bytes, instead of consecutive elements
    interleaved = False

    def __init__(self, item: Any, signed: bool = True):
        self.item, self.signed = item, signed
        self.accumulator = item

    @property
    def item_bytes(self) -> int:
        return size_of(self.item)

    @property
    def accumulator_bytes(self) -> int:
        return size_of(self.accumulator)

    def check_available(self) -> None:
        """Raises `UnsupportedError` where this CPU cannot compute with the format."""

    def load(self, builder: Any, address: Any, vector: bool) -> Values:
        """The vector or item at an address of any alignment."""
        return [builder.load(pointer(builder, address, vector_of(self.item) if vector else self.item), align=1)]

    def store(self, builder: Any, values: Values, address: Any, streaming: bool = False) -> None:
        """Rounds once, if at all, and stores; a streaming store needs a vector and an address aligned to 64 bytes."""
        _store(builder, values[0], address, streaming)


class BFloat16(Format):
    """The upper halves of float32s, taken as pairs: both halves of 32 bits become a float32 without a shuffle."""

    interleaved = True

    def __init__(self) -> None:
        super().__init__(I16)
        self.accumulator = F32

    def load(self, builder: Any, address: Any, vector: bool) -> Values:
        if not vector:
            item = builder.load(pointer(builder, address, I16), align=1)
            return [builder.bitcast(builder.shl(builder.zext(item, I32), I32(16)), F32)]
        pairs = builder.load(pointer(builder, address, vector_of(I32)), align=1)
        halves = (
            builder.shl(pairs, constant_like(pairs, 16)),
            builder.and_(pairs, constant_like(pairs, 0xFFFF0000)),
        )
        return [builder.bitcast(half, vector_of(F32)) for half in halves]

    def store(self, builder: Any, values: Values, address: Any, streaming: bool = False) -> None:
        rounded = [self._round(builder, value) for value in values]
        lower = builder.lshr(rounded[0], constant_like(rounded[0], 16))
        if len(rounded) == 1:
            _store(builder, builder.trunc(lower, I16), address, streaming)
        else:
            upper = builder.and_(rounded[1], constant_like(rounded[1], 0xFFFF0000))
            _store(builder, builder.or_(lower, upper), address, streaming)

    def _round(self, builder: Any, value: Any) -> Any:
        """Bits whose upper half is the nearest bfloat16, ties to even. The CPU's own instruction flushes subnormals."""
        bits = builder.bitcast(value, with_element(value, I32))
        odd = builder.and_(builder.lshr(bits, constant_like(bits, 16)), constant_like(bits, 1))
        nearest = builder.add(bits, builder.add(odd, constant_like(bits, 0x7FFF)))
        quiet_nan = builder.or_(bits, constant_like(bits, 0x400000))  # adding could carry it into infinity or zero
        return builder.select(builder.fcmp_unordered("uno", value, value), quiet_nan, nearest)


class Float16(Format):
    """IEEE half precision, computed with in float32."""

    def __init__(self) -> None:
        super().__init__(F16)
        self.accumulator = F32

    def check_available(self) -> None:
        # Without the instruction LLVM calls a function of the compiler's own library, which is not there.
        if platform.machine().lower() in ("x86_64", "amd64") and "f16c" not in cpu_features():
            raise UnsupportedError("float16 on a CPU needs its F16C instructions, which this CPU lacks: use bfloat16")

    def load(self, builder: Any, address: Any, vector: bool) -> Values:
        if not vector:
            return [builder.fpext(builder.load(pointer(builder, address, F16), align=1), F32)]
        half = ir.VectorType(F16, VECTOR_BYTES // 4)
        parts = (address, builder.add(address, I64(VECTOR_BYTES // 2)))
        return [builder.fpext(builder.load(pointer(builder, at, half), align=1), vector_of(F32)) for at in parts]

    def store(self, builder: Any, values: Values, address: Any, streaming: bool = False) -> None:
        parts = [builder.fptrunc(value, with_element(value, F16)) for value in values]
        _store(builder, parts[0] if len(parts) == 1 else concatenate(builder, *parts), address, streaming)


def _store(builder: Any, value: Any, address: Any, streaming: bool) -> None:
    store = builder.store(value, pointer(builder, address, value.type), align=VECTOR_BYTES if streaming else 1)
    if streaming:
        mark_streaming(builder, store)


def concatenate(builder: Any, first: Any, second: Any) -> Any:
    return shuffle(builder, first, second, range(2 * first.type.count))


def convert(builder: Any, values: Values, source: Format, target: Format) -> Values:
    """Accumulators loaded as `source` turned into those that `target` stores: its element type and order."""
    if source.interleaved == target.interleaved and source.accumulator == target.accumulator:
        return values
    scalar = not isinstance(values[0].type, ir.VectorType)
    if source.interleaved and not scalar:
        values = _zip(builder, values)
    if source.accumulator == F32 and target.accumulator == F64:
        values = [builder.fpext(part, with_element(part, F64)) for value in values for part in _halves(builder, value)]
    elif source.accumulator == F64 and target.accumulator == F32:
        narrow = _round_to_float if target.item == F32 else _round_to_odd
        values = [narrow(builder, value) for value in values]
        if not scalar:
            values = [concatenate(builder, *pair) for pair in _pairs(values)]
    return _unzip(builder, values) if target.interleaved and not scalar else values


def _pairs(values: Values) -> Iterator[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


def _halves(builder: Any, value: Any) -> Values:
    if not isinstance(value.type, ir.VectorType):
        return [value]
    count = value.type.count
    return [shuffle(builder, value, value, range(start, start + count // 2)) for start in (0, count // 2)]


def _zip(builder: Any, values: Values) -> Values:
    """Vectors of even and odd elements, in turns, to vectors of consecutive elements."""
    count = values[0].type.count
    order = [index // 2 + index % 2 * count for index in range(2 * count)]
    return [shuffle(builder, *pair, part) for pair in _pairs(values) for part in (order[:count], order[count:])]


def _unzip(builder: Any, values: Values) -> Values:
    count = values[0].type.count
    return [shuffle(builder, *pair, range(part, 2 * count, 2)) for pair in _pairs(values) for part in (0, 1)]


def _round_to_float(builder: Any, value: Any) -> Any:
    return builder.fptrunc(value, with_element(value, F32))


def _round_to_odd(builder: Any, value: Any) -> Any:
    """float64 to float32, where what doesn't fit leaves the last bit set: then rounding on to 16 bits is correct.

    Rounding to nearest twice is not: just above a tie, the first rounding would make it a tie.
    """
    nearest = _round_to_float(builder, value)
    back = builder.fpext(nearest, value.type)
    magnitude = call_intrinsic(builder, "fabs", value), call_intrinsic(builder, "fabs", back)
    bits = builder.bitcast(nearest, with_element(value, I32))
    grew = builder.zext(builder.fcmp_ordered("<", *magnitude), bits.type)
    inexact = builder.zext(builder.fcmp_ordered("!=", value, back), bits.type)
    return builder.bitcast(builder.or_(builder.sub(bits, grew), inexact), nearest.type)


FORMATS: dict[torch.dtype, Format] = {
    torch.float32: Format(F32),
    torch.float64: Format(F64),
    torch.bfloat16: BFloat16(),
    torch.float16: Float16(),
    torch.bool: Format(I8, signed=False),
    torch.int8: Format(I8),
    torch.int16: Format(I16),
    torch.int32: Format(I32),
    torch.int64: Format(I64),
    torch.uint8: Format(I8, signed=False),
    torch.uint16: Format(I16, signed=False),
    torch.uint32: Format(I32, signed=False),
    torch.uint64: Format(I64, signed=False),
}
