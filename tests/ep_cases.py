"""Cases of expert parallelism, and the check of one step of a case against the definition in `epcomm.testing.oracle`.

Every rank makes all ranks' inputs, so each checks its own results without asking a peer. Values are such that all sums
are exact before they are rounded; so nothing here needs a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from failure_cases import raised_by

import epcomm
from epcomm.errors import PeerFailedError
from epcomm.testing.adversary import delay_operations
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.oracle import Combined, Exchange, combined, even_placement, received_weights
from epcomm.testing.ranks import run_ranks
from epcomm.testing.routing import TOKENS, choose_experts, payload, weights

#: Every layout in both modes.
KINDS = [(mode, layout) for mode in ("throughput", "latency") for layout in ("contiguous", "padded", "flat")]
KIND_IDS = [f"{mode}-{layout}" for mode, layout in KINDS]
#: Those whose rows can travel once per rank and be expanded where they arrive.
KINDS_BY_RANK = [("throughput", "contiguous"), ("latency", "padded")]
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    """A handle and the traffic on it."""

    mode: str = "throughput"
    layout: str = "contiguous"
    num_experts: int = 6
    topk: int = 3
    hidden: int = 9
    max_tokens: int = 7
    dtype: torch.dtype = torch.bfloat16
    alignment: int = 1
    placement: tuple[int, ...] | None = None
    max_recv_rows: int | None = None
    blocks: int = 3
    wire: str = "auto"  # on CPUs that is "expert" where there is a choice
    host_sync: bool | None = None
    graph_blocks: int = 2
    overflow: str = "raise"
    zero_tail: bool = False
    gate: str = "uniform"
    tokens: str = "full"
    index_dtype: torch.dtype = torch.int64

    def __str__(self) -> str:
        """Mode, layout and what differs from the defaults."""
        changed = {item.name: getattr(self, item.name) for item in fields(self)[2:]}
        changed = {name: value for name, value in changed.items() if value != getattr(Case, name)}
        return " ".join([self.mode, self.layout, *(f"{name}={value}" for name, value in changed.items())])

    def handle(self, comm: epcomm.Communicator) -> Any:
        """The case's handle on a communicator."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("gate", "tokens", "index_dtype"):
            del values[name]
        if self.layout != "contiguous":
            values["alignment"] = 1
        return comm.expert_parallel(**values)


@dataclass(frozen=True)
class Step:
    """All ranks' inputs of one routing of a case; another `number` gives other data."""

    case: Case
    size: int
    number: int

    def __str__(self) -> str:
        return f"({self.case}) on {self.size} ranks, step {self.number}"

    @cached_property
    def exchange(self) -> Exchange:
        case = self.case
        owner = case.placement or even_placement(case.num_experts, self.size)
        indices = []
        for rank in range(self.size):
            num_tokens = TOKENS[case.tokens](rank + self.number, case.max_tokens)
            seed = 1000 * self.number + rank
            indices.append(choose_experts(case.gate, num_tokens, case.topk, owner, seed).to(case.index_dtype))
        wire = "expert" if case.wire == "auto" or case.layout == "flat" else case.wire
        return Exchange(case.layout, owner, case.max_tokens, case.alignment, tuple(indices), wire)

    def x(self, dtype: torch.dtype | None = None, width: int | None = None) -> list[torch.Tensor]:
        """Each rank's tokens."""
        shape = width or self.case.hidden, dtype or self.case.dtype
        indices = self.exchange.indices
        return [payload((len(index), shape[0]), shape[1], self.number, rank) for rank, index in enumerate(indices)]

    def y(self, dtype: torch.dtype | None = None, width: int | None = None) -> list[torch.Tensor]:
        """Each rank's expert outputs, which depend on rank and row alone; NaN where no row is."""
        shape = width or self.case.hidden, dtype or self.case.dtype
        outputs = []
        for rank, rows in enumerate(self.exchange.rows):
            output = payload((*rows.source_token.shape, shape[0]), shape[1], self.number, rank, 1)
            outputs.append(output.masked_fill_(~rows.is_real[..., None], torch.nan))
        return outputs

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        return [weights(index.shape, self.number, rank) for rank, index in enumerate(self.exchange.indices)]


