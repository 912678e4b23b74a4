"""What both ways of sending rows are to the timing: dispatch, untimed experts, combine, and a check of the result."""

from __future__ import annotations

from typing import Protocol

import torch

from benchmarks.competitors.row_buffers import Wire
from benchmarks.timing import Contestant, Step
from benchmarks.workload import Workload


class Rows(Protocol):
    """A dispatch and combine over a wire; `out` is [tokens, hidden]."""

    wire: Wire
    workload: Workload
    out: torch.Tensor

    def dispatch(self) -> None: ...

    def experts(self) -> None: ...

    def combine(self) -> None: ...


def row_contestant(rows: Rows, way: str) -> Contestant:
    """`way` says what travels: "row per expert", "row per rank"."""
    return Contestant(
        name=f"{rows.wire.name}, {way}",
        library=rows.wire.name,
        steps=[
            Step("dispatch", rows.dispatch),
            Step("experts", rows.experts, timed=False),
            Step("combine", rows.combine),
        ],
        poison=lambda: rows.out.fill_(float("nan")),
        check=lambda: rows.workload.check(rows.out),
    )
