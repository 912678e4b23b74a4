"""Wrong arguments: an error that names them, on the rank that passed them, before anything is sent. Peers are told."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failure_cases import BIG, SOON, Call, Raised, X, raised_by, works

import epcomm
from epcomm.errors import ConfigError, EpcommError, PeerFailedError, UnsupportedError
from epcomm.testing.ranks import run_ranks

SIX = torch.arange(6.0)

# what rank 1 passes, what the others call, and what the error says
BAD: dict[str, tuple[Call, Call, list[str]]] = {
    "no tensor": (lambda c: c.allreduce([1.0]), lambda c: c.allreduce(X), ["allreduce", "`x`", "a tensor", "list"]),
    "device": (lambda c: c.allreduce(X.to("meta")), lambda c: c.allreduce(X), ["`x`", "cpu", "meta"]),
    "out's dtype": (
        lambda c: c.allreduce(X, out=torch.empty(4).int()),
        lambda c: c.allreduce(X),
        ["`out`", "torch.float32 (4,)", "torch.int32 (4,)"],
    ),
    "out's shape": (lambda c: c.allgather(X, out=torch.empty(4)), lambda c: c.allgather(X), ["`out`", "(12,)", "(4,)"]),
    "out's strides": (
        lambda c: c.allreduce(X, out=torch.empty(8)[::2]),
        lambda c: c.allreduce(X),
        ["`out`", "contiguous"],
    ),
    "bound x's strides": (lambda c: c.bind_allreduce(BIG[::2]), lambda c: c.barrier(), ["`x`", "contiguous"]),
    "op": (lambda c: c.allreduce(X, "mean"), lambda c: c.allreduce(X), ["`op`", "avg", "'mean'"]),
    "op of a dtype": (lambda c: c.allreduce(X, "bxor"), lambda c: c.allreduce(X), ["`op`", "float32", "'bxor'"]),
    "dtype without ops": (
        lambda c: c.allreduce(X.to(torch.float8_e4m3fn)),
        lambda c: c.allreduce(X),
        ["`op`", "float8_e4m3fn"],
    ),
    "algorithm": (
        lambda c: c.allreduce(X, algorithm="rings"),
        lambda c: c.allreduce(X),
        ["`algorithm`", "two_shot", "'rings'"],
    ),
    "one shot of much": (
        lambda c: c.allreduce(BIG, algorithm="one_shot"),
        lambda c: c.allreduce(BIG),
        ["32768", "200000"],
    ),
    "root": (lambda c: c.broadcast(X, 3), lambda c: c.broadcast(X, 0), ["`src`", "0 to 2", "3"]),
    "negative root": (lambda c: c.reduce(X, -1), lambda c: c.reduce(X, 0), ["`dst`", "-1"]),
    "root of gather": (lambda c: c.gather(X, 7), lambda c: c.gather(X, 0), ["gather", "`dst`", "7"]),
    "indivisible": (lambda c: c.reduce_scatter(X), lambda c: c.reduce_scatter(SIX), ["dim 0", "3 ranks", "(4,)"]),
    "scalar to split": (lambda c: c.alltoall(torch.tensor(1.0)), lambda c: c.alltoall(SIX), ["dim 0", "()"]),
    "number of splits": (
        lambda c: c.alltoallv(SIX, [3, 3]),
        lambda c: c.alltoallv(SIX, [2, 2, 2]),
        ["`send_splits`", "3 counts"],
    ),
    "sum of splits": (
        lambda c: c.alltoallv(SIX, [3, 3, 3]),
        lambda c: c.alltoallv(SIX, [2, 2, 2]),
        ["`send_splits`", "6"],
    ),
    "negative split": (
        lambda c: c.alltoallv(SIX, [9, -3, 0]),
        lambda c: c.alltoallv(SIX, [2, 2, 2]),
        ["`send_splits`", ">= 0"],
    ),
    "received splits": (
        lambda c: c.alltoallv(SIX, [2, 2, 2], [2, 2, 3]),
        lambda c: c.alltoallv(SIX, [2, 2, 2]),
        ["`recv_splits`", "[2, 2, 2]", "[2, 2, 3]"],
    ),
    "overlap": (
        lambda c: c.alltoallv(BIG[:6], [2, 2, 2], out=BIG[3:9]),
        lambda c: c.alltoallv(SIX, [2, 2, 2]),
        ["`out`", "shares memory"],
    ),
    "scatter into nothing": (
        lambda c: c.scatter(None, 0),
        lambda c: c.scatter(SIX, 0, out=SIX[:2].clone()),
        ["`out`", "rank 0"],
    ),
    "scatter of nothing": (
        lambda c: c.scatter(None, 1),
        lambda c: c.scatter(None, 1, out=X.clone()),
        ["`x`", "NoneType"],
    ),
    "peer": (lambda c: c.send(X, 5), lambda c: c.barrier(), ["`dst`", "5"]),
    "recv into gaps": (lambda c: c.recv(BIG[::2], 0), lambda c: c.barrier(), ["`out`", "contiguous"]),
    "recv into a conjugate": (
        lambda c: c.recv(torch.zeros(3, dtype=torch.complex64).conj(), 0),
        lambda c: c.barrier(),
        ["`out`", "conjugated"],
    ),
}
UNSUPPORTED: dict[str, tuple[Call, Call, list[str]]] = {
    "layout": (lambda c: c.allreduce(X.to_sparse()), lambda c: c.allreduce(X), ["`x`", "dense", "sparse"]),
    "send to itself": (lambda c: c.send(X, c.rank), lambda c: c.barrier(), ["itself"]),
}


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_bad_argument_on_one_rank(ranks: str) -> None:
    def body() -> list[Raised]:
        found = []
        with epcomm.init(timeout=20.0) as comm:
            for bad, good, _ in [*BAD.values(), *UNSUPPORTED.values()]:
                works(comm)
                if comm.rank == 1:
                    time.sleep(0.02)
                found.append(raised_by(bad if comm.rank == 1 else good, comm))
                comm.reset()
            works(comm)
        return found

    by_rank = run_ranks(body, 3, ranks=ranks)
    for number, (name, (_, _, texts)) in enumerate([*BAD.items(), *UNSUPPORTED.items()]):
        others = [by_rank[0][number], by_rank[2][number]]
        error = by_rank[1][number]
        wanted = ConfigError if name in BAD else UnsupportedError
        assert type(error.error) is wanted and isinstance(error.error, EpcommError), (name, error)
        assert all(text in error.text for text in ["rank 1", *texts]), (name, error)
        for other in others:
            assert type(other.error) is PeerFailedError, (name, other)
            assert wanted.__name__ in other.text and error.text in other.text, (name, other)
            assert other.when < error.when + SOON, (name, other, error)


def test_config_errors_are_value_errors() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(epcomm.errors.CapacityError, ValueError)
    assert issubclass(epcomm.errors.TimeoutError, TimeoutError)


def test_world_of_one_stays_usable() -> None:
    def body() -> None:
        with epcomm.init() as comm:
            for bad in (lambda c: c.allreduce(X, "mean"), lambda c: c.broadcast(X, 1), lambda c: c.send(X, 0)):
                assert isinstance(raised_by(bad, comm).error, (ConfigError, UnsupportedError))
                comm.check()
                works(comm)

    run_ranks(body, 1)


def test_conjugated_and_negated_views() -> None:
    """Lazy views of torch, whose memory isn't what they stand for."""

    def body() -> None:
        with epcomm.init() as comm:
            x = torch.complex(torch.arange(5.0), torch.arange(5.0) + comm.rank)
            assert torch.equal(
                comm.allreduce(x.conj()), torch.complex(2 * torch.arange(5.0), -2 * torch.arange(5.0) - 1)
            )
            assert torch.equal(comm.allgather(x.conj().imag)[:5], -torch.arange(5.0))
            out = torch.empty(5)
            comm.send(x.conj().imag, 1 - comm.rank)
            comm.recv(out, 1 - comm.rank)
            assert torch.equal(out, -torch.arange(5.0) - (1 - comm.rank))

    run_ranks(body, 2)