def require(what: Any, got: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    """Fails unless shape, dtype and values are the same, or both are None."""
    if got is None or wanted is None:
        same = got is wanted
    else:
        same = got.dtype == wanted.dtype and torch.equal(got, wanted)
    if not same:
        raise AssertionError(f"{what}: got\n{got}\nwanted\n{wanted}")


def check_rows(step: Step, rank: int, got: torch.Tensor, x: Sequence[torch.Tensor]) -> None:
    """The rows that a rank received of all ranks' tokens. In a padded block what lies past the counts is undefined."""
    rows = step.exchange.rows[rank]
    wanted = rows.gather(x)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    defined = rows.is_real if step.case.layout == "padded" else slice(None)
    as_bytes = [values.contiguous().view(torch.uint8)[defined] for values in (got, wanted)]
    if not torch.equal(*as_bytes):
        raise AssertionError(f"rank {rank}, {step}: x: got\n{got}\nwanted\n{wanted}")


def check_fields(step: Step, received: Any, has_weights: bool = False) -> None:
    """Every field of `received` but `x`."""
    rank, exchange, what = received.ep.rank, step.exchange, f"rank {received.ep.rank}, {step}"
    rows = exchange.rows[rank]
    defined = rows.is_real if step.case.layout == "padded" else slice(None)
    require(f"{what}: source_rank", received.source_rank[defined], rows.source_rank[defined])
    require(f"{what}: source_token", received.source_token[defined], rows.source_token[defined])
    require(f"{what}: topk_idx", received.topk_idx, rows.topk_idx)
    require(f"{what}: expert_counts", received.expert_counts, rows.expert_counts)
    assert received.expert_counts_list == rows.expert_counts.tolist()
    require(f"{what}: expert_offsets", received.expert_offsets, rows.expert_offsets)
    ends = None if rows.expert_offsets is None else rows.expert_offsets[1:]
    require(f"{what}: grouped_mm_offs", received.grouped_mm_offs, ends)
    wanted = received_weights(exchange, rank, step.weights) if has_weights else None
    require(f"{what}: topk_weights", received.topk_weights, wanted)


def check_combined(what: Any, got: torch.Tensor, wanted: Combined, dtype: torch.dtype) -> None:
    """A result whose exact sum needs no rounding before its last."""
    require(what, got, wanted.exact.to(dtype))


def round_trip(ep: Any, step: Step) -> None:
    """Route, dispatch and combine as a layer does it, with weights at one end or the other, in place or staged."""
    rank, case, exchange = ep.rank, step.case, step.exchange
    routing = ep.route(exchange.indices[rank])
    x, y = step.x(), step.y()
    weighted = step.number % 2 == 1
    received = ep.dispatch(x[rank], routing, step.weights[rank] if weighted else None)
    check_rows(step, rank, received.x, x)
    check_fields(step, received, weighted)
    rows = y[rank]
    if step.number % 3 != 0:
        rows = received.output_buffer().copy_(rows)
    factors = step.weights[rank] if case.layout != "flat" and not weighted else None
    result = ep.combine(rows, received, factors)
    wanted = combined(exchange, rank, y, factors)
    check_combined(f"rank {rank}, {step}: combine", result, wanted, case.dtype)


def dispatched(ep: Any, step: Step, *args: Any, **kwargs: Any) -> Any:
    """The dispatch of a step's tokens along a new routing."""
    return ep.dispatch(step.x()[ep.rank], ep.route(step.exchange.indices[ep.rank]), *args, **kwargs)


def spread(x: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between and inside of rows."""
    memory = torch.zeros(*(2 * extent + 1 for extent in x.shape), dtype=x.dtype)
    view = memory[tuple(slice(1, 2 * extent + 1, 2) for extent in x.shape)]
    return view.copy_(x)


def run_steps(comm: epcomm.Communicator, case: Case, num_steps: int = 3) -> None:
    """Several round trips on one handle."""
    ep = case.handle(comm)
    for number in range(num_steps):
        round_trip(ep, Step(case, comm.size, number))
    ep.close()


def check_raised(comm: epcomm.Communicator, call: Callable[[], Any], error: type[Exception], *texts: str) -> None:
    """`call` raises `error` on rank 1, and everyone else hears what it said; then the communicator is reset."""
    raised = raised_by(call)
    if comm.rank == 1:
        assert type(raised.error) is error, raised
        texts = ("rank 1: ", "wanted", "got", *texts)
    else:
        assert type(raised.error) is PeerFailedError, raised
        texts = (f"rank {comm.rank}: ", "rank 1", error.__name__, *texts)
    assert all(text in raised.text for text in texts), (texts, raised)
    comm.reset()


def on_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    ranks: str = "processes",
    longest: float = 0.001,
    disturb: int | None = None,
    timeout: float = 60.0,
    kernels: str = "numba",
    **init: Any,
) -> list[Any]:
    """Runs ``body(communicator, *args)`` on all ranks, with random pauses of up to `longest` around operations.

    `kernels`: "triton", "numba", or "mixed": odd ranks have Triton's.
    """

    def run() -> Any:
        with kernels_of(kernels), epcomm.init(timeout=30.0, **init) as comm:
            if longest:
                delay_operations(comm, seed=world, longest=longest)
            return body(comm, *args)

    return run_ranks(run, world, ranks=ranks, disturb=disturb, timeout=timeout)


def run_cases(comm: epcomm.Communicator, cases: list[Case]) -> None:
    for case in cases:
        run_steps(comm, case)


def run_option(comm: epcomm.Communicator, option: Callable[[Any, Step], None]) -> None:
    """A few steps of an option's use and check on a handle of every kind."""
    for case in in_all_kinds([Case(hidden=40, gate="holes_and_duplicates", tokens="uneven", alignment=4)]):
        ep = case.handle(comm)
        for number in range(4):
            option(ep, Step(case, comm.size, number))
        ep.close()


def in_all_kinds(cases: Sequence[Case]) -> Iterator[Case]:
    for mode, layout in KINDS:
        yield from (replace(case, mode=mode, layout=layout) for case in cases)
        if (mode, layout) in KINDS_BY_RANK:
            yield from (replace(case, mode=mode, layout=layout, wire="rank") for case in cases)
