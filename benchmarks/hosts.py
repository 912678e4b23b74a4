"""Ranks on several hosts: dispatch + combine and allreduce across a link of a limited rate, beside gloo.

    python benchmarks/hosts.py [--rate 1gbit] [--json FILE]

Hosts are network namespaces of this machine, joined by shaped links (needs root, or user namespaces, with ip and tc).
Contestants run by turns in the same processes. gloo's are `all_to_all_single` of a row per (token, rank), packed and
summed by torch, and `all_reduce`. What crosses the link is counted from the routing; at its rate that takes the time
which `roofline_fraction` is a fraction of.
"""

from __future__ import annotations

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
from epcomm import rendezvous
from epcomm.testing import namespaces

NUM_EXPERTS, TOPK = 64, 8
LINK = "link0"  # its name in each namespace


class Tokens:
    """One rank's tokens and where they go: small integers, whose sums are exact."""

    def __init__(self, comm: Any, num_tokens: int, hidden: int):
        generator = torch.Generator().manual_seed(comm.rank)
        self.x = torch.randint(-4, 5, (num_tokens, hidden), generator=generator).to(torch.bfloat16)
        self.index = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOPK, dim=1).indices
        owner = self.index // (NUM_EXPERTS // comm.size)
        goes = torch.zeros(num_tokens, comm.size, dtype=torch.bool).scatter_(1, owner, True)
        self.to_rank = [goes[:, rank].nonzero().flatten() for rank in range(comm.size)]
        self.num_ranks = goes.sum(1, keepdim=True)
        nodes = torch.tensor(comm.nodes)
        elsewhere = nodes != comm.nodes[comm.rank]
        self.rows_by_rank = int(goes[:, elsewhere].sum())
        self.rows_by_node = sum(
            int(goes[:, nodes == node].any(1).sum()) for node in set(comm.nodes) - {comm.nodes[comm.rank]}
        )


def flat(comm: Any, tokens: Tokens, num_tokens: int, hidden: int) -> Callable[[], torch.Tensor]:
    """A row per (token, rank). Experts give their input back, so a token comes back once per rank."""
    ep = comm.expert_parallel(num_experts=NUM_EXPERTS, topk=TOPK, hidden=hidden, max_tokens=num_tokens, layout="flat")

    def step() -> torch.Tensor:
        received = ep.dispatch(tokens.x, ep.route(tokens.index))
        return ep.combine(received.x, received)

    return step


def by_node(comm: Any, tokens: Tokens, num_tokens: int, hidden: int) -> Callable[[], torch.Tensor]:
    """A row per (token, node), forwarded there."""
    ep = comm.expert_parallel(
        num_experts=NUM_EXPERTS, topk=TOPK, hidden=hidden, max_tokens=num_tokens, layout="flat", nodes=comm.nodes
    )

    def step() -> torch.Tensor:
        received = ep.dispatch(tokens.x, ep.route(tokens.index))
        return ep.combine(received.x, received)

    return step


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


EXPERT_PARALLEL = {"epcomm, flat": flat, "epcomm, by node": by_node, "gloo": by_gloo}


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


def run_rank(nodes: list[int], shapes: list[tuple[int, int]], sizes: list[int], rounds: int) -> list[dict]:
    rank = rendezvous.launched_rank.get().rank
    os.environ["GLOO_SOCKET_IFNAME"] = LINK
    torch.set_num_threads(1)
    store = namespaces.open_store(rank)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=len(nodes))
    found = []
    with epcomm.init(store=store, rank=rank, world_size=len(nodes), timeout=120.0) as comm:
        assert comm.nodes == nodes, comm.nodes
        for num_tokens, hidden in shapes:
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
        for num_bytes in sizes:
            x = torch.arange(num_bytes // 4, dtype=torch.float32) % 97
            total = x * comm.size

            def check_sum(got: torch.Tensor, total: torch.Tensor = total) -> None:
                assert torch.equal(got, total)

            def gloo(x: torch.Tensor = x) -> torch.Tensor:
                out = x.clone()
                dist.all_reduce(out)
                return out

            steps = {"epcomm": lambda x=x: comm.allreduce(x), "gloo": gloo}
            # either way a host has to send each number once, and to hear of each once
            crossing = dict.fromkeys(steps, float(num_bytes))
            seconds = measure(comm, steps, check_sum, rounds)
            found.append({"case": {"bytes": num_bytes}, "phase": "allreduce", "seconds": seconds, "bytes": crossing})
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
    for nodes in ([0, 1], [0, 0, 1, 1]):
        outcomes = namespaces.rank_outcomes_on_hosts(
            run_rank, nodes, nodes, [(32, 7168), (256, 7168), (1024, 2048)], [1 << 10, 1 << 16, 16 << 20], rounds,
            rate=rate, timeout=580.0,
        )  # fmt: skip
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
                    str(nodes), str(item["case"]), name, f"{medians[name] * 1e3:.2f}", f"{numbers['p95_us'] / 1e3:.2f}",
                    f"{crossing / 1e6:.2f}", f"{fraction:.2f}", f"{ratio:.2f}",
                )  # fmt: skip
    Console(width=150).print(table)
    if json_file is not None:
        results.save(document, json_file)


if __name__ == "__main__":
    typer.run(main)
