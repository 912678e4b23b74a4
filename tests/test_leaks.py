"""Nothing is left behind: by hundreds of communicators in one process, and by processes after any end of a job."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from failure_cases import X, raised_by

import epcomm
from epcomm.errors import MismatchError, PeerFailedError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.ranks import run_ranks


def resources() -> dict[str, int]:
    """What this process holds."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        segments = sum("memfd:epcomm" in line for line in maps)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "native threads": len(os.listdir("/proc/self/task")),
        "segments": segments,
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(wanted: dict[str, int] | None = None) -> dict[str, int]:
    """The resources once they are as wanted or, if that takes too long or nothing is wanted, don't change any more."""
    deadline, before = time.monotonic() + 5.0, wanted
    while (after := resources()) != before and time.monotonic() < deadline:
        before = wanted or after
        time.sleep(0.05)
    return after


# ---- create and close


def use_and_close(num_threads: int | None) -> None:
    with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
        peer = (comm.rank + 1) % comm.size
        comm.allreduce(torch.ones(3))
        work = comm.allreduce(torch.ones(50_000), async_op=True)
        comm.allgather(torch.ones(70_000))
        sent = comm.send(X, peer, async_op=True) if comm.size > 1 else None
        if sent is not None:
            comm.recv(torch.empty(4), (comm.rank - 1) % comm.size)
            sent.wait()
        work.wait()


def fail_and_close(num_threads: int | None) -> None:
    with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
        comm.allreduce(torch.ones(3), async_op=True)
        assert isinstance(
            raised_by(comm.barrier if comm.rank else comm.allgather, *([X] * (not comm.rank))).error, MismatchError
        )


def leave_with_an_error(num_threads: int | None) -> None:
    error = None
    try:
        with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
            if comm.rank == 0:
                raise ValueError("on purpose")
            comm.allreduce(torch.ones(50_000), async_op=True).wait()
    except (ValueError, PeerFailedError) as caught:
        error = caught
    assert error is not None


def reset_and_close(num_threads: int | None) -> None:
    with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
        for _ in range(3):
            comm.reset()
            comm.barrier()


def dispatch_and_close(num_threads: int | None) -> None:
    """Handles of both modes, one of which is left open, and results that outlive all of it."""
    with epcomm.init(timeout=20.0, num_threads=num_threads) as comm:
        results = []
        for mode in ("throughput", "latency"):
            ep = comm.expert_parallel(num_experts=6, topk=2, hidden=256, max_tokens=64, dtype=torch.float32, mode=mode)
            for _ in range(2):
                routing = ep.route(torch.tensor([[0, 5], [3, -1], [2, 2]]))
                received = ep.dispatch(torch.ones(3, 256), routing)
                results.append(ep.combine(received.x, received))
            results.append(received)
            if mode == "latency":
                ep.close()
    assert results[0].shape == (3, 256)


CYCLES: dict[str, Callable[[int | None], None]] = {
    "use": use_and_close,
    "mismatch": fail_and_close,
    "error": leave_with_an_error,
    "reset": reset_and_close,
    "dispatch": dispatch_and_close,
}


def repeat(name: str, times: int, num_threads: int | None) -> tuple[dict[str, int], dict[str, int], int]:
    for _ in range(max(15, times // 5)):  # allocators and caches settle
        CYCLES[name](num_threads)
    before, resident = settled(), resident_bytes()
    for _ in range(times):
        CYCLES[name](num_threads)
    return before, settled(before), resident_bytes() - resident


@pytest.mark.parametrize(
    "name, times, world, num_threads",
    [
        ("use", 300, 3, None),
        ("use", 300, 1, 1),
        ("use", 60, 2, 2),
        ("mismatch", 40, 3, None),
        ("error", 40, 3, None),
        ("error", 40, 2, 2),
        ("reset", 40, 2, 2),
        ("dispatch", 100, 3, None),
        ("dispatch", 40, 2, 2),
    ],
)
def test_cycles(name: str, times: int, world: int, num_threads: int | None) -> None:
    for before, after, growth in run_ranks(repeat, world, name, times, num_threads, timeout=100.0):
        assert after == before
        assert growth < 8 << 20, f"{growth >> 10} KiB more resident memory"


def test_cycles_in_threads() -> None:
    """All ranks share one process: it is counted when none of them runs."""

    def body() -> Any:
        for _ in range(40):
            use_and_close(None)
        return None

    def count() -> dict[str, int]:
        return settled()

    run_ranks(body, 3, ranks="threads")
    (before,) = run_ranks(count, 1)
    run_ranks(body, 3, ranks="threads")
    (after,) = run_ranks(count, 1)
    assert after == before


def test_init_that_fails() -> None:
    def body() -> Any:
        def fail() -> None:
            if epcomm.world.rendezvous.launched_rank.get().rank == 0:
                assert isinstance(raised_by(epcomm.init, timeout=0.02).error, EpcommTimeoutError)

        fail()
        before = settled()
        for _ in range(20):
            fail()
        return before, settled(before)

    for before, after in run_ranks(body, 2):
        assert after == before


# ---- the end of a job

JOB = """
import os, signal, sys, time
import epcomm

def body(how, folder):
    import torch
    comm = epcomm.init(timeout=60.0)
    comm.allreduce(torch.ones(100_000))
    with open(os.path.join(folder, f"rank-{comm.rank}"), "w") as file:
        file.write(str(os.getpid()))
    comm.barrier()
    if how == "exception" and comm.rank == 1:
        raise ValueError("on purpose")
    if how == "kill a rank" and comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit" and comm.rank == 1:
        os._exit(3)
    if how != "normal":
        while True:
            comm.check()
            time.sleep(0.01)
    comm.close()

try:
    epcomm.launch(body, 2, sys.argv[1], sys.argv[2])
except Exception as error:
    print(type(error).__name__, error)
"""


def running(pid: int) -> bool:
    """False once it has ended; whether somebody has collected its exit code doesn't matter."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_job(how: str, folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """Starts the job and returns it with its ranks, once they all run."""
    job = subprocess.Popen([sys.executable, "-c", JOB, how, str(folder)], stdout=subprocess.PIPE, text=True)
    files = [folder / f"rank-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60.0
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.02)
    return job, [int(file.read_text()) for file in files]


SLOW = pytest.mark.slow
ENDS = ["normal", "exception", "kill a rank", "kill all", "kill the job"]
ENDS += [pytest.param("exit", marks=SLOW), pytest.param("kill all ranks", marks=SLOW)]


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left(how: str, tmp_path: Path) -> None:
    job, pids = start_job(how, tmp_path)
    victims = {"kill all ranks": pids, "kill all": [*pids, job.pid], "kill the job": [job.pid]}.get(how, [])
    try:
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        output, _ = job.communicate(timeout=30.0)
        wanted = {"normal": "", "exception": "ValueError on purpose", "exit": "exited with code 3"}
        if how in wanted:
            assert wanted[how] in output and (output == "") == (how == "normal")
        elif "rank" in how:
            assert "PeerLostError" in output and "SIGKILL" in output
        deadline = time.monotonic() + 10.0
        while any(running(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [pid for pid in pids if running(pid)]
        assert not [name for name in os.listdir("/dev/shm") if "epcomm" in name]
    finally:
        for pid in [*pids, job.pid]:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
        job.wait()
