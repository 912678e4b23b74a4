"""The same bits from run to run, whatever the timing and the number of threads; and from layout to layout.

The data is such that another order of summation gives other bits.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from ep_cases import Case, Step, in_all_kinds, on_ranks

import epcomm

CASE = Case(hidden=50, num_experts=12, topk=6, max_tokens=40, dtype=torch.float32, gate="zipf", alignment=4)


def rough(shape: Any, *identity: int) -> torch.Tensor:
    """Float32 of very different magnitudes, the same for the same identity."""
    generator = torch.Generator().manual_seed(hash(identity) % 2**31)
    return torch.randn(*shape, generator=generator) * torch.exp(4 * torch.randn(*shape, generator=generator))


def expert_outputs(ep: Any, received: Any) -> torch.Tensor:
    """What depends on (expert, source rank, token) alone, in whatever row that is; flat: on (rank, source, token)."""
    y = torch.zeros(received.x.shape)
    real = received.is_real
    if ep.is_flat:
        local = torch.zeros(len(y), dtype=torch.int64)
    elif y.dim() == 3:
        local = torch.arange(len(y))[:, None].expand(real.shape)[real]
    else:
        local = received.topk_idx[real].long()
    rows = zip(local.tolist(), received.source_rank[real].tolist(), received.source_token[real].tolist())
    ids = [ep.rank if ep.is_flat else ep.local_expert_ids[number] for number, _, _ in rows]
    origins = zip(received.source_rank[real].tolist(), received.source_token[real].tolist())
    values = [rough((y.shape[-1],), expert, *origin) for expert, origin in zip(ids, origins)]
    y[real] = torch.stack(values) if values else torch.zeros(0, y.shape[-1])
    return y


def results(comm: epcomm.Communicator, case: Case, exact_weights: bool = False) -> torch.Tensor:
    """What combine makes of it, and its gradients."""
    ep = case.handle(comm)
    step = Step(case, comm.size, 1)
    index = step.exchange.indices[comm.rank]
    x = rough((len(index), case.hidden), comm.rank).requires_grad_()
    weights = rough(index.shape, comm.rank, 9)
    weights = (torch.exp2(weights.frexp().exponent) if exact_weights else weights).requires_grad_()
    received = ep.dispatch(x, ep.route(index), weights if ep.is_flat else None)
    y = received.x * expert_outputs(ep, received)
    out = ep.combine(y, received, None if ep.is_flat else weights)
    out.backward(rough(out.shape, comm.rank, 7))
    gradient = torch.zeros_like(weights) if weights.grad is None else weights.grad
    ep.close()
    return torch.cat([out.detach(), x.grad, gradient], dim=1)


def run_all(comm: epcomm.Communicator) -> list[str]:
    return [
        hashlib.sha256(results(comm, case).numpy().tobytes()).hexdigest() for case in in_all_kinds([CASE])
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_from_run_to_run(world: int) -> None:
    """Other threads, other delays, processes or threads: the same bits."""
    first = on_ranks(world, run_all, longest=0)
    assert on_ranks(world, run_all, disturb=world) == first
    assert on_ranks(world, run_all, num_threads=2, longest=0) == first
    assert on_ranks(world, run_all, ranks="threads", longest=0) == first


def run_layouts(comm: epcomm.Communicator) -> None:
    """One row per (token, expert) is summed in slot order in every layout and mode; so the bits are the same."""
    found = {}
    for case in in_all_kinds([CASE]):
        if case.layout != "flat" and case.wire != "rank":
            found[case.mode, case.layout] = results(comm, case)
    first = next(iter(found.values()))
    for kind, values in found.items():
        assert torch.equal(values, first), kind
    by_rank = [results(comm, case) for case in in_all_kinds([CASE]) if case.wire == "rank"]
    assert torch.equal(*by_rank)
    assert not torch.equal(by_rank[0], first)  # another order: the data would tell


def test_from_layout_to_layout() -> None:
    on_ranks(3, run_layouts, longest=0)


def run_parity(comm: epcomm.Communicator) -> list[str]:
    return [hashlib.sha256(results(comm, CASE, exact_weights=True).numpy().tobytes()).hexdigest()]


def test_from_target_to_target() -> None:
    """Numba's kernels and Triton's, interpreted, have the same arithmetic.

    But for fused multiply-adds, which the interpreter rounds twice: here the products are exact.
    """
    assert on_ranks(2, run_parity, longest=0) == on_ranks(2, run_parity, kernels="mixed", longest=0)
