"""`epcomm explain COLLECTIVE`."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console

from epcomm.collectives.cost.choice import CHANNELS, DTYPES, Request
from epcomm.collectives.cost.machines import MOST_BUILT, find_machine
from epcomm.collectives.cost.protocols import KERNEL, PRICED
from epcomm.collectives.cost.schedules import SCHEDULES
from epcomm.collectives.plan import COLLECTIVES
from epcomm.errors import EpcommError
from epcomm.explain.drawings import check_path, draw_placement, draw_schedule
from epcomm.explain.explanation import MOST_SIMULATED, Explanation, explain
from epcomm.explain.tables import print_explanation
from epcomm.simulation.perfetto import trace_document
from epcomm.topology import PRESETS

console = Console()

_MACHINES = " | ".join(("host, which is this machine", *PRESETS))
_TOPOLOGY = typer.Option("dgx_h100", help=f"{_MACHINES}, or a file: a topology dump of NCCL's or RCCL's")
#: No GPU has as many SMs; to simulate more takes minutes.
_MOST_PROGRAMS = 256
_TRACE = typer.Option(None, help="write the simulation to this JSON file, for Perfetto")
_DRAW = typer.Option(None, help="draw the schedule in space and time to this file, SVG, PNG or PDF")
_DRAW_RING = typer.Option(None, help="draw the ring's order on the machine to this file, SVG, PNG or PDF")


def explain_command(
    collective: str = typer.Argument(help=" | ".join(COLLECTIVES)),
    ranks: int = typer.Option(8, help="one per GPU, or per core"),
    num_bytes: int = typer.Option(
        1 << 20, "--bytes", help="of the tensor; of a rank's block in allgather, reduce_scatter, alltoall"
    ),
    root: int = typer.Option(0, help="of a broadcast or reduce"),
    topology: str = _TOPOLOGY,
    dtype: str = typer.Option("float32", help=" | ".join(DTYPES)),
    algorithm: str = typer.Option("auto", help=f"auto | {' | '.join(SCHEDULES)}"),
    protocol: str = typer.Option("auto", help=f"auto | {KERNEL} | {' | '.join(PRICED)}"),
    programs: int = typer.Option(
        CHANNELS[-1], max=_MOST_PROGRAMS, help="of a rank, for operations: a plan's channels at most"
    ),
    trace: Path | None = _TRACE,
    draw: Path | None = _DRAW,
    draw_ring: Path | None = _DRAW_RING,
) -> None:
    """Which plan a collective gets on a machine, why, what it would cost, and what else to ask for. Runs nothing."""
    try:
        for name, path in (("draw", draw), ("draw-ring", draw_ring)):
            if path is not None:
                check_path(name, path)
        machine = find_machine(topology, ranks)
        request = Request(num_bytes, machine, dtype, collective, root, num_programs=programs)
        explanation = explain(request, algorithm, protocol)
        print_explanation(console, explanation)
        _write(explanation, trace, draw, draw_ring)
    except (EpcommError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def _write(explanation: Explanation, trace: Path | None, draw: Path | None, draw_ring: Path | None) -> None:
    timeline, machine = explanation.timeline, explanation.request.machine
    if timeline is None and (trace or draw):
        console.print(f"no trace, no schedule: plans of more than {MOST_SIMULATED} ranks are not made")
    elif timeline is not None:
        if trace is not None:
            trace.write_text(json.dumps(trace_document(timeline)))
            console.print(f"{trace}: open it in https://ui.perfetto.dev")
        if draw is not None:
            draw_schedule(timeline, draw)
    if draw_ring is not None and not machine.is_whole:
        console.print(f"no ring: more than {MOST_BUILT} ranks are not drawn")
    elif draw_ring is not None:
        draw_placement(machine.topology, list(machine.world.order or range(machine.num_ranks)), draw_ring)
    for path in (draw, draw_ring):
        if path is not None and path.exists():
            console.print(f"{path}: drawn")
