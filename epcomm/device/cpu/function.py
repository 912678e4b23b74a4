"""Calls of compiled functions by address, so that one kernel serves every dtype and reduction, and any library."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from epcomm.device.cpu.memory import I64, pointer


def _caller(num_arguments: int) -> Any:
    function_type = ir.FunctionType(I64, [I64] * num_arguments)

    def codegen(context, builder, signature, args):
        return builder.call(pointer(builder, args[0], function_type), args[1:])

    return codegen


@intrinsic
def call1(typingctx, address, a):
    """Calls ``int64 (int64 a)``, or a C function that returns less: the other bits are anything."""
    return types.int64(*[types.int64] * 2), _caller(1)


@intrinsic
def call5(typingctx, address, a, b, c, d, e):
    """Calls ``int64 (int64 a, b, c, d, e)``."""
    return types.int64(*[types.int64] * 6), _caller(5)


@intrinsic
def call6(typingctx, address, a, b, c, d, e, f):
    """Calls ``int64 (int64 a, b, c, d, e, f)``."""
    return types.int64(*[types.int64] * 7), _caller(6)
