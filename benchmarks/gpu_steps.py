"""What each rank does in `gpu_check`: steps whose results are checked against their definition, and timed in graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import epcomm

_HIDDEN, _TOPK, _EXPERTS = 7168, 8, 256
_STEPS_PER_GRAPH, _REPLAYS = 10, 20


def _require(name: str, got: torch.Tensor, wanted: torch.Tensor, tolerance: float = 0.0) -> None:
    """Fails unless the tensors are equal, or differ by at most `tolerance` times the wanted values' largest."""
    if tolerance == 0.0:
        if not torch.equal(got, wanted):
            raise AssertionError(f"{name}: {int((got != wanted).sum())} of {wanted.numel()} values differ")
        return
    error = (got.double() - wanted.double()).abs().max().item()
    if error > tolerance * max(1e-30, wanted.abs().max().item()):
        raise AssertionError(f"{name}: largest error {error}")


def _synchronize(comm: Any) -> None:
    """Waits for this rank's stream; on a cpu a call has ended when it returns."""
    if comm.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _data(comm: Any, rank: int, number: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers that tell ranks and calls apart; their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-8, 9, (size,), generator=generator).to(dtype).to(comm.device)


def check_collectives(comm: Any) -> dict[str, int]:
    """Barrier, allreduce, allgather, reduce_scatter, alltoall and plans, three times each; returns how many."""
    checked = 0
    for number in range(3):
        for count in (1, 1000, 40_000, 3_000_001):
            for dtype in (torch.float32, torch.bfloat16):
                everyone = [_data(comm, rank, number, count, dtype) for rank in range(comm.size)]
                total = torch.stack(everyone).float().sum(0).to(dtype)
                _require(f"allreduce of {count} {dtype}", comm.allreduce(everyone[comm.rank]), total)
                checked += 1
        rows = comm.size * 1031
        everyone = [_data(comm, rank, number, rows, torch.float32) for rank in range(comm.size)]
        own, part = everyone[comm.rank], slice(comm.rank * 1031, (comm.rank + 1) * 1031)
        _require("allgather", comm.allgather(own), torch.cat(everyone))
        _require("reduce_scatter", comm.reduce_scatter(own), torch.stack(everyone).sum(0)[part])
        _require("alltoall", comm.alltoall(own), torch.cat([x[part] for x in everyone]))
        for algorithm in ("ring", "double_binary_tree"):
            whole = comm.allreduce(own, algorithm=algorithm)
            _require(f"allreduce by {algorithm}", whole, torch.stack(everyone).sum(0))
        comm.barrier()
        checked += 6
    _synchronize(comm)
    comm.check()
    return {"checked": checked}


def _routing(rank: int, number: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts, weights) of a rank's tokens, on the host."""
    generator = torch.Generator().manual_seed(7919 * number + rank)
    scores = torch.rand(tokens, _EXPERTS, generator=generator)
    weights, experts = scores.topk(_TOPK, dim=1)
    return experts, weights