def test_inputs_that_require_gradients() -> None:
    def body() -> None:
        with epcomm.init() as comm:
            x = torch.ones(4, requires_grad=True)
            result = comm.allreduce(x)
            assert result.tolist() == [2.0] * 4 and not result.requires_grad and x.tolist() == [1.0] * 4

    run_ranks(body, 2)


def test_timeout_of_reset() -> None:
    def body() -> None:
        with epcomm.init(timeout=20.0) as comm:
            for wanted in ("5", 0, -1.0):
                comm.abort()
                with pytest.raises(ConfigError, match=f"rank {comm.rank}: reset: argument `timeout`.*got {wanted!r}"):
                    comm.reset(wanted)
                comm.reset(5.0)
                works(comm)

    run_ranks(body, 2)


# ---- init and launch, whose peers are not there yet

STORE = dist.HashStore()
BAD_INIT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "store and group": (dict(store=STORE, group=object()), ["`group`", "`store`", "exclude"]),
    "rank alone": (dict(rank=0), ["`rank`", "`store`"]),
    "store alone": (dict(store=STORE), ["`store`", "`rank` and `world_size`"]),
    "no store": (dict(store="tcp://a", rank=0, world_size=2), ["`store`", "'tcp://a'"]),
    "rank of another world": (dict(store=STORE, rank=2, world_size=2), ["`rank`", "world_size=2", "got 2"]),
    "rank as text": (dict(store=STORE, rank="0", world_size=2), ["`rank`", "got '0'"]),
    "group's name": (dict(group="gloo"), ["`group`", "ProcessGroup", "'gloo'"]),
    "not a member": (dict(group=dist.GroupMember.NON_GROUP_MEMBER), ["`group`", "not a member"]),
    "device": (dict(device="gpu"), ["`device`", "'gpu'"]),
    "timeout as text": (dict(timeout="5"), ["`timeout`", "seconds", "'5'"]),
    "timeout of nothing": (dict(timeout=0), ["`timeout`", "got 0"]),
    "threads as text": (dict(num_threads="2"), ["`num_threads`", "integer", "'2'"]),
    "no threads": (dict(num_threads=0), ["`num_threads`", "at least 1", "got 0"]),
    "part of a thread": (dict(num_threads=1.5), ["`num_threads`", "1.5"]),
    "transport": (dict(transport="nccl"), ["`transport`", "'tcp'", "'nccl'"]),
    "topology's name": (dict(topology="dgx_h100"), ["`topology`", "Topology", "'dgx_h100'"]),
}


