"""Ranks on several hosts: dispatch + combine and collectives across links of a limited rate, beside gloo.

    python benchmarks/hosts.py [--rate 1gbit] [--rounds 15] [--json FILE]

Hosts are network namespaces of this machine, joined by shaped links (needs root, or user namespaces, with ip and tc).
Contestants run by turns in the same processes. gloo's are `all_to_all_single` of a row per (token, rank), packed and
summed by torch, and its collectives. `bytes`: of rows, what crosses a link one way, counted from the routing; of a
collective, the least that a host's link must carry one way, whatever the algorithm. At the link's rate that takes the
time which `roofline_fraction` is a fraction of; bursts that the link lets through make it more than 1 for small ones.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import epcomm
from benchmarks import results
from epcomm.testing import namespaces
from epcomm.world import rendezvous

TOPK = 8
WORLDS = [0, 1], [0, 0, 1, 1], [0, 1, 2]  # the node of each rank
SHAPES = (32, 7168), (256, 7168), (1024, 2048)  # tokens, hidden
SIZES = 1 << 10, 64 << 10, 1 << 20, 16 << 20  # bytes of a collective's larger side


def num_experts(size: int) -> int:
    """About 64, the same number on each rank."""
    return 64 // size * size


class Tokens:
    """One rank's tokens and where they go: small integers, whose sums are exact."""

    def __init__(self, comm: Any, num_tokens: int, hidden: int):
        generator = torch.Generator().manual_seed(comm.rank)
        self.x = torch.randint(-4, 5, (num_tokens, hidden), generator=generator).to(torch.bfloat16)
        self.index = torch.rand(num_tokens, num_experts(comm.size), generator=generator).topk(TOPK, dim=1).indices
        owner = self.index // (num_experts(comm.size) // comm.size)
        goes = torch.zeros(num_tokens, comm.size, dtype=torch.bool).scatter_(1, owner, True)
        self.to_rank = [goes[:, rank].nonzero().flatten() for rank in range(comm.size)]
        self.num_ranks = goes.sum(1, keepdim=True)
        nodes = torch.tensor(comm.nodes)
        elsewhere = nodes != comm.nodes[comm.rank]
        self.rows_by_rank = int(goes[:, elsewhere].sum())
        self.rows_by_node = sum(
            int(goes[:, nodes == node].any(1).sum()) for node in set(comm.nodes) - {comm.nodes[comm.rank]}
        )


def by_epcomm(nodes: str) -> Callable[[Any, Tokens, int, int], Callable[[], torch.Tensor]]:
    """A row per (token, rank), or per (token, node) and forwarded there. Experts give back what they got."""

    def make(comm: Any, tokens: Tokens, num_tokens: int, hidden: int) -> Callable[[], torch.Tensor]:
        ep = comm.expert_parallel(
            num_experts=num_experts(comm.size), topk=TOPK, hidden=hidden, max_tokens=num_tokens, layout="flat",
            nodes=comm.nodes if nodes == "by node" else None,
        )  # fmt: skip

        def step() -> torch.Tensor:
            received = ep.dispatch(tokens.x, ep.route(tokens.index))
            return ep.combine(received.x, received)

        return step

    return make


def by_gloo(comm: Any, tokens: Tokens, num_tokens: int, hidden: int) -> Callable[[], torch.Tensor]:
    """What one writes with torch.distributed."""

    def step() -> torch.Tensor:
        sends = torch.tensor([len(rows) for rows in tokens.to_rank])
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends)
        order = torch.cat(tokens.to_rank)
        received = torch.empty(int(receives.sum()), hidden, dtype=tokens.x.dtype)
        dist.all_to_all_single(received, tokens.x[order], receives.tolist(), sends.tolist())
        returned = torch.empty(len(order), hidden, dtype=tokens.x.dtype)
        dist.all_to_all_single(returned, received, sends.tolist(), receives.tolist())
        return torch.zeros(num_tokens, hidden).index_add_(0, order, returned.float()).to(tokens.x.dtype)

    return step


