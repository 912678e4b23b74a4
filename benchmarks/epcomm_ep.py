"""epcomm's own expert parallelism as a contestant: outputs in `output_buffer()` or in the caller's memory."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.timing import Contestant, Step, clock
from benchmarks.workload import Workload, scale

LIBRARY = "epcomm"
_TINY_HIDDEN = 8


class EpcommEp:
    """`route`, `dispatch`, experts and `combine` of one case on a live handle."""

    def __init__(self, handle: Any, workload: Workload, elsewhere: bool = False):
        self.handle, self.workload, self.elsewhere = handle, workload, elsewhere
        first = workload.rank * workload.local_experts
        self.factors = scale(torch.arange(workload.local_experts) + first)
        self.expected_counts = workload.expert_counts.sum(0)[first : first + workload.local_experts]
        self.out = torch.zeros_like(workload.x)
        self.received: Any = None
        self.y: Any = None  # the caller's own memory is kept, an output buffer is let go with its dispatch
        self.counts: list[int] = []

    def dispatch(self) -> None:
        """Routing included, as in every other contestant."""
        routing = self.handle.route(self.workload.topk_idx)
        self.received = self.handle.dispatch(self.workload.x, routing)

    def experts(self) -> None:
        """Scale rows by the factors of their experts, into the memory that combine will read."""
        received, layout = self.received, self.workload.case.layout
        self.counts = received.expert_counts.tolist()
        if not self.elsewhere:
            self.y = received.output_buffer()
        elif self.y is None:
            self.y = torch.empty_like(received.x)
        if layout == "padded":
            for local, rows in enumerate(self.counts):
                torch.mul(received.x[local, :rows], float(self.factors[local]), out=self.y[local, :rows])
            return
        if layout == "flat":
            selected = received.topk_idx.long()
            factor = torch.where(selected >= 0, self.factors[selected.clamp(min=0)], 0.0).sum(-1)
        else:
            factor = torch.repeat_interleave(self.factors, torch.tensor(self.counts))
        torch.mul(received.x, factor.to(received.x.dtype)[:, None], out=self.y)

    def combine(self) -> None:
        """The plain sum of a token's rows. The blocks go back at its end, as where a layer returns."""
        self.handle.combine(self.y, self.received, out=self.out)
        self.received = None
        if not self.elsewhere:
            self.y = None

    def round_trip(self) -> None:
        """Everything a decode step calls, for a hot loop: the experts' part is only asking for the buffer."""
        handle, workload = self.handle, self.workload
        received = handle.dispatch(workload.x, handle.route(workload.topk_idx))
        handle.combine(received.output_buffer(), received, out=self.out)

    def check(self) -> None:
        """Result and counts against the oracle."""
        if self.counts != self.expected_counts.tolist():
            raise AssertionError(f"expert counts {self.counts}, wanted {self.expected_counts.tolist()}")
        self.workload.check(self.out)

    def release(self) -> None:
        """Let go of the last result, before the handle is closed."""
        self.received = self.y = None

    def contestant(self) -> Contestant:
        """For the timing."""
        return Contestant(
            name=LIBRARY + (", outputs elsewhere" if self.elsewhere else ""),
            library=LIBRARY + (" elsewhere" if self.elsewhere else ""),
            steps=[
                Step("dispatch", self.dispatch),
                Step("experts", self.experts, timed=False),
                Step("combine", self.combine),
            ],
            poison=lambda: self.out.fill_(float("nan")),
            check=self.check,
        )

    def phases(self, world: Any, iterations: int) -> dict[str, list[int]]:
        """This rank's nanoseconds in the parts of a dispatch, as far as calls from outside can tell them apart.

        `route` is that call, `exchange` a dispatch of rows too short to matter, `rows` what a full dispatch takes more.
        """
        tiny = self.workload.x[:, :_TINY_HIDDEN].contiguous()
        samples: dict[str, list[int]] = {"route": [], "exchange": [], "rows": []}
        for _ in range(iterations):
            world.gate.wait()
            begin = clock()
            routing = self.handle.route(self.workload.topk_idx)
            routed = clock()
            world.gate.wait()
            started = clock()
            self.handle.dispatch(tiny, routing)
            exchanged = clock()
            world.gate.wait()
            again = clock()
            self.handle.dispatch(self.workload.x, routing)
            whole = clock() - again
            samples["route"].append(routed - begin)
            samples["exchange"].append(exchanged - started)
            samples["rows"].append(max(0, whole - (exchanged - started)))
        return samples
