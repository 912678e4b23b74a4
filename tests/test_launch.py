"""`epcomm.launch`, and the harness that the other tests run on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from failure_cases import works

import epcomm
from epcomm.errors import EpcommError, PeerFailedError, PeerLostError
from epcomm.testing.ranks import RankDied, RanksHung, rank_outcomes, run_ranks


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_results_by_rank(ranks: str) -> None:
    offset = 10

    def body(x: torch.Tensor, factor: int) -> tuple[int, int, list[float]]:
        with epcomm.init(timeout=20.0) as comm:
            works(comm)
            return comm.rank * factor + offset, comm.size, comm.allreduce(x).tolist()

    assert epcomm.launch(body, 2, torch.ones(2), 5, ranks=ranks) == [(10, 2, [2.0, 2.0]), (15, 2, [2.0, 2.0])]


def test_process_ranks_have_their_share_of_cores() -> None:
    def body() -> tuple[int, int, str]:
        return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    share = max(1, len(os.sched_getaffinity(0)) // 2)
    found = epcomm.launch(body, 2)
    assert [threads for _, threads, _ in found] == [share, share] and {omp for _, _, omp in found} == {str(share)}
    assert len({pid for pid, _, _ in found} | {os.getpid()}) == 3


def test_cause_is_raised_rather_than_its_echoes() -> None:
    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            if comm.rank == 1:
                time.sleep(0.2)
                raise LookupError("the cause")
            comm.barrier()

    with pytest.raises(LookupError, match="the cause") as caught:
        epcomm.launch(body, 2)
    assert "This was raised on rank 1" in "".join(caught.value.__notes__) and "line" in caught.value.__notes__[0]


def test_killed_rank_is_a_lost_peer() -> None:
    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            if comm.rank == 1:
                os.kill(os.getpid(), 9)
            comm.barrier()

    with pytest.raises(PeerLostError, match="rank 1"):
        epcomm.launch(body, 2)


def test_results_that_cannot_travel() -> None:
    class Unpicklable(Exception):
        def __reduce__(self) -> str:
            raise TypeError("stays here")

    def refuse() -> None:
        raise Unpicklable("what it said")

    with pytest.raises(EpcommError, match="rank 0.*result"):
        epcomm.launch(threading.Lock, 1)
    with pytest.raises(EpcommError, match="rank 0.*exception.*what it said"):
        epcomm.launch(refuse, 1)


def test_functions_of_a_script(tmp_path: Path) -> None:
    """What a script or a notebook defines travels by value; its main module isn't run again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import epcomm, torch\n"
        "print('main')\n"
        "SCALE = 3.0\n"
        "class Job:\n"
        "    def scaled(self, x): return x * SCALE\n"
        "def body(job):\n"
        "    with epcomm.init() as comm:\n"
        "        return epcomm.allreduce(job.scaled(torch.ones(1))).item()\n"
        "print(epcomm.launch(body, 2, Job()))\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert result.stdout.split("\n")[:2] == ["main", "[6.0, 6.0]"], result.stderr


# ---- the harness


def test_hang_shows_every_rank() -> None:
    def waits_in_a_kernel(comm: epcomm.Communicator) -> None:
        comm.barrier()

    def waits_elsewhere() -> None:
        time.sleep(100.0)

    def body() -> None:
        comm = epcomm.init(timeout=100.0)
        if comm.rank == 0:
            waits_in_a_kernel(comm)
        if comm.rank == 1:
            waits_elsewhere()

    for ranks in ("processes", "threads"):
        with pytest.raises(RanksHung) as caught:
            run_ranks(body, 3, ranks=ranks, timeout=1.0)
        text = str(caught.value)
        assert "in waits_in_a_kernel" in text and "in waits_elsewhere" in text
        assert ranks == "threads" or "rank 2 has returned" in text
        assert run_ranks(os.getpid, 1) != [os.getpid()]  # the pool has new processes


def test_hang_after_a_failure_names_it() -> None:
    def body() -> None:
        if epcomm.world.rendezvous.launched_rank.get().rank:
            raise ValueError("the cause")
        time.sleep(100.0)

    with pytest.raises(RanksHung) as caught:
        run_ranks(body, 2, timeout=0.5)
    assert isinstance(caught.value.__cause__, ValueError) and "raised ValueError: the cause" in str(caught.value)


def test_outcomes_of_ranks() -> None:
    def body() -> int:
        comm = epcomm.init(timeout=20.0)
        if comm.rank == 2:
            os.kill(os.getpid(), 19)  # SIGSTOP
        if comm.rank == 1:
            raise KeyError("mine")
        if comm.rank == 0:
            comm.barrier()
        return comm.rank

    found = rank_outcomes(body, 4, expendable=[2])
    assert [type(outcome) for outcome in found] == [PeerFailedError, KeyError, RankDied, int]


def test_processes_serve_again_and_communicators_are_left() -> None:
    def body() -> tuple[int, bool]:
        had_one = epcomm.initialize._process_default is not None
        comm = epcomm.init(timeout=20.0)
        comm.barrier()
        return os.getpid(), had_one

    first, second = run_ranks(body, 2), run_ranks(body, 2)
    assert first == second and not any(had_one for _, had_one in second)
