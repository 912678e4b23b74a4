"""A rank's connection to its peers: control segment, context block, operations, failures, reset and close.

Everything above talks to kernels through `Runtime.run` and allocates symmetric memory through `Runtime.segment`. What
can go wrong while ranks wait for each other is turned into an exception here, once, for every operation.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from epcomm.device import control
from epcomm.device.cpu.launch import Pool, load_claim, load_leave
from epcomm.errors import (
    ClosedError,
    ConfigError,
    EpcommError,
    PeerFailedError,
    TimeoutError,
)
from epcomm.heap.cpu import SymmetricSegment
from epcomm.hosts.transport import connect_proxy
from epcomm.kernels.protocol.collectives import CollectiveRegions
from epcomm.kernels.target import Kernel, Target
from epcomm.operation import Context, Operation, OperationTexts, ParameterBlock
from epcomm.world.abort import AbortRegion
from epcomm.world.failures import awaited, error_found, mismatch_found
from epcomm.world.hub import Hub
from epcomm.world.liveness import watch_peers

LONGEST_TIMEOUT = 1e8  # seconds: three years; in nanoseconds it fits a word with room to spare
_SPINS_WITH_OWN_CORE, _SPINS_SHARING_CORES = 100, 20  # measured: best barrier times with and without idle cores


class Runtime:
    """One rank of one communicator. See DESIGN sections 5 and 6 for the contract."""

    def __init__(
        self, target: Target, hub: Hub, network: Any, regions: CollectiveRegions, num_programs: int, timeout: float
    ):
        self.target = target
        self.hub, self.rank, self.size, self.timeout = hub, hub.rank, hub.size, timeout
        self.nodes = hub.nodes if network is None else network.nodes
        self.generation = 1
        self.failure: EpcommError | None = None
        self.closed = False
        self._resettable: weakref.WeakSet[Any] = weakref.WeakSet()
        self._pool: Pool | None = None
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self._launch = target.launch
        size = regions.size
        self.control = self._guarded(lambda: SymmetricSegment(self.rank, size, (), self._allgather), size)
        target.start(num_programs, self.control.mapped, control.control_region_bytes(self.size))
        self._proxy = network or connect_proxy(
            hub, target.between_hosts, timeout, self.check, weakref.WeakMethod(self.fail)
        )
        self.transport = self._proxy.transport or target.transport
        self._proxy.register(self.control)
        self.collectives = self.control if target.shares_control else self.segment(size, regions.word_bytes)
        self._own = self.control.own.array(0, size)
        self._abort = AbortRegion(hub, self.control)
        self.texts = OperationTexts(self._own)
        self.context = self.new_context(sequenced=True)
        if num_programs > 1 and target.runs_on_threads:
            self._pool = Pool(num_programs - 1)
            self.context.words[control.POOL] = self._pool.address
        self.num_programs = num_programs
        self._watch_peers()
        _live.add(self)

    # ---- memory

    def segment(self, num_bytes: int, word_bytes: int, prefault: Sequence[tuple[int, int]] = ()) -> Any:
        """Collective: a new segment, see `Target.segment`; `prefault`: ranges (offset, bytes) to touch in advance."""
        segment = self._guarded(
            lambda: self.target.segment(self.rank, num_bytes, word_bytes, prefault, self._allgather), num_bytes
        )
        self._proxy.register(segment)
        return segment

    def _guarded(self, make: Callable[[], Any], num_bytes: int) -> Any:
        self.check()
        try:
            return make()
        except (OSError, MemoryError) as error:
            message = f"rank {self.rank}: {num_bytes} bytes of symmetric memory: {error}"
            raise self.fail(EpcommError(message)) from error

    def _allgather(self, payload: bytes, descriptors: Sequence[int] = ()) -> list[tuple[bytes, list[int]]]:
        """Everyone's payload and descriptors, by rank, outside of the kernels."""
        return self.hub.allgather(payload, descriptors, timeout=self.timeout, check=self.check)

    def new_context(self, *, sequenced: bool) -> Context:
        """A context block; one outside of the sequence (for send and recv) may run beside the others."""
        context = Context(self.target, control.CONTEXT_WORDS + 3 * self.size + control.WINDOW_WORDS)
        words = context.words
        words[control.RANK], words[control.SIZE] = self.rank, self.size
        shares_core = self.size > len(os.sched_getaffinity(0))
        words[control.SPINS] = _SPINS_SHARING_CORES if shares_core else _SPINS_WITH_OWN_CORE
        context.set_timeout(self.timeout)
        words[control.PEERS : -self.size] = [*self.collectives.bases, *self.collectives.network, *self.control.bases]
        words[control.IS_CLOSED] = self.closed
        words[control.NETWORK] = self._proxy.address
        self._contexts.add(context)
        self._start_generation(context, sequenced)
        return context

    def _start_generation(self, context: Context, sequenced: bool) -> None:
        context.words[control.GENERATION] = self.generation
        context.words[control.SEQUENCE] = (self.generation << control.GENERATION_SHIFT) if sequenced else 0
        context.words[[control.TICKET, control.LEFT]] = 0
        context.memory.publish()

    # ---- operations

    def operation(self, kernel: Kernel, args: ParameterBlock, text: str, keep: Any = None) -> Operation:
        """Binds a kernel and leaves its readable text where peers find it by the fingerprint."""
        self._require_no_capture(text)
        return Operation(kernel, args, text, self.texts.fingerprint(text), keep)

    def half_of(self, operation: Operation, kernel: Kernel) -> Operation:
        """A kernel that goes on with what an operation began, on the same parameters, outside of the sequence."""
        self._require_no_capture(operation.text)
        return Operation(kernel, operation.args, operation.text)

    def _require_no_capture(self, text: str) -> None:
        if self.target.stream.is_capturing():
            where = f"rank {self.rank}: {text}"
            raise self.reject(ConfigError(f"{where}: wanted such a call before the capture, which can't load it"))

    def run(self, operation: Operation, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0) -> int:
        """Runs an operation on this thread; the numbers are its call words.

        Returns `control.OK`, CAPACITY or BAD_VALUE, and raises for everything else.
        """
        status = self._launch(
            self.context.handle, operation.kernel, operation.handle, operation.fingerprint, a, b, c, d, e, f
        )
        return self.settle(status, operation, self.context) if status else status

    def run_within(self, seconds: float, operation: Operation, *values: int) -> int:
        """`run` with a deadline of its own."""
        self.context.set_timeout(seconds)
        try:
            return self.run(operation, *values)
        finally:
            self.context.set_timeout(self.timeout)

    def run_beside(self, context: Context, operation: Operation, a: int = 0, b: int = 0, c: int = 0) -> int:
        """`run` outside of the sequence, in a context of its own: beside whatever else is running."""
        status = self._launch(context.handle, operation.kernel, operation.handle, 0, a, b, c, 0, 0, 0)
        return self.settle(status, operation, context) if status else status

    def bind(self, operation: Operation, *values: int) -> Callable[[], int]:
        """`run` with everything resolved, for hot loops; it returns a status, which `settle` takes."""
        return self.target.bind(
            self.context.handle, operation.kernel, operation.handle, operation.fingerprint, values
        )

    def settle(self, status: int, operation: Operation, context: Context) -> int:
        """Returns a status that the operation itself deals with; raises the error that any other stands for."""
        if status in (control.OK, control.CAPACITY, control.BAD_VALUE):
            return status
        if status == control.OCCUPIED:
            where = f"rank {self.rank}: {operation.text}"
            raise self.reject(ConfigError(f"{where}: another thread is in an operation of the communicator"))
        raise self.error_of(status, operation.text, context)

    @property
    def sequence(self) -> str:
        """Generation and number of the operation that began last."""
        return f"{self.generation}.{_count(self.context)}"

    # ---- failures

    def check(self) -> None:
        """Raises what has gone wrong so far: here, at a peer, or with a peer's process."""
        if self.failure is not None:
            raise _again(self.failure)
        if self.closed:
            raise ClosedError(f"rank {self.rank}: the communicator is closed")
        if not hasattr(self, "context"):
            return  # it is being made
        if self._abort.is_raised(self.generation):
            raise self.error_of(control.ABORTED, "check", self.context)
        status = self.target.failure_before(self.context.handle)
        if status != control.OK:
            raise self.error_of(status, "check", self.context)

    def fail(self, error: EpcommError, reason: int = control.PEER_FAILED) -> EpcommError:
        """Makes the communicator failed, tells every peer why, and returns the error to raise."""
        if self.failure is None and not self.closed:
            self.failure = error
            self._abort.tell_everyone(f"{type(error).__name__}: {error}", self.generation, reason)
        return error

    def reject(self, error: EpcommError) -> EpcommError:
        """For an argument error found before anything was sent: peers learn of it, a world of one stays usable."""
        return error if self.size == 1 else self.fail(error)

    def abort(self, message: str) -> None:
        """Fails the communicator on all ranks; peers raise `PeerFailedError` quoting `message`."""
        self.fail(PeerFailedError(message))

    def error_of(self, status: int, text: str, context: Context) -> BaseException:
        """The exception for a status that stopped an operation; the communicator is failed by it."""
        where = f"rank {self.rank}: {text}"
        sequence = _count(context)
        if sequence:
            where += f" (sequence {sequence})"
        if status == control.CLOSED:
            return ClosedError(f"{where}: the communicator is closed, or belongs to the parent of this fork")
        if status == control.ABORTED:
            return self._abort_error(where, context)
        peer = int(context.words[control.FAILED_PEER])
        if status == control.MISMATCH:
            other = self._abort.peer_text(peer, int(context.words[control.FAILED_FOUND])) or "another operation"
            return self.fail(mismatch_found(where, text, peer, other), control.PEER_MISMATCH)
        if status == control.INTERRUPTED:
            self.fail(PeerFailedError(f"{where}: interrupted while it waited for {awaited(context.words)}"))
            return KeyboardInterrupt()
        return self.fail(error_found(status, where, context.words))

    def _abort_error(self, where: str, context: Context) -> EpcommError:
        if self.failure is not None:
            return _again(self.failure)
        if self._abort.is_own_stop():
            return self.fail(error_found(control.TIMEOUT, where, context.words))
        self.failure = self._abort.error(where)  # peers know already: whoever failed first told everyone
        return self.failure

    # ---- liveness

    def _watch_peers(self) -> None:
        own = os.pidfd_open(os.getpid())
        try:
            messages = self._allgather(b"", [own])
        finally:
            os.close(own)
        pidfds = {rank: received[0] for rank, (_, received) in enumerate(messages) if received}
        os.close(pidfds.pop(self.rank))
        this = weakref.ref(self)

        def generation() -> int | None:
            runtime = this()
            return None if runtime is None or runtime.closed else runtime.generation

        stop = watch_peers(self._abort, self.hub, pidfds, generation)
        self._stop_watching = weakref.finalize(self, stop)  # also if it is never closed
        self._stop_watching.atexit = False

    # ---- reset and close

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Holds operations off, once the thread that may be in one has left it."""
        deadline = time.monotonic() + self.timeout
        while not load_claim()(self.context.words.ctypes.data):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: another thread is in an operation and does not leave it")
            time.sleep(0.001)
        try:
            yield
        finally:
            load_leave()(self.context.words.ctypes.data)

    def on_reset(self, member: Any) -> None:
        """Registers an object whose ``start_generation(generation)`` is called by every reset while it lives."""
        self._resettable.add(member)

    def reset(self, timeout: float | None = None) -> None:
        """Collective: revives a failed communicator. Older routings, results and works are outdated.

        Raises `PeerLostError` if a rank's process is gone: make a new communicator of the others instead.
        """
        if self.closed:
            raise ClosedError(f"rank {self.rank}: the communicator is closed")
        limit = self.timeout if timeout is None else timeout
        with self._exclusively():
            self.hub.generation = 2 * self.generation + 1  # not to be taken for an exchange that a failure cut short
            self.hub.barrier(timeout=limit, check=lambda: None)  # every rank has left its operations
            self.generation += 1
            self._proxy.settle(self.generation, limit)
            self.hub.generation = 2 * self.generation
            self.failure = None
            self._own[control.FAILURE : control.FAILURE + 8 * control.FAILURE_WORDS] = 0
            for context in list(self._contexts):
                self._start_generation(context, sequenced=bool(context.words[control.SEQUENCE]))
            for member in list(self._resettable):
                member.start_generation(self.generation)
            try:
                self.hub.barrier(timeout=limit, check=lambda: None)  # every rank ignores what was raised before
            except EpcommError as error:
                raise self.fail(error) from None

    def close(self, barrier: Callable[[], None] | None) -> None:
        """Leaves the communicator; with `barrier` (collective) all ranks leave together. Idempotent."""
        if self.closed:
            return
        is_together = False
        try:
            if barrier is not None and self.failure is None:
                barrier()
                # nobody reads my control region after this; a peer that was faster may have ended already
                self.hub.barrier(timeout=self.timeout, check=lambda: None)
                is_together = True
        finally:
            self.closed = True
            for context in list(self._contexts):
                context.words[control.IS_CLOSED] = 1
            self._stop_watching()
            self._proxy.close(is_together)
            self.hub.close()
            if self._pool is not None:
                with self._exclusively():
                    self._pool.stop()
            _live.discard(self)


def _again(error: EpcommError) -> EpcommError:
    """A new exception like `error`, so that each raise has its own traceback."""
    return copy.copy(error)


def _count(context: Context) -> int:
    """Operations begun in this generation."""
    return int(context.words[control.SEQUENCE]) & ((1 << control.GENERATION_SHIFT) - 1)


_live: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The parent is the rank; a child that used its memory would speak in its name."""
    for runtime in list(_live):
        runtime.closed = True
        runtime.hub.close()  # this process's copies; the parent's connections stay
        for context in list(runtime._contexts):
            context.words[control.IS_CLOSED] = 1


os.register_at_fork(after_in_child=_after_fork_in_child)
