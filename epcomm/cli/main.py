"""The `epcomm` command: `info`, `demo`, `explain`, `plan`, `model`, `aot`, and in a checkout `bench`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.cli.aot import main as aot_command
from epcomm.cli.explain import explain_command
from epcomm.cli.model import app as model_commands
from epcomm.cli.plan import app as plan_commands

app = typer.Typer(
    help="Expert parallelism and collectives between the ranks of an ML job. In a checkout: `epcomm bench`.",
    no_args_is_help=True,
)
app.add_typer(model_commands, name="model")
app.add_typer(plan_commands, name="plan")
app.command("aot")(aot_command)
app.command("explain")(explain_command)
_CHECKOUT = Path(__file__).resolve().parents[2]
console = Console()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda_state() -> str:
    import torch

    if importlib.util.find_spec("triton") is None:
        return "not taken by auto: pip install 'epcomm[gpu]' (Triton is missing)"
    from epcomm.kernels.gpu.cuda import require_cuda

    try:
        name = torch.cuda.get_device_name(require_cuda(torch.device("cuda")))
        return f"taken by auto among ranks of one host whose GPUs reach each other; {name}; not run on a GPU yet"
    except Exception as error:  # whatever keeps it from being used, it is what this line is to tell
        return f"not taken by auto: {error}"


def _networks() -> list[tuple[str, str]]:
    """What `init(transport="auto")` would make of each network of GPUs here. Takes a few seconds the first time."""
    if importlib.util.find_spec("triton") is None:
        return []
    import torch

    from epcomm.heap.transport import explained

    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
    return [(f"cuda target ({name})", state) for name, state in explained(device)]


def _between_hosts() -> list[tuple[str, str]]:
    """What `init(transport="auto")` would make of each way between CPU ranks of this host and of others."""
    if sys.platform != "linux":
        return [("cpu target, several hosts", "not available: needs Linux")]
    from epcomm.hosts.transport import explained

    return [(f"cpu target, several hosts ({name})", state) for name, state in explained()]


def _availability() -> list[tuple[str, str]]:
    """What could be used here, and why the rest can't."""
    import torch.distributed as dist

    mpi = "available" if importlib.util.find_spec("mpi4py") else "not available: pip install 'epcomm[bench]'"
    bench = "available" if _has_benchmarks() else "not available: benchmarks/ comes with a checkout, not with a wheel"
    return [
        ("cpu target (shared memory)", "available" if sys.platform == "linux" else "not available: needs Linux"),
        *_between_hosts(),
        ("cuda target (peer_memory)", _cuda_state()),
        *_networks(),
        ("gloo, for comparison", "available" if dist.is_gloo_available() else "not available in this torch"),
        ("MPI, for comparison", mpi),
        ("epcomm bench", bench),
    ]


@app.command()
def info() -> None:
    """Prints versions, the machine, and what is available."""
    import llvmlite.binding as llvm

    from epcomm.device.cpu.compile import cache_directory

    features = [name for name in ("avx512f", "avx2", "f16c", "neon") if llvm.get_host_cpu_features().get(name)]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    table = Table(show_header=False, box=None)
    for name in ("epcomm", "torch", "numba", "llvmlite", "numpy", "mpi4py"):
        table.add_row(name, _version(name))
    table.add_row("python", platform.python_version())
    table.add_row("cpu", f"{llvm.get_host_cpu_name()} ({', '.join(features) or 'generic vectors'})")
    table.add_row("cores", str(len(os.sched_getaffinity(0))))
    table.add_row("memory", f"{memory:.1f} GiB")
    table.add_row("compiled kernels", str(cache_directory()))
    for name, state in _availability():
        table.add_row(name, escape(state))  # epcomm[gpu] is no markup
    console.print(table)


@app.command()
def demo(
    ranks: int = typer.Option(2, help="rank processes"),
    tokens: int = typer.Option(512, help="tokens per rank"),
    compare: bool = typer.Option(True, help="measure beside gloo and MPI as well"),
) -> None:
    """Moves MoE traffic between processes, checks it, and measures it beside gloo and MPI."""
    import epcomm
    from epcomm.cli.demo import HIDDEN, NUM_EXPERTS, TOPK, run_rank

    console.print(
        f"[bold]{ranks} ranks[/], {tokens} tokens each, {NUM_EXPERTS} experts, top-{TOPK}, hidden {HIDDEN}, bfloat16"
    )
    started = time.perf_counter()
    reports = epcomm.launch(run_rank, ranks, tokens, 10)
    table = Table("rank", "rows received", "largest error", *(f"{name}, µs" for name in reports[0].microseconds))
    for rank, report in enumerate(reports):
        times = (f"{value:.0f}" for value in report.microseconds.values())
        table.add_row(str(rank), str(report.rows_received), f"{report.largest_error:.1e}", *times)
    console.print(table)
    seconds = time.perf_counter() - started
    console.print(f"[green]every result checked[/] against its definition; {seconds:.1f} s in all")
    if compare:
        raise typer.Exit(_compare(ranks, tokens))


def _compare(ranks: int, tokens: int) -> int:
    """Short runs of the two benches; the exit code."""
    if not _has_benchmarks():
        console.print("no comparison: benchmarks/ comes with a checkout, not with a wheel")
        return 0
    expert_parallel, allreduce = _benchmark("expert_parallel"), _benchmark("allreduce")
    measurement, reporting = _benchmark("ep_measurement"), _benchmark("reporting")
    with reporting.progress_bar() as progress:
        ep_document = expert_parallel.run_ep(
            expert_parallel.EpOptions(
                ranks=(ranks,),
                tokens=(tokens,),
                hidden=(2048,),
                settings=measurement.Settings(budget=3.0, phases=False, elsewhere=False),
            ),
            progress,
        )
        allreduce_document = allreduce.run_allreduce(
            allreduce.AllreduceOptions(ranks=(ranks,), sizes=(1 << 10, 1 << 20), dtype=("float32",), budget=1.0),
            progress,
        )
    codes = [reporting.deliver(document, None, None, console) for document in (ep_document, allreduce_document)]
    return max(codes)


def _has_benchmarks() -> bool:
    return (_CHECKOUT / "benchmarks" / "__init__.py").exists()


def _benchmark(name: str) -> Any:
    """A module of the checkout's benchmarks."""
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
    return importlib.import_module(f"benchmarks.{name}")


def _add_bench_commands() -> None:
    bench = typer.Typer(help="Measures operations beside gloo, MPI and the copy roofline.", no_args_is_help=True)
    for command, module in (("ep", "expert_parallel"), ("allreduce", "allreduce")):
        bench.command(command)(_benchmark(module).main)
    app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the `epcomm` command."""
    if "bench" in sys.argv[1:2]:
        if not _has_benchmarks():
            console.print("epcomm bench: benchmarks/ comes with a checkout of the repository, not with a wheel")
            raise SystemExit(2)
        _add_bench_commands()
    app()
