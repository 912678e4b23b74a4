"""What Triton has no words for: as PTX when compiled, as Python under the interpreter.

Here and in `multimem` is the only inline assembly. Triton decides at import which of the two it is (`INTERPRETED`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import core

INTERPRETED = bool(triton.knobs.runtime.interpret)

#: how often a waiter looks at its word before it looks at the abort word, which is in the host's memory
POLLS = tl.constexpr(1 if INTERPRETED else 64)
#: whether a warp's `store_pairs` to a line of 128 bytes, and its `load_pairs`, move it by one instruction
WHOLE_LINES = tl.constexpr(not INTERPRETED)

if INTERPRETED:
    from triton.runtime.interpreter import InterpretedFunction, TensorHandle

    def device(function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates a function that kernels call. (`triton.jit` would patch all of Triton anew in each call of it.)"""
        return InterpretedFunction(function).rewrite()

    def rounded(values: Any, dtype: Any) -> Any:
        """`values` in another format, rounded to nearest even. (The interpreter's own cast to bfloat16 truncates.)"""
        if dtype == tl.bfloat16 and values.dtype != tl.bfloat16:
            nearest = torch.from_numpy(np.ascontiguousarray(values.handle.data)).to(torch.bfloat16)
            handle = TensorHandle(nearest.view(torch.uint16).numpy(), tl.bfloat16)
            return core.tensor(handle, values.type.with_element_ty(tl.bfloat16))
        return values.to(dtype)

    def clock_ns() -> Any:
        """A clock in nanoseconds."""
        return core.tensor(TensorHandle(np.array([time.monotonic_ns()], np.int64), tl.int64), tl.int64)

    def relax() -> None:
        """Leaves the core to whoever is waited for."""
        os.sched_yield()

    def opaque(value: Any) -> Any:
        """The same int64."""
        return value

    @device
    def store_pairs(addresses, low, high, mask):
        """Writes two 64-bit words each, none of them torn. (The interpreter copies 8 bytes at a time.)"""
        tl.store(addresses.to(tl.pointer_type(tl.int64)), low, mask=mask)
        tl.store((addresses + 8).to(tl.pointer_type(tl.int64)), high, mask=mask)

    @device
    def load_pairs(addresses):
        """Two 64-bit words each, none of them torn."""
        low = tl.load(addresses.to(tl.pointer_type(tl.int64)))
        return low, tl.load((addresses + 8).to(tl.pointer_type(tl.int64)))

    def fence_system() -> None:
        """Nothing: interpreted ranks and their network are threads of CPUs, which synchronise by themselves."""

    def widened(values: Any, dtype: Any) -> Any:
        """`values` in a wider format, exactly. (The interpreter's own cast from bfloat16 garbles subnormals.)"""
        if values.dtype == tl.bfloat16 and dtype == tl.float32:
            bits = values.handle.data.astype(np.uint32) << np.uint32(16)
            return core.tensor(TensorHandle(bits.view(np.float32), dtype), values.type.with_element_ty(dtype))
        return values.to(dtype)

else:
    device = triton.jit

    @triton.jit
    def widened(values, dtype: tl.constexpr):
        """`values` in a wider format, exactly."""
        return values.to(dtype)

    @triton.jit
    def rounded(values, dtype: tl.constexpr):
        """`values` in another format, rounded to nearest even."""
        return values.to(dtype)

    @core.extern
    def clock_ns(_semantic: Any = None) -> Any:
        """The GPU's clock in nanoseconds."""
        return core.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
        )

    @core.extern
    def relax(_semantic: Any = None) -> Any:
        """Leaves issue slots and the memory system to whoever is waited for."""
        return core.inline_asm_elementwise(
            "nanosleep.u32 40; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )

    @core.extern
    def opaque(value: Any, _semantic: Any = None) -> Any:
        """The same int64, of which the compiler knows nothing: what follows from it is computed anew from here on.

        Else a loop keeps in registers, over calls of a network's functions too, whatever doesn't change in it.
        """
        return core.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [value], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
        )

    @core.extern
    def fence_system(_semantic: Any = None) -> Any:
        """What this thread wrote, or acquired from others, comes before what it does next, as any device sees it."""
        return core.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )

    @core.extern
    def _store_pairs(addresses: Any, low: Any, high: Any, mask: Any, _semantic: Any = None) -> Any:
        text = (
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; "
            "@p st.relaxed.sys.global.v2.b64 [$1], {$2, $3}; mov.u32 $0, 0; }"
        )
        args = [addresses, low, high, mask]
        return core.inline_asm_elementwise(
            text, "=r,l,l,l,r", args, dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )

    @triton.jit
    def store_pairs(addresses, low, high, mask):
        """Writes two 64-bit words each, none of them torn, by one access of 16 bytes."""
        _store_pairs(addresses, low, high, mask.to(tl.int32))

    @core.extern
    def load_pairs(addresses: Any, _semantic: Any = None) -> Any:
        """Two 64-bit words each, none of them torn, by one access of 16 bytes."""
        return core.inline_asm_elementwise(
            "ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];", "=l,=l,l", [addresses], dtype=(core.int64, core.int64),
            is_pure=False, pack=1, _semantic=_semantic,
        )  # fmt: skip
