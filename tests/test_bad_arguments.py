"""Wrong arguments: an error that names them, on the rank that passed them, before anything is sent. Peers are told."""

from __future__ import annotations

import time

import pytest
import torch
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


@pytest.mark.parametrize(
    "arguments, texts",
    [
        ({"device": "cuda"}, ["device", "cuda"]),
        ({"transport": "nccl"}, ["transport", "nccl"]),
        ({"timeout": 0.0}, ["timeout", "0"]),
        ({"num_threads": 0}, ["num_threads", "0"]),
        ({"rank": 0}, ["store"]),
        ({"store": object()}, ["rank", "world_size"]),
        ({"store": object(), "rank": 2, "world_size": 2}, ["rank", "2"]),
        ({"store": object(), "group": object()}, ["group", "store"]),
    ],
)
def test_bad_arguments_of_init(arguments: dict[str, object], texts: list[str]) -> None:
    with pytest.raises((ConfigError, UnsupportedError)) as caught:
        epcomm.init(**arguments)
    assert all(text in str(caught.value) for text in texts)


def test_bad_arguments_of_launch() -> None:
    for arguments in ({"num_ranks": 0}, {"num_ranks": 1, "ranks": "fibers"}):
        with pytest.raises(ConfigError, match="launch"):
            epcomm.launch(works, **arguments)
