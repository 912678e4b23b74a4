"""`epcomm aot`: compiles the GPU kernels ahead of time, without a GPU, and shows what the code is like."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from epcomm.errors import UnsupportedError

if TYPE_CHECKING:
    from epcomm.device.gpu.aot import CompiledArm

OLDEST_TRITON = (3, 6)
console = Console()


def require_triton() -> None:
    """Raises UnsupportedError unless there is a Triton that can compile here."""
    try:
        import triton
    except ImportError:
        raise UnsupportedError("compiling GPU kernels needs Triton: pip install 'epcomm[gpu]'") from None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        raise UnsupportedError(f"compiling GPU kernels needs Triton {oldest} or newer; this is {triton.__version__}")
    if triton.knobs.runtime.interpret:
        raise UnsupportedError("TRITON_INTERPRET makes Triton an interpreter: unset it to compile")


def compile_all(jobs: Iterable[tuple[str, str]], workers: int) -> Iterator[tuple[str, CompiledArm | Exception]]:
    """Compiles (name of an arm, arch) in processes of their own; yields names and what came of them, as they end."""
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        names = {pool.submit(compile_named, *job): job[0] for job in jobs}
        for future in as_completed(names):
            yield names[future], future.exception() or future.result()  # type: ignore[misc]


def compile_named(name: str, arch: str) -> CompiledArm:
    """Compiles one of `arms` or `link_arms` by its name: kernels themselves don't travel between processes."""
    from epcomm.device.gpu.aot import compile_arm
    from epcomm.kernels.gpu.arms import arms, link_arms

    return compile_arm({**arms(everything=True), **link_arms(everything=True)}[name], arch)


def main(
    arch: list[str] = typer.Option(["sm_90"], help="sm_80 | sm_90 | sm_100; may be given several times"),
    only: str = typer.Option("", help="only arms whose name contains this, such as 'combine IN=bf16'"),
    everything: bool = typer.Option(False, "--all", help="all arms, not a representative few: minutes"),
    network: list[str] = typer.Option([], help="nvshmem | gin: instead, arms that are linked with its device library"),
    workers: int = typer.Option(len(os.sched_getaffinity(0)), min=1, help="compiler processes"),
    json_file: Path | None = typer.Option(None, "--json", help="write everything that was found to this file as well"),
) -> None:
    """Compiles the GPU kernels without a GPU and shows what the code is like.

    Per thread: registers, bytes spilled, bytes of the widest load and store of rows. Per program: shared memory. In the
    code: acquires and releases at system scope, and its size. At last the seconds that compiling took.

    Fails if an arm spills, moves aligned rows in less than 16 bytes, or signals to less than the whole system; with a
    network also if a function isn't there, or a put may send what a network card doesn't see yet.
    """
    try:
        require_triton()
    except UnsupportedError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    from epcomm.device.gpu.aot import ARCHITECTURES
    from epcomm.device.gpu.bitcode import NETWORKS
    from epcomm.kernels.gpu.arms import arms, link_arms

    if unknown := sorted(set(network) - set(NETWORKS)):
        raise typer.BadParameter(f"--network: {', '.join(unknown)} is not one of {', '.join(NETWORKS)}")
    kernels = arms(everything)
    if network:
        kernels = {name: kernel for name, kernel in link_arms(everything).items() if kernel.network in network}
    names = [name for name in kernels if only in name]
    if unknown := sorted(set(arch) - set(ARCHITECTURES)):
        raise typer.BadParameter(f"--arch: {', '.join(unknown)} is not one of {', '.join(ARCHITECTURES)}")
    if not names:
        raise typer.BadParameter(f"--only: no arm's name contains {only!r}")
    jobs = [(name, each) for each in dict.fromkeys(arch) for name in names]
    for name, each in jobs:
        if not kernels[name].runs_on(each):
            console.print(f"{name} is not for {each}: {kernels[name].oldest_because}", markup=False)
    jobs = [(name, each) for name, each in jobs if kernels[name].runs_on(each)]
    compiled, failures = [], []
    outcomes = compile_all(jobs, max(1, min(workers, len(jobs))))
    for name, outcome in track(outcomes, "compiling", len(jobs), console=console, transient=True):
        if isinstance(outcome, Exception):
            failures.append(f"{name}: {type(outcome).__name__}: {outcome}")
        else:
            compiled.append(outcome)
            failures += [f"{outcome.name} on {outcome.arch}: {defect}" for defect in outcome.defects()]
    order = {job: at for at, job in enumerate(jobs)}
    compiled.sort(key=lambda each: order[each.name, each.arch])
    for each in dict.fromkeys(each for _, each in jobs):
        console.print(table_of(each, [arm for arm in compiled if arm.arch == each]))
    if json_file is not None:
        _write(json_file, compiled, failures)
    for failure in failures:
        console.print(failure, style="red", markup=False)
    praise = "no spills, no narrow access to aligned rows, every signal system-wide"
    verdict = f"{len(failures)} defects" if failures else praise
    console.print(f"{len(compiled)} of {len(jobs)} arms compiled: {verdict}", style="red" if failures else "green")
    raise typer.Exit(1 if failures else 0)


def table_of(arch: str, compiled: list[CompiledArm]) -> Table:
    """One line per arm, as wide as a terminal of old; `CompiledArm` says what the numbers mean."""
    table = Table("arm", title=arch, box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for column in ("regs", "smem", "spill", "ld/st", "acq/rel", "KiB", "s"):
        table.add_column(column, justify="right")
    for arm in compiled:
        orders = dict(arm.orderings)
        table.add_row(
            arm.name,
            str(arm.registers),
            str(arm.shared_bytes),
            str(arm.spill_stores),
            f"{arm.widest_load}/{arm.widest_store}" if arm.moves_payload else "-",
            f"{orders.get('acquire.sys', 0)}/{orders.get('release.sys', 0)}",
            f"{arm.cubin_bytes / 1024:.0f}",
            f"{arm.compile_seconds:.1f}",
            style="red" if arm.defects() else None,
        )
    return table


def _write(json_file: Path, compiled: list[CompiledArm], failures: list[str]) -> None:
    import triton

    document: dict[str, Any] = {
        "triton": triton.__version__,
        "arms": [{**asdict(arm), "orderings": dict(arm.orderings)} for arm in compiled],
        "failures": failures,
    }
    try:
        json_file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"--json: {error}") from None