def _tokens(rank: int, number: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(104729 * number + rank)
    return torch.randn(tokens, _HIDDEN, generator=generator).bfloat16()


def _handle(comm: Any, mode: str, layout: str, tokens: int, **options: Any) -> Any:
    sizes = dict(num_experts=_EXPERTS, topk=_TOPK, hidden=_HIDDEN, max_tokens=tokens)
    return comm.expert_parallel(**sizes, mode=mode, layout=layout, **options)


def check_expert_parallel(comm: Any, mode: str, layout: str, tokens: int) -> dict[str, int]:
    """Three steps with experts that scale by their number; every row and every sum is checked."""
    ep = _handle(comm, mode, layout, tokens)
    scale = (1 + torch.arange(_EXPERTS) % 4).to(comm.device).bfloat16()
    for number in range(3):
        experts, weights = _routing(comm.rank, number, tokens)
        x, indices = _tokens(comm.rank, number, tokens).to(comm.device), experts.to(comm.device)
        received = ep.dispatch(x, ep.route(indices))
        _check_rows(comm, ep, received, layout, number, tokens)
        y = received.output_buffer()
        if layout == "flat":
            selected = received.topk_idx.long()
            own = scale[ep.local_experts.to(comm.device)]
            factor = torch.where(selected >= 0, own[selected.clamp(min=0)], 0).sum(-1)
            y.copy_(received.x * factor[:, None].to(received.x.dtype))
            given, wanted_weights = None, torch.ones(tokens, _TOPK)
        else:
            for local, count in enumerate(received.expert_counts_list):
                y[local, :count] = received.x[local, :count] * scale[ep.local_expert_ids[local]]
            given, wanted_weights = weights.to(comm.device), weights
        out = ep.combine(y, received, given)
        factors = (wanted_weights.double() * (1 + experts % 4).double()).sum(1).to(comm.device)
        _require("combine", out, x.double() * factors[:, None], tolerance=2.0**-6)
    ep.close()
    return {"tokens_checked": 3 * tokens}


def _check_rows(comm: Any, ep: Any, received: Any, layout: str, number: int, tokens: int) -> None:
    """Each received row is the row of its source token, bit by bit."""
    everyone = torch.stack([_tokens(rank, number, tokens) for rank in range(comm.size)]).to(comm.device)
    ranks, source = received.source_rank.to(comm.device).long(), received.source_token.long()
    if layout == "flat":
        _require("dispatched rows", received.x, everyone[ranks, source])
        return
    for local, count in enumerate(received.expert_counts_list):
        wanted = everyone[ranks[local, :count], source[local, :count]]
        _require(f"rows of expert {local}", received.x[local, :count], wanted)


def check_quantized(comm: Any, tokens: int) -> dict[str, int]:
    """Float8 rows and scales of a flat dispatch are, bit by bit, what torch makes of the source tokens."""
    ep = _handle(comm, "throughput", "flat", tokens)
    for number in range(3):
        options = epcomm.Float8(round_scales_to_power_of_two=number > 0, packed_ue8m0=number > 1)
        x = _tokens(comm.rank, number, tokens).to(comm.device)
        received = ep.dispatch(x, ep.route(_routing(comm.rank, number, tokens)[0].to(comm.device)), quantize=options)
        everyone = torch.cat([_tokens(rank, number, tokens) for rank in range(comm.size)])
        source = received.source_rank.cpu().long() * tokens + received.source_token.cpu().long()
        for name, got, wanted in zip(("rows", "scales"), received.x, options.quantized(everyone), strict=True):
            _require(f"float8 {name}", got.cpu().view(torch.uint8), wanted[source].view(torch.uint8))
    ep.close()
    return {"tokens_checked": 3 * tokens}


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A graph of what `call` launches. (`torch.cuda.graph` waits for the device, and so for peers that wait for us.)"""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        call()
    finally:
        graph.capture_end()
    return graph


class _GraphedSteps:
    """Several dispatches and combines in one CUDA graph, on static tensors."""

    def __init__(self, comm: Any, mode: str, layout: str, tokens: int, steps: int):
        self.ep, self.comm = _handle(comm, mode, layout, tokens, host_sync=False), comm
        self.x = _tokens(comm.rank, 0, tokens).to(comm.device)
        self.indices = _routing(comm.rank, 0, tokens)[0].to(comm.device)
        self.out = torch.empty_like(self.x)
        self.rows = 0
        self._route_inside = mode == "latency"  # throughput: a routing is used by several layers' worth of steps
        self._routing = None if self._route_inside else self.ep.route(self.indices)
        for _ in range(3):  # compiles and binds
            self._step()
        torch.cuda.current_stream().synchronize()
        comm.barrier()
        torch.cuda.current_stream().synchronize()
        self.graph = _captured(lambda: [self._step() for _ in range(steps)])

    def _step(self) -> None:
        routing = self.ep.route(self.indices) if self._route_inside else self._routing
        received = self.ep.dispatch(self.x, routing)
        self.ep.combine(received.output_buffer(), received, out=self.out)

    def replay_us(self, replays: int) -> float:
        """Microseconds of one replay, from the host's clock around `replays` of them."""
        stream = torch.cuda.current_stream()
        self.graph.replay()
        stream.synchronize()
        self.comm.barrier()
        stream.synchronize()
        started = time.perf_counter()
        for _ in range(replays):
            self.graph.replay()
        stream.synchronize()
        return (time.perf_counter() - started) / replays * 1e6


def check_graph_replays(comm: Any, replays: int) -> dict[str, float]:
    """One captured latency step, replayed with new tokens and new routing; identity experts, so sums are known."""
    tokens = 128
    ep = _handle(comm, "latency", "padded", tokens)
    x = torch.zeros(tokens, _HIDDEN, dtype=torch.bfloat16, device=comm.device)
    indices = torch.zeros(tokens, _TOPK, dtype=torch.int64, device=comm.device)
    out = torch.empty_like(x)

    def step() -> None:
        received = ep.dispatch(x, ep.route(indices))
        ep.combine(received.x, received, out=out)

    for number in range(3):
        indices.copy_(_routing(comm.rank, number, tokens)[0])
        step()
    torch.cuda.current_stream().synchronize()
    graph = _captured(step)
    routings = [_routing(comm.rank, number, tokens)[0].to(comm.device) for number in range(16)]
    inputs = [_tokens(comm.rank, number, tokens).to(comm.device) for number in range(16)]
    started = time.perf_counter()
    for number in range(replays):
        x.copy_(inputs[number % 16])
        indices.copy_(routings[number % 16])
        graph.replay()
        if number % 50 == 0 or number == replays - 1:
            _require(f"replay {number}", out, inputs[number % 16].double() * _TOPK, tolerance=2.0**-6)
    comm.check()
    return {"replay_us": round((time.perf_counter() - started) / replays * 1e6, 2)}


def time_steps(comm: Any, mode: str, layout: str, tokens: int) -> dict[str, float]:
    """Microseconds of a dispatch and combine of this rank (latency mode: and route), and the bytes it moves in HBM."""
    steps = _GraphedSteps(comm, mode, layout, tokens, _STEPS_PER_GRAPH)
    step_us = steps.replay_us(_REPLAYS) / _STEPS_PER_GRAPH
    experts = _routing(comm.rank, 0, tokens)[0]
    owners = experts // (_EXPERTS // comm.size)
    rows = tokens * _TOPK if layout != "flat" else sum(len(set(row)) for row in owners.tolist())
    # dispatch reads x once and writes each row; combine reads each row and writes the result
    moved = (2 * rows + 2 * tokens) * _HIDDEN * 2
    return {"step_us": round(step_us, 2), "hbm_bytes": moved}


def copy_bandwidth() -> float:
    """GB/s (read and written together) of a device-to-device copy of 1 GiB."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return round(2 * source.numel() / _event_us(lambda: target.copy_(source)) / 1e3, 1)


def permutation_us(tokens: int) -> dict[str, float]:
    """What one GPU does instead, Megatron-style: index_select to expert order, index_add back. Microseconds."""
    x = _tokens(0, 0, tokens).cuda()
    experts = _routing(0, 0, tokens)[0].cuda()
    order = experts.flatten().argsort(stable=True) // _TOPK
    rows, out = x.index_select(0, order), torch.zeros_like(x)
    dispatch = _event_us(lambda: torch.index_select(x, 0, order, out=rows))
    combine = _event_us(lambda: out.zero_().index_add_(0, order, rows))
    return {"dispatch_us": round(dispatch, 2), "combine_us": round(combine, 2)}


def _event_us(call: Any, repetitions: int = 20) -> float:
    """Median microseconds of a call on the current stream, by CUDA events."""
    for _ in range(3):
        call()
    samples = []
    for _ in range(repetitions):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3)
    return sorted(samples)[len(samples) // 2]
