"""From Python into a kernel: `run` begins an operation and runs its programs, on this thread and the rank's pool.

The pool's threads live as long as the communicator. Each waits for a launch (polling first, then asleep on a semaphore
of its own), runs its program of it, and counts itself done.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from epcomm.device import control
from epcomm.device.cpu.compile import KERNEL_SIGNATURE, device, host_function
from epcomm.device.cpu.memory import (
    I64,
    compare_exchange,
    copy_bytes,
    exchange,
    fetch_add,
    load_acquire,
    pointer,
    set_word,
    store_release,
    word,
)
from epcomm.device.cpu.peers import aborted, raise_abort, stop_this_rank, stopped_itself
from epcomm.device.cpu.system import pause, semaphore_post, semaphore_wait, yield_core
from epcomm.device.cpu.waiting import push_header

# pool block (words): the launch in progress, then one record per thread
_LAUNCH, _PROGRAM, _CTX, _ARGS, _NUM_THREADS, _DONE, _STATUS, _STOP = range(8)
_THREADS = 16
_THREAD_WORDS = 16  # per thread: asleep flag, then its semaphore (32 bytes)
_POLLS_BEFORE_SLEEP = 3000

#: words of an operation's parameter block that `run` fills in for each call; what they mean is the kernel's protocol
CALL_WORDS = 6
#: the word behind them: 1 if only program 0 has anything to do, so that the pool can sleep on
IS_SINGLE = CALL_WORDS


@intrinsic
def call_kernel(typingctx, address, ctx, args, program, num_programs):
    """Calls a compiled kernel by its address."""

    def codegen(context, builder, signature, arguments):
        function_type = ir.FunctionType(I64, [I64] * 4)
        return builder.call(pointer(builder, arguments[0], function_type), arguments[1:])

    return KERNEL_SIGNATURE.return_type(*[types.int64] * 5), codegen


@device
def _run_on_pool(pool, kernel, ctx, args):
    """All programs of one launch; returns the status that stopped one of them, OK if none was stopped."""
    num_threads = word(pool, _NUM_THREADS)
    set_word(pool, _PROGRAM, kernel)
    set_word(pool, _CTX, ctx)
    set_word(pool, _ARGS, args)
    set_word(pool, _STATUS, control.OK)
    set_word(pool, _DONE, 0)
    exchange(pool + 8 * _LAUNCH, word(pool, _LAUNCH) + 1)  # RAW: the threads see the words above
    _wake(pool)
    status = call_kernel(kernel, ctx, args, 0, num_threads + 1)
    _stop_the_others(ctx, status)
    polls = 0
    while load_acquire(pool + 8 * _DONE) < num_threads:  # bounded: every wait inside of a program is
        polls += 1
        if polls < 100:
            pause()
        else:
            yield_core()
    other = word(pool, _STATUS)
    return other if status == control.OK or (status == control.ABORTED and other != control.OK) else status


@device
def _stop_the_others(ctx, status):
    """Lets this rank's other programs leave their waits when one was stopped: SIGINT, say, reaches only program 0."""
    if status != control.OK and status != control.CAPACITY and status != control.BAD_VALUE:
        stop_this_rank(ctx)


@device
def _wake(pool):
    for index in range(word(pool, _NUM_THREADS)):
        record = pool + 8 * (_THREADS + _THREAD_WORDS * index)
        if exchange(record, 0) == 1:
            semaphore_post(record + 8)


@host_function("pool_thread", types.void(types.int64, types.int64))
def _pool_thread(pool, index):
    record = pool + 8 * (_THREADS + _THREAD_WORDS * index)
    launch = 0
    while True:
        polls = 0
        while load_acquire(pool + 8 * _LAUNCH) == launch:
            polls += 1
            if polls < 100:
                pause()
            elif polls < _POLLS_BEFORE_SLEEP:
                yield_core()
            else:
                exchange(record, 1)
                # a launch that came before the flag was up won't post; one that took the flag down will
                if load_acquire(pool + 8 * _LAUNCH) == launch or exchange(record, 0) == 0:
                    semaphore_wait(record + 8)
                polls = 0
        launch += 1
        if word(pool, _STOP):
            return
        status = call_kernel(
            word(pool, _PROGRAM), word(pool, _CTX), word(pool, _ARGS), index + 1, word(pool, _NUM_THREADS) + 1
        )
        if status == control.ABORTED:
            compare_exchange(pool + 8 * _STATUS, control.OK, status)  # what stopped another one says more
        elif status != control.OK:
            store_release(pool + 8 * _STATUS, status)
        _stop_the_others(word(pool, _CTX), status)
        fetch_add(pool + 8 * _DONE, 1)


