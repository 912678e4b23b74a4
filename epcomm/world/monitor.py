"""Watches descriptors for peers: one thread per process, however many communicators there are.

Each rank passes its peers of one host a pidfd of itself, which becomes readable when the process ends, however it ends.
With other hosts it has connections.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable


class _Monitor:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection may call `forget` anywhere
        self._watched: dict[int, Callable[[], bool]] = {}  # descriptor -> what to do when it is readable
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1

    def watch(self, descriptor: int, on_readable: Callable[[], bool]) -> None:
        """Calls `on_readable` from the monitor's thread when `descriptor` is readable, until it returns False."""
        with self._lock:
            self._watched[descriptor] = on_readable
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name="epcomm-monitor", daemon=True)
                self._thread.start()
            else:
                os.write(self._wake_write, b"w")

    def forget(self, descriptors: Iterable[int]) -> None:
        """Stops watching descriptors, which the caller may then close. The thread ends with the last one."""
        with self._lock:
            for descriptor in descriptors:
                self._watched.pop(descriptor, None)
            if self._thread is not None:
                os.write(self._wake_write, b"f")
            thread, last = self._thread, not self._watched
        if thread is not None and last and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while True:
            poller = select.poll()
            with self._lock:
                if not self._watched:
                    os.close(self._wake_read)
                    os.close(self._wake_write)
                    self._thread = None
                    return
                poller.register(self._wake_read, select.POLLIN)
                for descriptor in list(self._watched):
                    poller.register(descriptor, select.POLLIN)
            poller.poll()
            with self._lock:  # looks again: meanwhile a descriptor may have been closed, and its number used again
                ready = [descriptor for descriptor, _ in poller.poll(0)]
                if self._wake_read in ready:
                    os.read(self._wake_read, 4096)
                handlers = [(each, self._watched.get(each)) for each in ready]
            for descriptor, on_readable in handlers:
                if on_readable is not None and not on_readable():
                    with self._lock:
                        if self._watched.get(descriptor) is on_readable:
                            del self._watched[descriptor]


_monitor = _Monitor()
watch, forget = _monitor.watch, _monitor.forget


def _after_fork_in_child() -> None:
    global _monitor, watch, forget
    _monitor = _Monitor()  # the thread did not survive, and the descriptors belong to the parent's ranks
    watch, forget = _monitor.watch, _monitor.forget


os.register_at_fork(after_in_child=_after_fork_in_child)