EXPERT_PARALLEL = {"epcomm, flat": by_epcomm("flat"), "epcomm, by node": by_epcomm("by node"), "gloo": by_gloo}


class Collective:
    """One collective of `num_bytes` on its larger side, into memory that is there, of small integers: sums are exact.

    `steps` by contestant each return the result, which is `wanted`.
    """

    def __init__(self, comm: Any, name: str, num_bytes: int, dtype: torch.dtype):
        size, num_nodes = comm.size, max(comm.nodes) + 1
        elements = num_bytes // dtype.itemsize // size * size
        whole = [((torch.arange(elements) * 7 + rank) % 13).to(dtype) for rank in range(size)]
        parts, total = [x.view(size, -1) for x in whole], torch.stack([x.double() for x in whole]).sum(0).to(dtype)
        x, own, out, part = whole[comm.rank], parts[comm.rank], torch.empty_like(total), parts[0][0].clone()
        gloo_out, gloo_part = torch.empty_like(out), torch.empty_like(part)
        # the least that a host's link carries one way, in shares of num_bytes
        across = (num_nodes - 1) / num_nodes
        share = {"allreduce": 2 * across, "broadcast": 1.0}.get(name, across)
        if name == "alltoall":
            share = size * across / num_nodes  # each rank's own to all ranks elsewhere
        self.least_bytes = share * num_bytes
        self.wanted = {
            "allreduce": total,
            "broadcast": whole[0],
            "allgather": torch.cat([each[0] for each in parts]),
            "reduce_scatter": total.view(size, -1)[comm.rank],
            "alltoall": torch.cat([each[comm.rank] for each in parts]),
        }[name]
        self.steps: dict[str, Callable[[], torch.Tensor]] = {
            "epcomm": {
                "allreduce": lambda: comm.allreduce(x, out=out),
                "broadcast": lambda: comm.broadcast(x if comm.rank == 0 else out, 0, out=x if comm.rank == 0 else out),
                "allgather": lambda: comm.allgather(own[0], out=out),
                "reduce_scatter": lambda: comm.reduce_scatter(x, out=part),
                "alltoall": lambda: comm.alltoall(x, out=out),
            }[name],
            "gloo": {
                "allreduce": lambda: _into(gloo_out.copy_(x), dist.all_reduce),
                "broadcast": lambda: _into(x if comm.rank == 0 else gloo_out, lambda to: dist.broadcast(to, 0)),
                "allgather": lambda: _into(gloo_out, lambda to: dist.all_gather_single(to, own[0])),
                "reduce_scatter": lambda: _into(gloo_part, lambda to: dist.reduce_scatter_single(to, x)),
                "alltoall": lambda: _into(gloo_out, lambda to: dist.all_to_all_single(to, x)),
            }[name],
        }  # fmt: skip

    def check(self, got: torch.Tensor) -> None:
        assert torch.equal(got, self.wanted)


COLLECTIVES = {
    "allreduce": torch.float32,
    "allreduce, bfloat16": torch.bfloat16,
    "broadcast": torch.float32,
    "allgather": torch.float32,
    "reduce_scatter": torch.float32,
    "alltoall": torch.float32,
}


