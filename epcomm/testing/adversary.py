"""Disturbs ranks on purpose, so that a missing wait shows: random pauses around operations and inside of kernels."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_LONGEST_STOP = 0.004
_LONGEST_GAP = 0.02


class Pauses:
    """Sleeps for random times; each rank with a sequence of its own, the same in every run."""

    def __init__(self, seed: int, rank: int, longest: float = 0.002):
        self._random = random.Random(f"{seed}/{rank}")
        self._longest = longest

    def __call__(self) -> None:
        """Half of the time nothing, else a pause of up to `longest` seconds."""
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self._longest)


def delay_operations(communicator: Any, seed: int, longest: float = 0.002) -> None:
    """From now on every operation of this rank, each phase of a split one included, begins and ends with a pause."""
    runtime, pause = communicator._runtime, Pauses(seed, communicator.rank, longest)

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            pause()
            try:
                return call(*args, **kwargs)
            finally:
                pause()

        return run

    bind = runtime.bind
    runtime.run, runtime.bind = delayed(runtime.run), lambda *args: delayed(bind(*args))


@contextlib.contextmanager
def random_stops(processes: Sequence[subprocess.Popen[bytes]], seed: int) -> Iterator[None]:
    """While the context is open, stops one of the processes at a time for up to a few milliseconds."""
    ended = threading.Event()

    def disturb() -> None:
        choose = random.Random(seed)
        while not ended.wait(choose.random() * _LONGEST_GAP):
            process = choose.choice(processes)
            process.send_signal(signal.SIGSTOP)  # does nothing if it has ended
            time.sleep(choose.random() * _LONGEST_STOP)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=disturb, name="epcomm-random-stops")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
