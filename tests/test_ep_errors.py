"""Wrong arguments on one of three ranks: what it raises, what its peers raise, and that all is well after a reset."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from ep_cases import KIND_IDS, KINDS, Case, Step, check_raised, on_ranks, round_trip
from failure_cases import raised_by

import epcomm
from epcomm.errors import CapacityError, ConfigError


class Wrong(NamedTuple):
    """An argument and how rank 1 spoils it; `got` is what the message must say of it."""

    operation: str
    argument: str
    spoil: Callable[[Any], Any]
    got: str
    error: type[Exception] = ConfigError
    layouts: tuple[str, ...] = ("contiguous", "padded", "flat")
    also: dict[str, Any] = {}  # further arguments of that call

    def __str__(self) -> str:
        return f"{self.operation}({self.argument} -> {self.got})"


def with_item(index: tuple[int, int], value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A copy with one item replaced."""

    def spoil(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[index] = value
        return x

    return spoil


def wider(factor: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.cat([x] * factor, dim=-1)


def misplaced(x: torch.Tensor) -> torch.Tensor:
    return x.to("meta")


WRONG = [
    Wrong("route", "topk_idx", torch.Tensor.float, "torch.float32 (7, 3)"),
    Wrong("route", "topk_idx", lambda x: x[:, 0], "torch.int64 (7,)"),
    Wrong("route", "topk_idx", torch.Tensor.tolist, "list"),
    Wrong("route", "topk_idx", misplaced, "on meta"),
    Wrong("route", "topk_idx", lambda x: torch.cat([x, x]), "14", CapacityError),
    Wrong("route", "topk_idx", wider(2), "6", CapacityError),
    Wrong("route", "topk_idx", with_item((2, 1), 6), "6 at [2, 1]"),
    Wrong("route", "topk_idx", with_item((6, 2), -2), "-2 at [6, 2]"),
    Wrong("route", "topk_idx", with_item((0, 0), 1 << 40), f"{1 << 40} at [0, 0]"),
    Wrong("dispatch", "x", lambda x: x[:-1], "torch.bfloat16 (6, 9)"),
    Wrong("dispatch", "x", lambda x: x[0], "torch.bfloat16 (9,)"),
    Wrong("dispatch", "x", lambda x: x[:, :0], "torch.bfloat16 (7, 0)"),
    Wrong("dispatch", "x", lambda x: "rows", "str"),
    Wrong("dispatch", "x", misplaced, "on meta"),
    Wrong("dispatch", "x", wider(2), "36", CapacityError),
    Wrong("dispatch", "x", lambda x: (x, x[:, :1]), "20", CapacityError),
    Wrong("dispatch", "x", lambda x: (x[:, :1], x[1:, :1]), "torch.bfloat16 (6, 1)"),
    Wrong("dispatch", "x", lambda x: (), "0"),
    Wrong("dispatch", "x", lambda x: [x[:, :1]] * 17, "17"),
    Wrong("dispatch", "routing", lambda routing: None, "NoneType"),
    Wrong("dispatch", "topk_weights", lambda weights: weights[:-1], "torch.float32 (6, 3)"),
    Wrong("dispatch", "topk_weights", torch.Tensor.int, "torch.int32 (7, 3)"),
    Wrong("dispatch", "topk_weights", torch.Tensor.tolist, "list"),
    Wrong("dispatch", "topk_weights", misplaced, "on meta"),
    Wrong("dispatch", "out", lambda x: x[..., :-1], "8)"),
    Wrong("dispatch", "out", torch.Tensor.float, "torch.float32"),
    Wrong("dispatch", "out", lambda x: torch.cat([x, x]), "torch.bfloat16"),
    Wrong("dispatch", "out", lambda x: (x, x), "2"),
    Wrong("dispatch", "out", misplaced, "on meta"),
    Wrong("combine", "y", lambda y: torch.cat([y, y]), "torch.bfloat16"),
    Wrong("combine", "y", lambda y: y.flatten(), "torch.bfloat16"),
    Wrong("combine", "y", torch.Tensor.int, "torch.int32"),
    Wrong("combine", "y", misplaced, "on meta"),
    Wrong("combine", "y", wider(2), "36", CapacityError),
    Wrong("combine", "y", lambda y: (), "0"),
    Wrong("combine", "received", lambda received: received.x, "Tensor"),
    Wrong("combine", "topk_weights", lambda weights: weights[:, 1:], "torch.float32 (7, 2)"),
    Wrong("combine", "topk_weights", torch.Tensor.long, "torch.int64"),
    Wrong("combine", "topk_weights", torch.Tensor.clone, "flat", layouts=("flat",)),
    Wrong("combine", "reduce", lambda reduce: False, "flat", layouts=("flat",)),
    Wrong("combine", "bias", torch.Tensor.clone, "one", layouts=("contiguous", "padded"), also={"reduce": False}),
    Wrong("combine", "bias", lambda bias: bias[1:], "torch.bfloat16 (6, 9)"),
    Wrong("combine", "bias", lambda bias: bias[:, 1:], "8"),
    Wrong("combine", "bias", torch.Tensor.float, "torch.float32"),
    Wrong("combine", "bias", lambda bias: (bias, bias), "2"),
    Wrong("combine", "out", lambda out: out[1:], "torch.bfloat16 (6, 9)"),
    Wrong("combine", "out", torch.Tensor.int, "torch.int32"),
    Wrong("combine", "out", lambda out: (out, out), "2"),
    Wrong("combine", "out", lambda out: out.t().contiguous().t(), "(7, 9)"),
    Wrong("combine", "out", misplaced, "on meta"),
]  # fmt: skip


def call_all(ep: Any, step: Step, wrong: Wrong | None = None) -> Any:
    """A round trip in which one argument may be wrong."""
    rank = ep.rank
    x, y, weights = step.x()[rank], step.y()[rank], step.weights[rank]
    sums = torch.empty_like(x)
    spares: dict[str, dict[str, Any]] = {
        "route": {},
        "dispatch": {"out": torch.empty_like(y)},
        "combine": {"topk_weights": weights, "bias": torch.zeros_like(x), "out": sums, "reduce": True},
    }

    def call(operation: str, **arguments: Any) -> Any:
        if wrong is not None and wrong.operation == operation:
            good = {**spares[operation], **arguments}
            arguments.update(wrong.also)
            arguments[wrong.argument] = wrong.spoil(good[wrong.argument])
        return getattr(ep, operation)(**arguments)

    routing = call("route", topk_idx=step.exchange.indices[rank])
    received = call("dispatch", x=x, routing=routing, topk_weights=weights)
    return call("combine", y=y, received=received)


def run_wrong(comm: epcomm.Communicator, case: Case) -> None:
    ep = case.handle(comm)
    step = Step(case, comm.size, 0)
    for number, wrong in enumerate(wrong for wrong in WRONG if case.layout in wrong.layouts):
        call = functools.partial(call_all, ep, step, wrong if comm.rank == 1 else None)
        check_raised(comm, call, wrong.error, f"`{wrong.argument}`", wrong.got)
        round_trip(ep, Step(case, comm.size, number))


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_wrong_arguments(mode: str, layout: str) -> None:
    on_ranks(3, run_wrong, Case(mode, layout), longest=0)


def run_wrong_alone(comm: epcomm.Communicator, case: Case) -> None:
    ep = case.handle(comm)
    step = Step(case, 1, 0)
    for wrong in WRONG:
        if case.layout in wrong.layouts:
            raised = raised_by(call_all, ep, step, wrong)
            assert type(raised.error) is wrong.error and wrong.argument in raised.text
            call_all(ep, step)


@pytest.mark.parametrize("mode, layout", KINDS, ids=KIND_IDS)
def test_a_world_of_one_needs_no_reset(mode: str, layout: str) -> None:
    on_ranks(1, run_wrong_alone, Case(mode, layout))


# ---- the handle's arguments

WRONG_HANDLES: list[tuple[str, Any]] = [
    ("num_experts", 0), ("num_experts", 2.0), ("topk", 0), ("topk", 7), ("hidden", 0), ("max_tokens", -1),
    ("dtype", "bfloat16"), ("mode", "fast"), ("layout", "ragged"), ("placement", (0, 1, 2, 0, 1)),
    ("placement", (0, 1, 2, 3, 0, 1)), ("placement", "elsewhere"), ("placement", 2), ("max_recv_rows", 0),
    ("blocks", 0), ("blocks", 256),
]  # fmt: skip


def run_wrong_handles(comm: epcomm.Communicator) -> None:
    case = Case()
    for name, value in WRONG_HANDLES:
        mine = replace(case, **{name: value}) if comm.rank == 1 else case
        check_raised(comm, functools.partial(mine.handle, comm), ConfigError, f"`{name}`", str(value).strip("()"))
    for layout, alignment in (("contiguous", 0), ("padded", 2), ("flat", 2)):
        options = {"layout": layout, "alignment": alignment if comm.rank == 1 else 1}
        call = functools.partial(comm.expert_parallel, num_experts=6, topk=3, hidden=9, max_tokens=7, **options)
        check_raised(comm, call, ConfigError, "`alignment`", str(alignment))
    round_trip(case.handle(comm), Step(case, comm.size, 0))


def test_wrong_arguments_of_the_handle() -> None:
    on_ranks(3, run_wrong_handles, longest=0)
