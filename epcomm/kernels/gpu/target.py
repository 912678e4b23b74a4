"""The GPU target's kernels by operation, under the interpreter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from epcomm.device.gpu import interpreter
from epcomm.device.gpu.compile import Kernel
from epcomm.kernels.gpu.barrier import barrier


class InterpretedTarget:
    """See `kernels.target.Target`. Rows and channels are shared out among `num_programs`."""

    name = "interpreter"

    def __init__(self, num_programs: int = 2):
        interpreter.require_interpreter()
        self._num_programs = num_programs

    def launch(self, ctx: int, kernel: Kernel, args: int, fingerprint: int, a: int, b: int, c: int, d: int, e: int,
               f: int) -> int:  # fmt: skip
        return interpreter.launch(ctx, kernel, args, fingerprint, (a, b, c, d, e, f), self._num_programs)

    def bind(self, ctx: int, kernel: Kernel, args: int, fingerprint: int, values: Sequence[int]) -> Callable[[], int]:
        words = (*values, *[0] * (6 - len(values)))
        return functools.partial(self.launch, ctx, kernel, args, fingerprint, *words)

    def barrier(self) -> Kernel:
        return barrier

    def reduce(self, args: np.ndarray, algorithm: str, dtype: torch.dtype, op: str) -> Kernel:
        raise NotImplementedError

    def exchange(self, args: np.ndarray, reduction: tuple[torch.dtype, str] | None) -> Kernel:
        raise NotImplementedError

    def send(self) -> Kernel:
        raise NotImplementedError

    def recv(self) -> Kernel:
        raise NotImplementedError

    def route(self) -> Kernel:
        raise NotImplementedError

    def exchange_counts(self) -> Kernel:
        raise NotImplementedError

    def dispatch(self) -> Kernel:
        raise NotImplementedError

    def combine(self, records: np.ndarray, dtypes: Sequence[tuple[torch.dtype, torch.dtype]]) -> Kernel:
        raise NotImplementedError
