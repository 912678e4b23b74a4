"""The allreduce in which NVLink's switch adds, interpreted: a loop over the ranks stands in for the switch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import FORMS, addend, reduced, same_bits
from failure_cases import Raised, raised_by

import epcomm
from epcomm.collectives.selection import check_algorithm, chosen_kernel
from epcomm.errors import ConfigError, PeerFailedError, UnsupportedError
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.ranks import rank_outcomes, run_ranks

ONE_SHOT, CHUNK = 32 << 10, 512 << 10  # bytes
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def on_ranks(world: int, body: Callable[..., Any], *args: Any, **init: Any) -> list[Any]:
    """What ``body(communicator, *args)`` returns on each rank; the ranks have 1, 2 and 3 programs."""

    def run() -> Any:
        with kernels_of("triton", multicast=True), epcomm.init(timeout=30.0, **init) as comm:
            return body(comm, *args)

    return run_ranks(run, world)


def check(comm: epcomm.Communicator, case: Any, got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert same_bits(got, wanted), f"rank {comm.rank}: {case}: got {got}, wanted {wanted}"


def switched(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of all ranks' inputs: an average is a sum that has been rounded, divided, and rounded again."""
    total = reduced(inputs, "sum")
    return total if op == "sum" else (total.double() / len(inputs)).to(total.dtype)


def check_sizes(comm: epcomm.Communicator) -> None:
    """Sums and averages of every dtype, three at each size, between other uses of the same slots."""
    for size in (5, 0, 64 * comm.size + 3, 2001):
        for call, (dtype, op) in enumerate((dtype, op) for dtype in DTYPES for op in ("sum", "avg")):
            inputs = [addend(rank, (size,), dtype, op, call, comm.size) for rank in range(comm.size)]
            own, wanted = inputs[comm.rank], switched(inputs, op)
            x = list(FORMS.values())[call % len(FORMS)](own)
            check(comm, (size, dtype, op), comm.allreduce(x, op, algorithm="multimem"), wanted)
            check(comm, (size, dtype, op, "x changed"), x, own)
        check(comm, (size, "two_shot"), comm.allreduce(x, "max", algorithm="two_shot"), reduced(inputs, "max"))
        place = FORMS["unaligned"](own)
        check(comm, (size, "in place"), comm.allreduce(place, op, out=place, algorithm="multimem"), wanted)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sizes(world: int) -> None:
    on_ranks(world, check_sizes)


def check_chunks(comm: epcomm.Communicator) -> None:
    """Several chunks with an odd end, in two ranks' world more than slots; another algorithm uses the slots as well."""
    size = (5 if comm.size == 2 else 2) * CHUNK // 4 + 37
    for call, algorithm in enumerate(("multimem", "two_shot", "multimem")):
        inputs = [addend(rank, (size,), torch.float32, "sum", call, comm.size) for rank in range(comm.size)]
        got = comm.allreduce(inputs[comm.rank], algorithm=algorithm)
        check(comm, (call, algorithm), got, reduced(inputs, "sum"))


@pytest.mark.parametrize("world", [2, 3])
def test_chunks(world: int) -> None:
    on_ranks(world, check_chunks)


def check_channels(comm: epcomm.Communicator) -> None:
    for call, size in enumerate((3, 700, 40_001)):
        inputs = [addend(rank, (size,), torch.bfloat16, "sum", call, comm.size) for rank in range(comm.size)]
        got = comm.allreduce(inputs[comm.rank], algorithm="multimem")
        check(comm, size, got, reduced(inputs, "sum"))


def test_more_channels_than_programs() -> None:
    on_ranks(3, check_channels, sm_budget=5)


def check_bound(comm: epcomm.Communicator) -> None:
    x = torch.empty(3000)
    call = comm.bind_allreduce(x, algorithm="multimem")
    for step in range(3):
        x.fill_(step + comm.rank)
        check(comm, step, call(), torch.full((3000,), float(step * comm.size + sum(range(comm.size)))))