def test_init_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="`device`: got cuda"):
        epcomm.init(device="cuda")


@pytest.mark.parametrize("name", BAD_INIT)
def test_init_refuses(name: str) -> None:
    arguments, texts = BAD_INIT[name]
    with pytest.raises(ConfigError) as raised:
        epcomm.init(**arguments)
    assert all(text in str(raised.value) for text in ["init", *texts]), raised.value


def test_environment_that_is_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2, but no MASTER_ADDR"):
        epcomm.init()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        epcomm.init()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_environment_where_nobody_comes(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in dict(RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(epcomm.errors.TimeoutError, match=f"rank {rank}: init waited.*MASTER_ADDR:MASTER_PORT.*{port}"):
        epcomm.init(timeout=1.0)
    assert time.monotonic() - began < 30.0  # torch would go on for minutes


def test_launch_refuses() -> None:
    for arguments, text in (
        ((None, 2), "`fn`: wanted a function, got None"),
        ((print, "2"), "`num_ranks`: wanted an integer of at least 1, got '2'"),
        ((print, 0), "`num_ranks`: wanted an integer of at least 1, got 0"),
    ):
        with pytest.raises(ConfigError, match=f"launch: argument {text}"):
            epcomm.launch(*arguments)
    with pytest.raises(ConfigError, match="`ranks`: wanted 'processes' or 'threads', got 'fork'"):
        epcomm.launch(print, 2, ranks="fork")


def test_name_of_another_library() -> None:
    with pytest.raises(AttributeError) as raised:
        _ = epcomm.all_reduce
    assert (raised.value.name, raised.value.obj) == ("all_reduce", epcomm)
