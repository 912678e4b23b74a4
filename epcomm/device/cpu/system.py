"""What compiled code asks of the operating system: pauses, clocks, semaphores, sockets, and Python's signals."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import I8, I32, I64, pointer


def _c_function(name: str, result: Any, arguments: list[Any], numba_result: Any, constants: list[Any]) -> Any:
    """An intrinsic that calls a C function by symbol (a ctypes pointer would make its callers uncacheable)."""

    @intrinsic
    def call(typingctx):
        def codegen(context, builder, signature, args):
            function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)
            value = builder.call(function, constants)
            return context.get_dummy_value() if numba_result == types.void else value

        return numba_result(), codegen

    return call


def _pause_instruction() -> Any:
    triple = llvm.get_default_triple()
    if triple.startswith("x86_64"):
        return _c_function("llvm.x86.sse2.pause", ir.VoidType(), [], types.void, [])
    if triple.startswith(("aarch64", "arm64")):
        return _c_function("llvm.aarch64.hint", ir.VoidType(), [I32], types.void, [I32(1)])
    return yield_core


yield_core = _c_function("sched_yield", I32, [], types.void, [])
pause = _pause_instruction()

_gil_ensure = _c_function("PyGILState_Ensure", I32, [], types.int32, [])
_check_signals = _c_function("PyErr_CheckSignals", I32, [], types.int32, [])
_clear_error = _c_function("PyErr_Clear", ir.VoidType(), [], types.void, [])


@intrinsic
def _gil_release(typingctx, state):
    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(ir.VoidType(), [I32])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "PyGILState_Release"), args)
        return context.get_dummy_value()

    return types.void(types.int32), codegen


def _timespec(builder: Any) -> Any:
    return cgutils.alloca_once(builder, ir.ArrayType(I64, 2))


@intrinsic
def monotonic_ns(typingctx):
    """CLOCK_MONOTONIC in nanoseconds."""

    def codegen(context, builder, signature, args):
        time = _timespec(builder)
        function_type = ir.FunctionType(I32, [I32, I8.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, function_type, "clock_gettime")
        builder.call(function, [I32(1), builder.bitcast(time, I8.as_pointer())])
        value = builder.load(time)
        seconds = builder.mul(builder.extract_value(value, 0), I64(1_000_000_000))
        return builder.add(seconds, builder.extract_value(value, 1))

    return types.int64(), codegen


@intrinsic
def sleep_ns(typingctx, nanoseconds):
    """Sleeps for less than a second."""

    def codegen(context, builder, signature, args):
        time = _timespec(builder)
        zero = builder.insert_value(ir.Constant(ir.ArrayType(I64, 2), None), I64(0), 0)
        builder.store(builder.insert_value(zero, args[0], 1), time)
        function_type = ir.FunctionType(I32, [I8.as_pointer(), I8.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, function_type, "nanosleep")
        builder.call(function, [builder.bitcast(time, I8.as_pointer()), ir.Constant(I8.as_pointer(), None)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _semaphore_call(name: str) -> Any:
    @intrinsic
    def call(typingctx, semaphore):
        def codegen(context, builder, signature, args):
            function_type = ir.FunctionType(I32, [I8.as_pointer()])
            function = cgutils.get_or_insert_function(builder.module, function_type, name)
            builder.call(function, [pointer(builder, args[0], I8)])
            return context.get_dummy_value()

        return types.void(types.int64), codegen

    return call


#: POSIX semaphores of one process; 32 zero bytes are a semaphore of value 0 on Linux.
semaphore_wait, semaphore_post = _semaphore_call("sem_wait"), _semaphore_call("sem_post")


def _socket_call(name: str) -> Any:
    num_arguments = {"sendmsg": 3, "recv": 4}[name]

    def codegen(context, builder, signature, args):
        types_ = [I32, I8.as_pointer(), *[I64] * (num_arguments - 3), I32]
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, types_), name)
        given = [builder.trunc(args[0], I32), pointer(builder, args[1], I8), *args[2:-1], builder.trunc(args[-1], I32)]
        return builder.call(function, given)

    return types.int64(*[types.int64] * num_arguments), codegen


@intrinsic
def send_message(typingctx, socket, message, flags):
    """``sendmsg``: bytes sent, or -1; `message` is the address of a struct msghdr."""
    return _socket_call("sendmsg")


@intrinsic
def receive_bytes(typingctx, socket, address, num_bytes, flags):
    """``recv``: bytes received, 0 if the peer has closed the connection, or -1."""
    return _socket_call("recv")


@intrinsic
def last_error(typingctx):
    """The thread's errno."""

    def codegen(context, builder, signature, args):
        function_type = ir.FunctionType(I32.as_pointer(), [])
        place = builder.call(cgutils.get_or_insert_function(builder.module, function_type, "__errno_location"), [])
        return builder.sext(builder.load(place), I64)

    return types.int64(), codegen


@device
def interrupted():
    """Runs pending Python signal handlers; True if one raised (KeyboardInterrupt). Only the main thread has any."""
    state = _gil_ensure()
    raised = _check_signals() != 0
    if raised:
        _clear_error()
    _gil_release(state)
    return raised