def _into(out: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    call(out)
    return out


def measure(comm: Any, steps: dict[str, Callable[[], Any]], check: Callable[[Any], None], rounds: int) -> dict:
    """Seconds of each contestant's steps, by turns; each is the slowest rank's. Results are checked first and last."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        check(step())
    for _ in range(rounds):
        for name, step in steps.items():
            comm.barrier()
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    for step in steps.values():
        check(step())
    return {
        name: comm.allreduce(torch.tensor(taken, dtype=torch.float64), "max").tolist()
        for name, taken in seconds.items()
    }


def run_rank(nodes: list[int], rounds: int) -> list[dict]:
    rank = rendezvous.launched_rank.get().rank
    os.environ["GLOO_SOCKET_IFNAME"] = namespaces.LINK
    torch.set_num_threads(1)
    store = namespaces.open_store(rank)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=len(nodes))
    found = []
    with epcomm.init(store=store, rank=rank, world_size=len(nodes), timeout=120.0) as comm:
        assert comm.nodes == nodes, comm.nodes
        for num_tokens, hidden in SHAPES:
            tokens = Tokens(comm, num_tokens, hidden)
            wanted = (tokens.x.float() * tokens.num_ranks).to(tokens.x.dtype)

            def check(got: torch.Tensor, wanted: torch.Tensor = wanted) -> None:
                assert torch.equal(got, wanted)

            steps = {name: make(comm, tokens, num_tokens, hidden) for name, make in EXPERT_PARALLEL.items()}
            rows = comm.allreduce(torch.tensor([tokens.rows_by_rank, tokens.rows_by_node]))
            per_host = [int(count) * hidden * 2 * 2 / (max(nodes) + 1) for count in rows]  # there and back
            crossing = dict(zip(EXPERT_PARALLEL, (per_host[0], per_host[1], per_host[0])))
            seconds = measure(comm, steps, check, rounds)
            found.append({"case": {"tokens": num_tokens, "hidden": hidden}, "phase": "round_trip",
                          "seconds": seconds, "bytes": crossing})  # fmt: skip
        for (name, dtype), num_bytes in itertools.product(COLLECTIVES.items(), SIZES):
            collective = Collective(comm, name.split(",")[0], num_bytes, dtype)
            seconds = measure(comm, collective.steps, collective.check, rounds)
            crossing = dict.fromkeys(collective.steps, collective.least_bytes)
            found.append({"case": {"bytes": num_bytes}, "phase": name, "seconds": seconds, "bytes": crossing})
    dist.destroy_process_group()
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def main(
    rate: str = typer.Option("1gbit", help="of each host's link, as tc writes it"),
    rounds: int = typer.Option(15, help="measured steps of each contestant"),
    json_file: Path | None = typer.Option(None, "--json", help="write a document of `benchmarks.results` there"),
) -> None:
    """Measures ranks on several hosts."""
    missing = namespaces.available()
    if missing is not None:
        raise SystemExit(f"this machine allows no network namespaces: {missing}")
    document = results.new_document("hosts", {"rate": rate, "rounds": rounds})
    bytes_per_second = float(rate.removesuffix("gbit")) * 1e9 / 8
    table = Table("ranks on hosts", "case", "contestant", "p50 ms", "p95 ms", "MB across", "of the link", "vs gloo")
    for nodes in WORLDS:
        outcomes = namespaces.rank_outcomes_on_hosts(run_rank, nodes, nodes, rounds, rate=rate, timeout=1800.0)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        for item in outcomes[0]:
            medians = {name: percentile(taken, 0.5) for name, taken in item["seconds"].items()}
            for name, taken in item["seconds"].items():
                numbers = {f"p{p}_us": round(percentile(taken, p / 100) * 1e6, 1) for p in (50, 95, 99)}
                crossing = item["bytes"][name]
                fraction = crossing / bytes_per_second / medians[name]
                ratio = round(medians["gloo"] / medians[name], 2)
                case = {"nodes": nodes, **item["case"]}
                row = results.row(case, str(item["case"]), name, name.split(",")[0], item["phase"], "warm", numbers)
                row |= {"bytes": round(crossing), "roofline_fraction": round(fraction, 3), "samples": len(taken)}
                document["rows"].append(row | {"ratios": {"gloo": ratio}})
                table.add_row(
                    str(nodes), f"{item['phase']} {item['case']}", name,
                    f"{medians[name] * 1e3:.2f}", f"{numbers['p95_us'] / 1e3:.2f}",
                    f"{crossing / 1e6:.2f}", f"{fraction:.2f}", f"{ratio:.2f}",
                )  # fmt: skip
    Console(width=150).print(table)
    if json_file is not None:
        results.save(document, json_file)


if __name__ == "__main__":
    typer.run(main)
