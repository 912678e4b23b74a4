"""Signals and waits: monotone 64-bit words, acquire and release, with a deadline, an abort word and a mismatch check.

A waiter first polls with pauses, then yields its core on every poll, and after a while sleeps between polls: worlds
larger than the machine stay fast, and a rank that waits for a computing peer leaves it the core.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from epcomm.device import control
from epcomm.device.cpu.compile import device
from epcomm.device.cpu.memory import (
    I8,
    I32,
    I64,
    compare_exchange,
    fence,
    load64,
    load_acquire,
    pointer,
    set_word,
    store64,
    store_release,
    word,
)

_YIELDS_BEFORE_SLEEP = 4000  # about 2 ms of sched_yield on an idle core
_SLEEP_NS = 100_000
_CHECK_SIGNALS_NS = 50_000_000


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


@device
def _interrupted():
    """Runs pending Python signal handlers; True if one raised (KeyboardInterrupt). Only the main thread has any."""
    state = _gil_ensure()
    raised = _check_signals() != 0
    if raised:
        _clear_error()
    _gil_release(state)
    return raised


@device
def peer(ctx, rank):
    """Base address of `rank`'s segment of the collectives."""
    return word(ctx, control.PEERS + rank)


@device
def control_region(ctx, rank):
    """Base address of `rank`'s control region."""
    return word(ctx, control.PEERS + word(ctx, control.SIZE) + rank)


@device
def aborted(ctx):
    """True once this rank's abort word was raised in this generation or a later one."""
    own = control_region(ctx, word(ctx, control.RANK))
    return (load_acquire(own + control.ABORT_WORD) >> control.GENERATION_SHIFT) >= word(ctx, control.GENERATION)


@device
def raise_abort(address, value):
    """Raises the abort word at `address` to `value` unless this generation's first cause is already there."""
    while True:
        found = load_acquire(address)
        if (found >> control.GENERATION_SHIFT) >= (value >> control.GENERATION_SHIFT):
            return
        if compare_exchange(address, found, value) == found:
            return


@device
def push_header(ctx):
    """Tells every peer which operation this rank is in: (sequence, fingerprint) into its ring of this rank."""
    me, sequence, fingerprint = word(ctx, control.RANK), word(ctx, control.SEQUENCE), word(ctx, control.FINGERPRINT)
    slot = control.HEADERS + me * control.HEADER_BYTES + (sequence % control.HEADER_RING) * 16
    for rank in range(word(ctx, control.SIZE)):
        if rank != me and control_region(ctx, rank) != 0:  # 0: it is on another host
            store64(control_region(ctx, rank) + slot + 8, fingerprint)
            store_release(control_region(ctx, rank) + slot, sequence)


@device
def _other_fingerprint(ctx, rank):
    """What `rank` is calling under this rank's sequence number, or 0 if that is the same operation or not known yet."""
    sequence = word(ctx, control.SEQUENCE)
    if sequence == 0:
        return 0
    own = control_region(ctx, word(ctx, control.RANK))
    slot = own + control.HEADERS + rank * control.HEADER_BYTES + (sequence % control.HEADER_RING) * 16
    if load_acquire(slot) != sequence:
        return 0
    found = load64(slot + 8)
    # the peer may be overwriting the entry with a later operation: only an unchanged entry counts
    if found == word(ctx, control.FINGERPRINT) or load_acquire(slot) != sequence:
        return 0
    return found


@device
def stopped(ctx, status, rank, site, wanted, found):
    """Records why a program stops; returns the status. (Where it was aborted doesn't matter: something else did it.)"""
    if status == control.ABORTED:
        return status
    set_word(ctx, control.FAILED_PEER, rank)
    set_word(ctx, control.FAILED_SITE, site)
    set_word(ctx, control.FAILED_WANTED, wanted)
    set_word(ctx, control.FAILED_FOUND, found)
    return status


@device
def _wait_slowly(ctx, address, value, rank, site):
    for _ in range(word(ctx, control.SPINS)):
        pause()
        if load_acquire(address) >= value:
            return control.OK
    started = monotonic_ns()
    if word(ctx, control.DEADLINE_NS) == 0:
        set_word(ctx, control.DEADLINE_NS, started + word(ctx, control.TIMEOUT_NS))
    deadline = word(ctx, control.DEADLINE_NS)
    signals_checked = started
    polls = 0
    while load_acquire(address) < value:
        if aborted(ctx) and load_acquire(address) < value:  # what a peer raised before it failed counts
            return stopped(ctx, control.ABORTED, rank, site, value, load_acquire(address))
        other = _other_fingerprint(ctx, rank)
        if other != 0:
            return stopped(ctx, control.MISMATCH, rank, site, value, other)
        now = monotonic_ns()
        if now > deadline:
            return stopped(ctx, control.TIMEOUT, rank, site, value, load_acquire(address))
        if now - signals_checked > _CHECK_SIGNALS_NS:
            signals_checked = now
            if _interrupted():
                return stopped(ctx, control.INTERRUPTED, rank, site, value, load_acquire(address))
        polls += 1
        if polls < _YIELDS_BEFORE_SLEEP:
            yield_core()
        else:
            sleep_ns(_SLEEP_NS)
    return control.OK


@device
def wait(ctx, address, value, rank, site):
    """Waits until the word at `address`, raised by `rank`, is >= `value`; `site` says which edge that closes."""
    if load_acquire(address) >= value:
        return control.OK
    return _wait_slowly(ctx, address, value, rank, site)


@device
def meet(ctx, address, value, rank, site):
    """`wait`, for the first wait on a peer in an operation: fails if the peer is in another one."""
    status = wait(ctx, address, value, rank, site)
    if status == control.OK:
        other = _other_fingerprint(ctx, rank)
        if other != 0:
            return stopped(ctx, control.MISMATCH, rank, site, value, other)
    return status


@device
def signal(address, value):
    """Raises the word at `address`, after every earlier cached store of this program."""
    store_release(address, value)


@device
def signal_after_streaming(address, value):
    """Raises the word at `address`, after every earlier store of this program, streaming ones included."""
    fence()
    store_release(address, value)
