"""One rank's side of a benchmark world: gloo, MPI and epcomm in the same process.

`world.py` starts `python -m benchmarks.rank FOLDER` once per rank, under mpirun or as plain processes. The folder
holds the job and takes everything that comes back: `events.jsonl` from rank 0, `result-R.pkl`, `error-R.txt`,
`stack-R.txt`.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gate import Gate


class World:
    """What a bench function gets: its rank, the libraries that are there, and a way to report.

    `mpi` is mpi4py's world communicator or None; `absent` says why a library is not there.
    """

    def __init__(self, folder: Path, rank: int, size: int, deadline: float, absent: dict[str, str]):
        self.folder, self.rank, self.size = folder, rank, size
        self.absent = dict(absent)
        self.mpi = None
        if "mpi" not in absent:
            import mpi4py

            mpi4py.rc.thread_level = "funneled"  # the default, multiple, takes a lock in every call
            from mpi4py import MPI

            self.mpi = MPI.COMM_WORLD
        timeout = datetime.timedelta(seconds=deadline)
        self.store = _rendezvous(folder, rank, size, timeout)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("gloo", self.store), rank=rank, world_size=size, timeout=timeout
        )
        self.gate = Gate(folder / "gate", rank, size, deadline)
        self._epcomm: Any = None

    @property
    def epcomm(self) -> Any:
        """The epcomm communicator of this world, made on first use; None where the package cannot be used."""
        if self._epcomm is None and "epcomm" not in self.absent:
            reason = None
            try:
                import epcomm

                self._epcomm = epcomm.init(
                    store=dist.PrefixStore("epcomm", self.store), rank=self.rank, world_size=self.size
                )
            except (ImportError, AttributeError) as error:
                reason = f"{type(error).__name__}: {error}"
            reasons = [text for text in self.gather(reason) if text]
            if reasons:
                self._epcomm, self.absent["epcomm"] = None, reasons[0]
        return self._epcomm

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def emit(self, kind: str, payload: Any) -> None:
        """Rank 0: send an event to the parent, which sees it at once and keeps it even if the world hangs later."""
        if self.rank == 0:
            with open(self.folder / "events.jsonl", "a", encoding="utf-8") as events:
                events.write(json.dumps({"kind": kind, "payload": payload}) + "\n")

    def progress(self, done: int, total: int, text: str) -> None:
        """Rank 0: tell the parent how far the bench is."""
        self.emit("progress", {"done": done, "total": total, "text": text})

    def close(self) -> None:
        """Leave all libraries; collective."""
        for name, reason in self.absent.items():
            self.emit("absent", {"name": name, "reason": reason})
        if self._epcomm is not None:
            self._epcomm.close()
        dist.destroy_process_group()
        self.gate.close()


def _rendezvous(folder: Path, rank: int, size: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A TCPStore on localhost whose port rank 0 chooses and leaves in the folder."""
    note = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        partial = folder / "port.partial"
        partial.write_text(str(store.port))
        partial.rename(note)
        return store
    end = time.monotonic() + timeout.total_seconds()
    while not note.exists():
        if time.monotonic() > end:
            raise TimeoutError("rank 0 did not publish its store's port")
        time.sleep(0.01)
    return dist.TCPStore(
        "127.0.0.1", int(note.read_text()), size, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _die_with_parent() -> None:
    """Have the kernel kill this rank when the process that started it ends, however it ends."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(folder: Path) -> None:
    """Run the folder's job as one rank."""
    _die_with_parent()
    job = pickle.loads((folder / "job.pkl").read_bytes())
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("BENCHMARK_RANK", "0")))
    (folder / f"alive-{rank}").touch()
    with open(folder / f"stack-{rank}.txt", "w") as stacks:
        faulthandler.dump_traceback_later(job["deadline"], exit=True, file=stacks)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job["size"]))
        try:
            bench, arguments = pickle.loads(job["call"])
            world = World(folder, rank, job["size"], job["deadline"], job["absent"])
            result = bench(world, *arguments)
            world.close()
            partial = folder / f"result-{rank}.partial"
            partial.write_bytes(pickle.dumps(result))
            partial.rename(folder / f"result-{rank}.pkl")
        except BaseException:
            (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)  # a finaliser would wait for the other ranks
        finally:
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
