"""Watches the processes of peers: one thread per process, however many communicators there are.

Each rank passes its peers a pidfd of itself, which becomes readable when the process ends, however it ends.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


class _Monitor:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage collection may call `forget` anywhere
        self._watched: dict[int, Callable[[], None]] = {}  # pidfd -> what to do when its process ends
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = -1, -1

    def watch(self, pidfd: int, on_exit: Callable[[], None]) -> None:
        """Calls `on_exit` once, from the monitor's thread, when the process behind `pidfd` has ended."""
        with self._lock:
            self._watched[pidfd] = on_exit
            if self._thread is None:
                self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._thread = threading.Thread(target=self._run, name="epcomm-monitor", daemon=True)
                self._thread.start()
            else:
                os.write(self._wake_write, b"w")

    def forget(self, pidfds: list[int]) -> None:
        """Stops watching and closes the descriptors. The thread ends with the last one."""
        with self._lock:
            for pidfd in pidfds:
                if self._watched.pop(pidfd, None) is not None:
                    os.close(pidfd)
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
                for pidfd in list(self._watched):
                    poller.register(pidfd, select.POLLIN)
            events = poller.poll()
            ended = []
            with self._lock:
                for descriptor, _ in events:
                    if descriptor == self._wake_read:
                        os.read(self._wake_read, 4096)
                    elif descriptor in self._watched:
                        ended.append(self._watched.pop(descriptor))
                        os.close(descriptor)
            for on_exit in ended:
                on_exit()


_monitor = _Monitor()
watch, forget = _monitor.watch, _monitor.forget


def _after_fork_in_child() -> None:
    global _monitor, watch, forget
    _monitor = _Monitor()  # the thread did not survive, and the descriptors belong to the parent's ranks
    watch, forget = _monitor.watch, _monitor.forget


os.register_at_fork(after_in_child=_after_fork_in_child)
