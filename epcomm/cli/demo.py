"""The main job in small: mixture-of-experts traffic between processes, checked against its definition."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import epcomm

NUM_EXPERTS, TOPK, HIDDEN = 64, 8, 2048


@dataclass
class Report:
    """What one rank saw."""

    rows_received: int
    largest_error: float  # relative to the largest value of the result
    microseconds: dict[str, float]  # per operation, best of several


def run_rank(tokens: int, repetitions: int) -> Report:
    """One rank of the demo: route, dispatch, experts, combine, allreduce, with every result checked."""
    with epcomm.init(timeout=60.0) as comm:
        ep = comm.expert_parallel(
            num_experts=NUM_EXPERTS, topk=TOPK, hidden=HIDDEN, max_tokens=tokens, dtype=torch.bfloat16, layout="flat"
        )
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float32).bfloat16()
        scores = torch.rand(tokens, NUM_EXPERTS, generator=generator)
        weights, experts = scores.softmax(-1).topk(TOPK)
        scales = torch.linspace(0.5, 2.0, NUM_EXPERTS)  # expert e multiplies its rows by scales[e]
        times: dict[str, float] = {}
        result = torch.empty_like(x)
        rows = 0
        for _ in range(repetitions):
            begin = time.perf_counter()
            routing = ep.route(experts)
            received = ep.dispatch(x, routing, weights)
            dispatched = time.perf_counter()
            y = received.output_buffer()
            _run_experts(received, ep.local_experts, scales, y)
            comm.barrier()
            computed = time.perf_counter()
            ep.combine(y, received, out=result)
            ended = time.perf_counter()
            _keep_best(times, "route + dispatch", dispatched - begin)
            _keep_best(times, "combine", ended - computed)
            rows = received.x.shape[0]
            del received, y
        wanted = x.double() * (weights.double() * scales.double()[experts]).sum(1, keepdim=True)
        error = ((result.double() - wanted).abs().max() / wanted.abs().max()).item()
        # two roundings per rank's partial sum and one of the result, to bfloat16's 8 bits
        assert error < 2**-6, f"rank {comm.rank}: combine differs from its definition by {error}"
        _check_allreduce(comm, times, repetitions)
        return Report(rows, error, {name: seconds * 1e6 for name, seconds in times.items()})


def _run_experts(received, local_experts: torch.Tensor, scales: torch.Tensor, y: torch.Tensor) -> None:
    """Stand-in for expert MLPs: each row times the weighted scales of its experts on this rank."""
    mine = received.topk_idx >= 0
    local = scales[local_experts][received.topk_idx.clamp(min=0)]
    factor = torch.where(mine, received.topk_weights * local, 0.0).sum(1, keepdim=True)
    torch.mul(received.x, factor, out=y)


def _check_allreduce(comm: epcomm.Communicator, times: dict[str, float], repetitions: int) -> None:
    values = torch.arange(1 << 18, dtype=torch.float32) % 1000 + comm.rank
    wanted = comm.size * (torch.arange(1 << 18, dtype=torch.float32) % 1000) + sum(range(comm.size))
    out = torch.empty_like(values)
    for _ in range(repetitions):
        begin = time.perf_counter()
        comm.allreduce(values, out=out)
        _keep_best(times, "allreduce of 1 MiB", time.perf_counter() - begin)
        assert torch.equal(out, wanted), f"rank {comm.rank}: allreduce differs from its definition"


def _keep_best(times: dict[str, float], name: str, seconds: float) -> None:
    times[name] = min(seconds, times.get(name, seconds))