@pytest.mark.parametrize("world", [1, 2])
def test_bound_call(world: int) -> None:
    on_ranks(world, check_bound)


def sums_with_rounding(comm: epcomm.Communicator) -> list[torch.Tensor]:
    """Sums of random numbers, which round."""
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = [torch.randn(3001, generator=generator).to(dtype) for dtype in DTYPES]
    return [comm.allreduce(x, algorithm="multimem") for x in inputs] + inputs


def test_results_are_the_same_on_all_ranks_and_rounded_once() -> None:
    world = 4
    outcomes = on_ranks(world, sums_with_rounding)
    for at, dtype in enumerate(DTYPES):
        for outcome in outcomes[1:]:
            assert torch.equal(outcome[at], outcomes[0][at])
        exact = sum(outcome[len(DTYPES) + at].double() for outcome in outcomes)
        size = sum(outcome[len(DTYPES) + at].double().abs() for outcome in outcomes)
        allowed = world * torch.finfo(torch.float32).eps * size
        if dtype.itemsize == 2:
            allowed += torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((outcomes[0][at].double() - exact).abs() <= allowed).all(), dtype


def signal_each_other(comm: epcomm.Communicator) -> list[int]:
    from multimem_kernels import signal_everyone

    from epcomm.device.gpu.multimem import EMULATED_BASE

    runtime, offset = comm._runtime, comm._binder.regions.copies
    operation = runtime.operation(signal_everyone, comm._binder.block(), "signal_everyone")
    found = []
    for call in range(3):
        runtime.run(operation, EMULATED_BASE, offset, 10**call * (comm.rank + 1) << 32)
        comm.barrier()
        found.append(int(runtime.collectives.own.array(offset, 8).view("int64")[0]) >> 32)
        comm.barrier()
    return found


def test_signal() -> None:
    """Every rank adds to a word of all ranks."""

    def run() -> list[int]:
        with kernels_of("triton", multicast=True, sm_budget=0), epcomm.init(timeout=30.0) as comm:
            return signal_each_other(comm)

    assert run_ranks(run, 3) == [[6, 66, 666]] * 3


# ---- where it isn't, and for what it isn't


@pytest.mark.parametrize("kind", ["triton", "numba"])
def test_refused_without_multicast(kind: str) -> None:
    def body() -> Raised:
        with kernels_of(kind), epcomm.init(timeout=30.0) as comm:
            return raised_by(lambda: comm.allreduce(torch.ones(9), algorithm="multimem"))

    for raised in run_ranks(body, 2):
        assert isinstance(raised.error, (UnsupportedError, PeerFailedError)), raised
        assert "`algorithm`: multimem needs memory that NVLink's switch multicasts to" in raised.text
        assert "sm_90 or newer" in raised.text and "'two_shot' works everywhere" in raised.text


def test_all_ranks_must_have_it() -> None:
    def body() -> None:
        with kernels_of("mixed", multicast=True):
            epcomm.init(timeout=30.0)

    for outcome in rank_outcomes(body, 2):
        assert isinstance(outcome, ConfigError) and "got cpu, cpu with multicast by rank" in str(outcome)


@pytest.mark.parametrize("dtype, op", [(torch.float64, "sum"), (torch.int32, "sum"), (torch.bfloat16, "max")])
def test_refused_reductions(dtype: torch.dtype, op: str) -> None:
    with pytest.raises(ConfigError, match=f"multimem does sum and avg of .* got {op} of {dtype}"):
        check_algorithm("here", "multimem", 100, dtype, op, has_multicast=True, spans_hosts=False)


@pytest.mark.parametrize("num_bytes, wanted", [(0, "one_shot"), (ONE_SHOT, "one_shot"), (ONE_SHOT + 4, "two_shot")])
def test_automatic_keeps_the_order_of_additions(num_bytes: int, wanted: str) -> None:
    assert chosen_kernel("auto", num_bytes, spans_hosts=False) == wanted
