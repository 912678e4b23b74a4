"""What all collectives have in common: how a request that was validated runs, and what an argument error does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from epcomm.collectives.bind import Binder
from epcomm.collectives.checks import check_timeout
from epcomm.collectives.plan import Plan
from epcomm.collectives.planned import PlanBinder
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo

Method = TypeVar("Method", bound=Callable[..., Any])


def rejecting(method: Method) -> Method:
    """An argument error fails the communicator, so that peers that are in the operation learn of it."""

    @functools.wraps(method)
    def checked(self: Calls, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (ConfigError, UnsupportedError) as error:
            raise self.runtime.reject(error) from None

    return checked  # type: ignore[return-value]


class Calls:
    """Runs operations of one communicator: at once, or in their turn behind asynchronous ones."""

    def __init__(self, runtime: Runtime, binder: Binder, plans: PlanBinder, fifo: Fifo):
        self.runtime, self._binder, self._plans, self._fifo = runtime, binder, plans, fifo
        self._everyone, self._device = range(runtime.size), runtime.target.device

    def _where(self, name: str) -> str:
        return f"rank {self.runtime.rank}: {name}"

    def _call(self, operation: Operation, values: tuple[int, ...], keep: Any, result: Any, async_op: bool,
              timeout: float | None) -> Any:  # fmt: skip
        """Runs an operation in its turn; `keep` are the tensors behind the addresses."""
        if timeout is None and not async_op and not self._fifo.pending:
            self.runtime.run(operation, *values)
            return result

        check_timeout(f"rank {self.runtime.rank}: {operation.text}", timeout)

        def run(keep: Any = keep) -> Any:
            if timeout is None:
                self.runtime.run(operation, *values)
            else:
                self.runtime.run_within(timeout, operation, *values)
            return result

        return self._fifo.call(run, async_op, f"rank {self.runtime.rank}: {operation.text}")

    def _run_plan(self, kind: str, x: torch.Tensor, result: torch.Tensor | None, algorithm: str | Plan, async_op: bool,
                  timeout: float | None, op: str = "", root: int = 0) -> Any:  # fmt: skip
        """Runs a plan, or the plan of the algorithm that is named, from x (contiguous) to result."""
        planned = self._plans.bound(self._where(kind), kind, algorithm, x, op, root)
        values = planned.call_words(self._where(kind), x, result)
        return self._call(planned.operation, values, (x, result), result, async_op, timeout)
