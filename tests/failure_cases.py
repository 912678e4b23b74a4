"""What the failure tests share: calls that wait for peers, what they raise and when, and a check that all is well."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import epcomm

SOON = 2.0  # seconds from a failure to its report by other ranks; mismatches take half of it

Call = Callable[[epcomm.Communicator], Any]
X = torch.ones(4)
BIG = torch.ones(50_000)

WAITS: dict[str, Call] = {
    "barrier": lambda c: c.barrier(),
    "one-shot": lambda c: c.allreduce(X),
    "two-shot": lambda c: c.allreduce(torch.ones(900_000)),
    "exchange": lambda c: c.allgather(torch.ones(900_000)),
    "plan": lambda c: c.allreduce(BIG, algorithm="ring"),
    "bound": lambda c: c.bind_allreduce(torch.ones(4))(),
    "asynchronous": lambda c: c.allreduce(X, async_op=True).wait(),
    "behind asynchronous": lambda c: [c.allreduce(X, async_op=True), c.barrier()],
    "alltoallv": lambda c: c.alltoallv(torch.ones(3), [1, 1, 1]),
    "recv": lambda c: c.recv(torch.ones(4), 1),
    "send": lambda c: c.send(torch.ones(900_000), 1),
    "entering later": lambda c: [time.sleep(1.0), c.barrier()],
    "check": lambda c: [(time.sleep(0.01), c.check()) for _ in range(500)],
    "close": lambda c: c.close(),
}


@dataclass
class Raised:
    """What a call raised, and when."""

    error: BaseException
    when: float

    @property
    def text(self) -> str:
        return str(self.error)


def raised_by(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Raised:
    """Calls it and fails unless it raises."""
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        return Raised(error, time.monotonic())
    raise AssertionError(f"expected an error, got {result!r}")


def works(comm: epcomm.Communicator) -> None:
    """The communicator gives right results of every kind."""
    total = sum(range(comm.size))
    for size in (3, 30_000):
        x = torch.full((size,), float(comm.rank))
        assert (comm.allreduce(x) == total).all()
        assert comm.allgather(x[:1]).tolist() == list(range(comm.size))
        assert (comm.allreduce(x, async_op=True).result() == total).all()
    if comm.size > 1:
        out = torch.empty(20_000)
        work = comm.send(torch.full((20_000,), float(comm.rank)), (comm.rank + 1) % comm.size, async_op=True)
        comm.recv(out, (comm.rank - 1) % comm.size)
        assert (out == (comm.rank - 1) % comm.size).all() and work is not None and work.wait()
    comm.barrier()  # nobody goes on to a failure while others are still at this
