"""The GPU target's kernels among ranks of several nodes, interpreted, by a network that is late and out of order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from ep_cases import KINDS, Case, Step, in_all_kinds, require, run_cases

import epcomm
from epcomm.device import control
from epcomm.moe.quantize import Float8
from epcomm.testing.adversary import delay_operations
from epcomm.testing.interpreter import kernels_of
from epcomm.testing.oracle import combined
from epcomm.testing.ranks import run_ranks

WORLDS = {"1+1": [0, 1], "1+2": [0, 1, 1], "2+2": [0, 0, 1, 1], "interleaved": [0, 1, 0, 1]}
TRAFFIC = ["1+1", "2+2", "interleaved"]
CASES = [
    Case(gate="holes_and_duplicates", tokens="uneven"),
    Case(hidden=16, tokens="none_on_even_ranks", gate="zipf", index_dtype=torch.int32, dtype=torch.float32),
]


def on_nodes(nodes: Sequence[int], body: Callable[..., Any], *args: Any, target: Mapping[str, Any] | None = None,
             **init: Any) -> list[Any]:  # fmt: skip
    """What ``body(communicator, *args)`` returns on ranks that reach those of their own node by load and store only.

    `target`: more options of `InterpretedTarget`.
    """

    def run() -> Any:
        options = {"network": "remote", "nodes": nodes, **(target or {})}
        with kernels_of("triton", **options), epcomm.init(timeout=30.0, **init) as comm:
            delay_operations(comm, seed=comm.size, longest=0.0005)
            return body(comm, *args)

    return run_ranks(run, len(nodes), timeout=100.0)


def tell_late(comm: epcomm.Communicator) -> None:
    """From now on other nodes learn what this rank calls long after the other words of the call."""
    network = comm._runtime._proxy
    raise_word, headers = network.raise_word, range(control.HEADERS, control.control_region_bytes(comm.size))

    def raise_late(window: int, rank: int, offset: int, value: int) -> None:
        if offset in headers:
            network._raised[window, rank, offset] = time.monotonic() + 0.3  # words at one place keep their order
        raise_word(window, rank, offset, value)

    network.raise_word = raise_late


@pytest.mark.parametrize("nodes", [WORLDS[name] for name in TRAFFIC], ids=TRAFFIC)
def test_traffic(nodes: list[int]) -> None:
    """Few cases: the interpreter needs milliseconds for what a kernel does in microseconds."""
    chosen = list(in_all_kinds(CASES[:1]))
    on_nodes(nodes, run_cases, chosen + CASES[1:] if len(nodes) == 2 else chosen[int(nodes[1]) :: 3])


def run_options(comm: epcomm.Communicator, cases: Sequence[Case]) -> None:
    """Unreduced, quantised both ways, split, and of several tensors."""
    for case in cases:
        ep = case.handle(comm)
        for number in range(2):
            step = Step(case, comm.size, number)
            routing = ep.route(step.exchange.indices[comm.rank])
            x, y = step.x()[comm.rank], step.y()[comm.rank]
            received = ep.dispatch(x, routing, split=True).finish()
            again = ep.dispatch((x[:, :64], step.weights[comm.rank].double()), routing)
            defined = step.exchange.rows[comm.rank].is_real if case.layout == "padded" else slice(None)
            require(step, again.x[0][defined], received.x[defined][..., :64])
            halves = ep.combine(y, received, split=True).finish()
            require(step, halves, combined(step.exchange, comm.rank, step.y(), None).exact.to(case.dtype))
            if case.layout != "flat":
                slots = ep.combine(y, received, reduce=False)
                require(step, slots.sum(1), halves)
            codes, _ = ep.dispatch(x, routing, quantize=Float8()).x
            wanted, _ = Float8().quantized(received.x.contiguous().view(-1, case.hidden))
            real = defined.reshape(-1) if case.layout == "padded" else defined
            require(step, codes.reshape(-1, case.hidden)[real].float(), wanted[real].float())
        ep.close()


def test_options() -> None:
    case = Case(hidden=128, num_experts=5, max_tokens=5, tokens="uneven", dtype=torch.float32)
    on_nodes(WORLDS["1+1"], run_options, [replace(case, mode=mode, layout=layout) for mode, layout in KINDS[::2]])
    on_nodes(WORLDS["1+1"], run_options, [replace(case, wire="rank")])
