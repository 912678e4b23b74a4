"""Drawings of an explanation: the schedule in space and time, and the ring among the machine's devices.

The file's name says the format (SVG, PNG, PDF). They need matplotlib: UnsupportedError says how to get it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epcomm.errors import ConfigError, UnsupportedError
from epcomm.simulation.timeline import Timeline
from epcomm.topology import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
#: More messages would be a blot.
_MOST_ARROWS = 2000
_SUMMING, _COPYING, _CRITICAL = "#2166ac", "#5aae61", "#b2182b"
_PALETTE = ("#2166ac", "#5aae61", "#f4a582", "#762a83", "#80cdc1", "#bababa")


def check_path(argument: str, path: Path) -> None:
    """ConfigError unless a drawing can have this name, in a folder that exists; UnsupportedError without matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"argument `{argument}`: wanted a name that ends in {', '.join(FORMATS)}, got {path}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"argument `{argument}`: wanted a folder that exists, got {path.absolute().parent}")
    _figure(1, 1)


def draw_schedule(timeline: Timeline, path: Path) -> None:
    """A line per rank and channel from left to right in time, its steps as bars, its messages as arrows.

    Sums are blue, copies green; the critical path is red.
    """
    plan, graph = timeline.graph.plan, timeline.graph
    rows: dict[tuple[int, int], int] = {}
    for position, _ in plan.steps():
        rows.setdefault((position.rank, position.program), len(rows))
    figure = _figure(11, 1.5 + 0.28 * max(len(rows), 6))
    axes = figure.subplots()
    critical = {segment.step for segment in timeline.critical_path}
    for number, (position, step) in enumerate(plan.steps()):
        row, begin, end = rows[position.rank, position.program], timeline.start[number], timeline.complete[number]
        colour = _CRITICAL if number in critical else _SUMMING if step.op.reduces else _COPYING
        axes.barh(row, max(end - begin, timeline.makespan / 1000), 0.5, left=begin, color=colour, alpha=0.8)
    senders = [int(each) for each in graph.match if each >= 0]
    receivers = [number for number in range(graph.num_steps) if graph.match[number] >= 0]
    on_path = {segment.step for segment in timeline.critical_path if segment.is_message}
    pairs = sorted(zip(senders, receivers), key=lambda pair: pair[0] not in on_path)
    for sender, receiver in pairs[:_MOST_ARROWS]:
        ends = [rows[graph.rank[each], graph.program[each]] for each in (sender, receiver)]
        colour = _CRITICAL if sender in on_path else "#888888"
        times = [timeline.start[sender], timeline.arrival[sender]]
        axes.plot(times, ends, color=colour, linewidth=1.4 if sender in on_path else 0.4, zorder=3)
    axes.set_yticks(range(len(rows)), [f"rank {rank}, program {program}" for rank, program in rows], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("µs")
    title = f"{plan.name}, {plan.collective}: {timeline.makespan:.1f} µs; red: critical path"
    if len(pairs) > _MOST_ARROWS:
        title += f"; {_MOST_ARROWS} of {len(pairs)} messages"
    axes.set_title(title, fontsize=9)
    figure.savefig(path)


def draw_placement(topology: Topology, order: list[int], path: Path) -> None:
    """Ranks around a circle in a ring's order, in the colour of their node, with each hop's bandwidth."""
    figure = _figure(7, 7)
    axes = figure.subplots()
    angles = [math.pi / 2 - 2 * math.pi * place / len(order) for place in range(len(order))]
    places = [(math.cos(angle), math.sin(angle)) for angle in angles]
    hops = list(zip(range(len(order)), [*range(1, len(order)), 0])) if len(order) > 1 else []
    widest = max((topology.bandwidth(order[a], order[b]) for a, b in hops), default=1.0)
    for a, b in hops:
        bandwidth = topology.bandwidth(order[a], order[b])
        (x, y), (to_x, to_y) = places[a], places[b]
        style = {"arrowstyle": "->", "linewidth": 0.5 + 2.5 * bandwidth / widest, "shrinkA": 10, "shrinkB": 10}
        axes.annotate("", (to_x, to_y), (x, y), arrowprops=style)
        if len(order) <= 32:
            label = f"{bandwidth:g} {topology.unit}"
            axes.text(0.56 * (x + to_x), 0.56 * (y + to_y), label, fontsize=6, ha="center", va="center")
    for rank, (x, y) in zip(order, places):
        colour = _PALETTE[topology.node_of(rank) % len(_PALETTE)]
        axes.scatter([x], [y], s=180, color=colour, zorder=3)
        axes.text(x, y, str(rank), fontsize=7, ha="center", va="center", color="white", zorder=4)
    axes.set_title(f"ring on {topology.name}; a colour per node, width by bandwidth", fontsize=9)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.savefig(path)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("drawings need matplotlib: pip install 'epcomm[plot]'") from None
    options: dict[str, Any] = {"figsize": (width, height), "layout": "constrained"}
    return Figure(**options)
