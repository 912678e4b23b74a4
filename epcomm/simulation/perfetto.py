"""A simulation as a trace for Perfetto and chrome://tracing: the JSON Trace Event Format, times in µs.

A rank is a process, a program a thread, a step a slice; a message is a flow from the slice that sends it to the one
that receives it. Steps on the critical path are named so.
"""

from __future__ import annotations

from typing import Any

from epcomm.simulation.timeline import Timeline


def trace_document(timeline: Timeline) -> dict[str, Any]:
    """The trace, to be written as JSON."""
    events: list[dict[str, Any]] = []
    plan = timeline.graph.plan
    critical = {segment.step for segment in timeline.critical_path}
    for rank, programs in enumerate(plan.programs):
        events.append(_metadata("process_name", f"rank {rank}", rank))
        for number, program in enumerate(programs):
            if program.steps:
                events.append(_metadata("thread_name", f"channel {program.channel}", rank, number))
    for number, (position, step) in enumerate(plan.steps()):
        where = {"pid": position.rank, "tid": position.program}
        begin, end = float(timeline.start[number]), float(timeline.complete[number])
        cause, other = timeline.cause[number]
        waited = cause.value if other < 0 else f"{cause.value}: {timeline.graph.position(other)}"
        events.append({
            "name": step.op.value, "cat": "critical" if number in critical else "step", "ph": "X",
            "ts": begin, "dur": end - begin, **where,
            "args": {"does": str(step), "waited longest for": waited, "critical": number in critical},
        })  # fmt: skip
        if step.op.receives:
            events += _flow(timeline, int(timeline.graph.match[number]), number)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"plan": plan.name}}


def _metadata(name: str, value: str, rank: int, program: int = 0) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": program, "args": {"name": value}}


def _flow(timeline: Timeline, sender: int, receiver: int) -> list[dict[str, Any]]:
    """The two ends of a message's arrow."""
    ends = (("s", sender, timeline.start[sender]), ("f", receiver, timeline.start[receiver]))
    found = []
    for phase, number, when in ends:
        position = timeline.graph.position(number)
        found.append({
            "name": "message", "cat": "message", "ph": phase, "id": sender, "ts": float(when),
            "pid": position.rank, "tid": position.program, **({"bp": "e"} if phase == "f" else {}),
        })  # fmt: skip
    return found