@host_function("pool_stop", types.void(types.int64))
def _pool_stop(pool):
    set_word(pool, _STOP, 1)
    exchange(pool + 8 * _LAUNCH, word(pool, _LAUNCH) + 1)
    _wake(pool)


def _run_thread(words: np.ndarray, index: int) -> None:
    """A thread's life; it keeps the block alive."""
    _pool_thread()(words.ctypes.data, index)


def _end_threads(words: np.ndarray) -> None:
    _pool_stop()(words.ctypes.data)


class Pool:
    """Threads that run programs 1.. of every launch of one rank; the calling thread runs program 0."""

    def __init__(self, num_threads: int):
        self.words = np.zeros(_THREADS + _THREAD_WORDS * num_threads, dtype=np.int64)
        self.address = self.words.ctypes.data
        self.words[_NUM_THREADS] = num_threads
        _pool_thread()
        _pool_stop()
        self._threads = [
            threading.Thread(target=_run_thread, args=(self.words, i), name=f"epcomm-program-{i + 1}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end_threads, self.words)  # also if nobody calls stop
        self._end.atexit = False

    def stop(self) -> None:
        """Ends the threads; no launch may be in progress."""
        self._end()
        for thread in self._threads:
            thread.join()


# a bound call (words): what `run` takes, all of it known in advance
BOUND_CTX, BOUND_KERNEL, BOUND_ARGS, BOUND_FINGERPRINT, BOUND_VALUES = range(5)
BOUND_WORDS = BOUND_VALUES + CALL_WORDS


@device
def _run(ctx, kernel, args, fingerprint):
    if aborted(ctx):
        return control.ABORTED
    set_word(ctx, control.DEADLINE_NS, 0)
    if fingerprint != 0:
        set_word(ctx, control.FINGERPRINT, fingerprint)
        set_word(ctx, control.SEQUENCE, word(ctx, control.SEQUENCE) + 1)
        push_header(ctx)
    pool = word(ctx, control.POOL)
    if pool == 0 or word(args, IS_SINGLE):
        status = call_kernel(kernel, ctx, args, 0, 1)
    else:
        status = _run_on_pool(pool, kernel, ctx, args)
    if status == control.OK and word(ctx, control.NETWORK) != 0 and stopped_itself(ctx):
        return control.ABORTED  # it waited for nothing more, but not all that it had to send was sent
    return status


@device
def _claim(ctx):
    """True unless another thread is in an operation of this context."""
    return exchange(ctx + 8 * control.IS_OCCUPIED, 1) == 0


@device
def _enter(ctx):
    if word(ctx, control.IS_CLOSED):
        return control.CLOSED
    return control.OK if _claim(ctx) else control.OCCUPIED


@device
def _leave(ctx):
    store_release(ctx + 8 * control.IS_OCCUPIED, 0)


@host_function("run", types.int64(*[types.int64] * (4 + CALL_WORDS)))
def load_run(ctx, kernel, args, fingerprint, a, b, c, d, e, f):
    """Begins an operation: ``run(ctx, kernel, args, fingerprint, *call_words) -> status``.

    A fingerprint of 0 marks an operation outside of the sequence (send, recv): it has no header.
    """
    status = _enter(ctx)
    if status != control.OK:
        return status
    set_word(args, 0, a)
    set_word(args, 1, b)
    set_word(args, 2, c)
    set_word(args, 3, d)
    set_word(args, 4, e)
    set_word(args, 5, f)
    status = _run(ctx, kernel, args, fingerprint)
    _leave(ctx)
    return status


@host_function("run_bound", types.int64(types.int64))
def load_run_bound(call):
    """`run` of a bound call, in less than half of the time: Numba unpacks one argument instead of ten."""
    ctx, args = word(call, BOUND_CTX), word(call, BOUND_ARGS)
    status = _enter(ctx)
    if status != control.OK:
        return status
    copy_bytes(args, call + 8 * BOUND_VALUES, 8 * CALL_WORDS)
    status = _run(ctx, word(call, BOUND_KERNEL), args, word(call, BOUND_FINGERPRINT))
    _leave(ctx)
    return status


@host_function("claim", types.boolean(types.int64))
def load_claim(ctx):
    """``claim(ctx)``: holds operations off, closed or not; False if a thread is in one."""
    return _claim(ctx)


@host_function("leave", types.void(types.int64))
def load_leave(ctx):
    """``leave(ctx)``: gives a claimed context back."""
    _leave(ctx)


@host_function("raise_abort", types.void(types.int64, types.int64))
def load_raise_abort(address, value):
    """``raise_abort(address, value)``: raises an abort word unless an earlier cause of this generation is there."""
    raise_abort(address, value)


