"""What goes wrong in a group of `torch.distributed` is an exception of epcomm's kind, never a crash or a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from c10d_cases import group, monitored_barrier
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from epcomm.errors import ConfigError, MismatchError, PeerFailedError, PeerLostError
from epcomm.errors import TimeoutError as EpcommTimeoutError
from epcomm.testing.ranks import RankDied, rank_outcomes, run_ranks

Step = Callable[[], Any]

# ---- a peer that dies


def _trainer(wrap: Callable[[nn.Module], nn.Module]) -> Step:
    model = wrap(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    return lambda: model(torch.ones(4, 64)).sum().backward()


def _parallel(model: nn.Module, hook: Any = None) -> nn.Module:
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    return parallel


def data_parallel() -> Step:
    return _trainer(_parallel)


def data_parallel_with_hook() -> Step:
    return _trainer(lambda model: _parallel(model, default_hooks.fp16_compress_hook))


def fully_sharded() -> Step:
    return _trainer(fully_shard)


def functional_collective() -> Step:
    return lambda: functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).wait()


def compiled() -> Step:
    return torch.compile(lambda: functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) * 2, backend="aot_eager")


def asynchronous() -> Step:
    return lambda: dist.all_reduce(torch.ones(4), async_op=True).wait()


def synchronous() -> Step:
    return lambda: dist.all_gather([torch.empty(4), torch.empty(4)], torch.ones(4))


def barrier() -> Step:
    return dist.barrier


def message() -> Step:
    peer, x = 1 - dist.get_rank(), torch.ones(4)
    return lambda: dist.send(x, peer) if peer else (dist.recv(x, peer), dist.recv(x, peer))


def lose_a_peer(make_step: Callable[[], Step], is_killed_in_step: bool) -> tuple[str, float]:
    with group():
        step = make_step()
        step()
        if dist.get_rank() == 1:
            if not is_killed_in_step:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, 0.2)  # nobody handles SIGALRM: it ends the process, wherever it is
            while True:
                step()
        begin = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            while True:
                step()
        assert caught.value.rank == 1
        with pytest.raises(PeerLostError):  # and so does whatever comes next
            dist.all_reduce(torch.ones(1))
        return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize(
    "make_step",
    [
        data_parallel,
        functional_collective,
        *(
            pytest.param(step, marks=pytest.mark.slow)
            for step in (
                data_parallel_with_hook, fully_sharded, compiled, asynchronous, synchronous, barrier, message,
            )
        ),
    ],
    ids=lambda step: step.__name__,
)  # fmt: skip
@pytest.mark.parametrize("is_killed_in_step", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lost_peer(make_step: Callable[[], Step], is_killed_in_step: bool) -> None:
    found, died = rank_outcomes(lose_a_peer, 2, make_step, is_killed_in_step, expendable=[1])
    assert isinstance(died, RankDied), died
    assert not isinstance(found, BaseException), found
    text, seconds = found
    assert "process of rank 1 ended" in text and seconds < 10.0


# ---- wrong calls


def raised(call: Step) -> BaseException | None:
    with group(timeout=20.0):
        try:
            call()
        except Exception as error:
            return error
    return None


def wrong_calls(names: list[str]) -> list[BaseException | None]:
    return [raised(WRONG[name][dist_rank()]) for name in names]


def dist_rank() -> int:
    from epcomm.world.rendezvous import launched_rank

    launched = launched_rank.get()
    assert launched is not None
    return launched.rank


def _reduce_gaps() -> None:
    dist.all_reduce(torch.ones(8)[::2])


def _good() -> None:
    dist.all_reduce(torch.ones(4))


#: what the two ranks call, what each raises, and texts of rank 1's error
WRONG: dict[str, Any] = {
    "gaps": (_good, _reduce_gaps, PeerFailedError, ConfigError, ["`out`", "contiguous"]),
    "reduction": (
        _good,
        lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.BXOR),
        PeerFailedError,
        ConfigError,
        ["`op`", "'bxor'", "float32"],
    ),
    "operations": (
        _good,
        lambda: dist.broadcast(torch.ones(4), 0),
        MismatchError,
        MismatchError,
        ["allreduce(", "broadcast("],
    ),
    "asynchronous operations": (
        lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
        lambda: dist.all_reduce(torch.ones(5), async_op=True).wait(),
        MismatchError,
        MismatchError,
        ["(4,)", "(5,)"],
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [1, 1]),
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(2), [2, 1], [1, 1]),
        PeerFailedError,
        ConfigError,
        ["`recv_splits`", "[1, 1]", "[2, 1]"],
    ),
    "one comes late": (
        lambda: dist.barrier(timeout=timedelta(seconds=0.3)),
        lambda: time.sleep(1.0) or dist.barrier(),
        EpcommTimeoutError,
        PeerFailedError,
        ["TimeoutError", "barrier"],
    ),
    "one comes late where it is watched for": (
        lambda: monitored_barrier(timedelta(seconds=0.3)),
        lambda: time.sleep(1.0) or monitored_barrier(),
        EpcommTimeoutError,
        PeerFailedError,
        ["TimeoutError", "waited 0.3 s for rank 1"],
    ),
}


def test_wrong_calls() -> None:
    """Each in a group of its own, in one launch: the ranks go on after an error."""
    by_rank = run_ranks(wrong_calls, 2, list(WRONG))
    for number, (name, (_, _, *kinds, texts)) in enumerate(WRONG.items()):
        for rank, kind in enumerate(kinds):
            assert type(by_rank[rank][number]) is kind, (name, rank, by_rank[rank][number])
        assert all(text in str(by_rank[1][number]) for text in texts), (name, by_rank[1][number])
