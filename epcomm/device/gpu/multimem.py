"""Reductions and stores that NVLink's switch does for all ranks at once (PTX `multimem`, sm_90 and newer).

A *multicast address* stands for one place in every rank's segment: the segment's multicast base plus an offset. Nothing
but these functions may touch it. They move vectors of 16 bytes, given by offsets, as four columns of 4-byte words.

Interpreted, a loop over the ranks' segments, in rank order, stands in for the switch; the base is `EMULATED_BASE`.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language import core

from epcomm.device import control
from epcomm.device.gpu.machine import INTERPRETED, device, rounded, widened
from epcomm.device.gpu.memory import word
from epcomm.device.gpu.waiting import peer

#: a multicast base under the interpreter: no memory is there, so whoever takes it for a memory address is stopped
EMULATED_BASE = 1 << 60

#: what the switch adds, as PTX names it: vectors of 16 bytes; sums of 16-bit floats are accumulated in float32
_SUMS = {"bf16": "acc::f32.v4.bf16x2", "fp16": "acc::f32.v4.f16x2", "fp32": "v4.f32"}


@device
def unpacked(words, DTYPE: tl.constexpr):
    """(low, high): the numbers in a column of words, as float32. A word holds two 16-bit floats, or one float32."""
    if DTYPE == tl.float32:
        number = words.to(tl.float32, bitcast=True)
        return number, number
    else:
        low = widened(words.to(tl.uint16).to(DTYPE, bitcast=True), tl.float32)
        high = widened((words >> 16).to(tl.uint16).to(DTYPE, bitcast=True), tl.float32)
        return low, high


@device
def packed(low, high, DTYPE: tl.constexpr):
    """The counterpart of `unpacked`; rounds to nearest even."""
    if DTYPE == tl.float32:
        return low.to(tl.int32, bitcast=True)
    else:
        low_bits = rounded(low, DTYPE).to(tl.uint16, bitcast=True).to(tl.uint64)
        high_bits = rounded(high, DTYPE).to(tl.uint16, bitcast=True).to(tl.uint64)
        return (low_bits | (high_bits << 16)).to(tl.uint32).to(tl.int32, bitcast=True)


if INTERPRETED:

    @device
    def _pointer(ctx, rank, address):
        return (peer(ctx, rank) + (address - EMULATED_BASE)).to(tl.pointer_type(tl.int32))

    @device
    def _sum_of_column(ctx, address, is_inside, DTYPE: tl.constexpr):
        low, high = unpacked(tl.load(_pointer(ctx, 0, address), mask=is_inside, other=0), DTYPE)
        for rank in range(1, word(ctx, control.SIZE)):
            more_low, more_high = unpacked(tl.load(_pointer(ctx, rank, address), mask=is_inside, other=0), DTYPE)
            low, high = low + more_low, high + more_high
        return packed(low, high, DTYPE)

    @device
    def multimem_load_reduce(ctx, multicast, offset, is_inside, DTYPE: tl.constexpr):
        """The sum, over all ranks, of the vectors at these offsets."""
        address = multicast + offset
        a = _sum_of_column(ctx, address, is_inside, DTYPE)
        b = _sum_of_column(ctx, address + 4, is_inside, DTYPE)
        c = _sum_of_column(ctx, address + 8, is_inside, DTYPE)
        return a, b, c, _sum_of_column(ctx, address + 12, is_inside, DTYPE)

    @device
    def multimem_store(ctx, multicast, offset, a, b, c, d, is_inside):
        """Writes the vectors to all ranks."""
        address = multicast + offset
        for rank in range(word(ctx, control.SIZE)):
            tl.store(_pointer(ctx, rank, address), a, mask=is_inside)
            tl.store(_pointer(ctx, rank, address + 4), b, mask=is_inside)
            tl.store(_pointer(ctx, rank, address + 8), c, mask=is_inside)
            tl.store(_pointer(ctx, rank, address + 12), d, mask=is_inside)

    @device
    def multimem_signal(ctx, multicast, offset, value):
        """Adds to a 64-bit word of all ranks, after all that this program's threads wrote."""
        for rank in range(word(ctx, control.SIZE)):
            pointer = _pointer(ctx, rank, multicast + offset).to(tl.int64).to(tl.pointer_type(tl.int64))
            tl.atomic_add(pointer, tl.cast(value, tl.int64), sem="release", scope="sys")

    @device
    def multimem_fence():
        """Orders this thread's accesses to multicast addresses and those to the same bytes by other addresses."""

else:

    @core.extern
    def _assembly(text: Any, constraints: Any, args: Any, results: Any = 0, _semantic: Any = None) -> Any:
        """Runs PTX for each item of `args`; it writes `results` 32-bit registers (none: one that means nothing)."""
        text, constraints, results = (core._unwrap_if_constexpr(each) for each in (text, constraints, results))
        dtype = (core.int32,) * results if results else core.int32
        return core.inline_asm_elementwise(
            text, constraints, list(args), dtype=dtype, is_pure=False, pack=1, _semantic=_semantic
        )

    @core.extern
    def _load_reduce(address: Any, is_inside: Any, DTYPE: Any, _semantic: Any = None) -> Any:
        numbers = _SUMS[str(core._unwrap_if_constexpr(DTYPE))]
        text = (
            "{ .reg .pred p; setp.ne.s32 p, $5, 0; "
            f"@p multimem.ld_reduce.relaxed.sys.global.add.{numbers} {{$0, $1, $2, $3}}, [$4]; }}"
        )
        return _assembly(text, "=r,=r,=r,=r,l,r", (address, is_inside), 4, _semantic=_semantic)

    @device
    def multimem_load_reduce(ctx, multicast, offset, is_inside, DTYPE: tl.constexpr):
        """The sum, over all ranks, of the vectors at these offsets; anything where `is_inside` is false."""
        return _load_reduce(multicast + offset, is_inside.to(tl.int32), DTYPE)

    @device
    def multimem_store(ctx, multicast, offset, a, b, c, d, is_inside):
        """Writes the vectors to all ranks."""
        _assembly(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; "
            "@p multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }",
            "=r,l,r,r,r,r,r",
            (multicast + offset, a, b, c, d, is_inside.to(tl.int32)),
        )

    @device
    def multimem_signal(ctx, multicast, offset, value):
        """Adds to a 64-bit word of all ranks, after all that this program's threads wrote."""
        tl.debug_barrier()
        _assembly(
            # scalar assembly is run by every thread
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p multimem.red.release.sys.global.add.u64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l",
            (multicast + offset, tl.cast(value, tl.int64)),
        )

    @device
    def multimem_fence():
        """Orders this thread's accesses to multicast addresses and those to the same bytes by other addresses.

        PTX ISA, memory consistency model: accesses by addresses that are aliases go through different proxies, which
        only this fence orders.
        """
        _assembly("fence.proxy.alias; mov.u32 $0, 0;", "=r", ())
