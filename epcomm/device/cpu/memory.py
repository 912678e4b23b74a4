"""Loads, stores, atomics and copies on raw addresses (int64), as Numba intrinsics.

Everything takes addresses, so one compiled kernel serves every tensor and every peer. Vector code is written as LLVM
vectors of 64 bytes, which LLVM splits into whatever the CPU has.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from epcomm.device.cpu.compile import device

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR_BYTES = 64
_VECTOR = ir.VectorType(I32, VECTOR_BYTES // 4)
_UNROLL = 4

#: Larger transfers go past the caches. A line that a peer has read is in that peer's cache, and a plain store waits for
#: its ownership; a streaming store doesn't. It pays from about where the rows leave the cores' own caches: dispatch of
#: 7 MB to 100 MB was 1.1 to 1.9 times faster with it, of less than 4 MB as much slower (Zen 5).
STREAMING_BYTES = 4 << 20


def pointer(builder: Any, address: Any, element: Any) -> Any:
    """The address (an i64 value) as a pointer to `element`."""
    return builder.inttoptr(address, element.as_pointer())


def _load_store(ir_type: Any, numba_type: Any) -> tuple[Any, Any]:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load(pointer(builder, args[0], ir_type), align=1)

        return numba_type(types.int64), codegen

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store(args[1], pointer(builder, args[0], ir_type), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return load, store


load64, store64 = _load_store(I64, types.int64)
load32, store32 = _load_store(I32, types.int32)
load_float, store_float = _load_store(F32, types.float32)


@intrinsic
def word(typingctx, block, index):
    """Word `index` (64 bits) of the block at address `block`."""

    def codegen(context, builder, signature, args):
        return builder.load(pointer(builder, builder.add(args[0], builder.shl(args[1], I64(3))), I64))

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def set_word(typingctx, block, index, value):
    """Sets word `index` (64 bits) of the block at address `block`."""

    def codegen(context, builder, signature, args):
        builder.store(args[2], pointer(builder, builder.add(args[0], builder.shl(args[1], I64(3))), I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _atomic_load_store(load_order: str, store_order: str) -> tuple[Any, Any]:
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            return builder.load_atomic(pointer(builder, args[0], I64), load_order, 8)

        return types.int64(types.int64), codegen

    @intrinsic
    def store(typingctx, address, value):
        def codegen(context, builder, signature, args):
            builder.store_atomic(args[1], pointer(builder, args[0], I64), store_order, 8)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return load, store


load_acquire, store_release = _atomic_load_store("acquire", "release")
load_relaxed, store_relaxed = _atomic_load_store("monotonic", "monotonic")  # whole, and in no order with others


def _read_modify_write(operation: str) -> Any:
    @intrinsic
    def atomic(typingctx, address, value):
        def codegen(context, builder, signature, args):
            return builder.atomic_rmw(operation, pointer(builder, args[0], I64), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    return atomic


fetch_add, exchange = _read_modify_write("add"), _read_modify_write("xchg")


@intrinsic
def compare_exchange(typingctx, address, expected, desired):
    """Stores `desired` if the word is `expected`; returns the word as it was."""

    def codegen(context, builder, signature, args):
        pair = builder.cmpxchg(pointer(builder, args[0], I64), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def fence(typingctx):
    """Orders all earlier stores, streaming ones included, before all later ones."""

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def prefetch(builder: Any, address: Any, for_writing: bool = False) -> None:
    """Fetches a line into all caches; an address that is not mapped does no harm."""
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    builder.call(function, [pointer(builder, address, I8), I32(int(for_writing)), I32(3), I32(1)])


def _line_prefetcher(for_writing: bool) -> Any:
    @intrinsic
    def prefetch_line(typingctx, address):
        def codegen(context, builder, signature, args):
            prefetch(builder, args[0], for_writing)
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return prefetch_line


prefetch_line, _prefetch_line_for_writing = _line_prefetcher(False), _line_prefetcher(True)


@device
def prefetch_for_writing(address, num_bytes):
    """Asks for the ownership of the lines of these bytes, which stores then don't have to wait for."""
    for at in range(address & -VECTOR_BYTES, address + num_bytes, VECTOR_BYTES):
        _prefetch_line_for_writing(at)


@intrinsic
def copy_bytes(typingctx, destination, source, num_bytes):
    """memcpy."""

    def codegen(context, builder, signature, args):
        cgutils.raw_memcpy(builder, pointer(builder, args[0], I8), pointer(builder, args[1], I8), args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _memset(byte: int) -> Any:
    @intrinsic
    def fill(typingctx, destination, num_bytes):
        def codegen(context, builder, signature, args):
            cgutils.memset(builder, pointer(builder, args[0], I8), args[1], byte)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return fill


zero_bytes = _memset(0)  # (destination, num_bytes)
fill_with_ones = _memset(255)  # -1 in every integer


def mark_streaming(builder: Any, store: Any) -> None:
    """Makes a vector store bypass the caches (it must be aligned to the vector)."""
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


def _vector_copy(streaming: bool) -> Any:
    @intrinsic
    def copy(typingctx, destination, source, num_bytes):
        """Copies a multiple of `_UNROLL` vectors; a streaming copy wants an aligned destination."""

        def codegen(context, builder, signature, args):
            step = VECTOR_BYTES * _UNROLL
            with cgutils.for_range(builder, builder.udiv(args[2], I64(step))) as loop:
                offset = builder.mul(loop.index, I64(step))
                at = [builder.add(offset, I64(VECTOR_BYTES * u)) for u in range(_UNROLL)]
                values = [builder.load(pointer(builder, builder.add(args[1], o), _VECTOR), align=1) for o in at]
                for value, o in zip(values, at, strict=True):
                    to = pointer(builder, builder.add(args[0], o), _VECTOR)
                    store = builder.store(value, to, align=VECTOR_BYTES if streaming else 1)
                    if streaming:
                        mark_streaming(builder, store)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return copy


_copy_vectors, _stream_vectors = _vector_copy(False), _vector_copy(True)


@device
def copy(destination, source, num_bytes):
    """Copy of any size through the caches."""
    body = num_bytes & -256
    _copy_vectors(destination, source, body)
    if body != num_bytes:
        copy_bytes(destination + body, source + body, num_bytes - body)


@device
def copy_streaming(destination, source, num_bytes):
    """Copy of any size past the caches. The caller fences before it signals."""
    head = min(-destination & 63, num_bytes)
    if head:
        copy_bytes(destination, source, head)
    body = (num_bytes - head) & -256
    _stream_vectors(destination + head, source + head, body)
    done = head + body
    if done != num_bytes:
        copy_bytes(destination + done, source + done, num_bytes - done)
