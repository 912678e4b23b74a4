"""A plan for people: a table with a row per step."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.collectives.plan.plan import Plan
from epcomm.collectives.plan.verify import verify
from epcomm.errors import PlanError


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints what the plan is, what was proved about it or why it is wrong, and its steps."""
    console = console or Console()
    placements = " and ".join("in place" if in_place else "out of place" for in_place in plan.placements)
    title = f"{plan.name}: {plan.collective}, {placements}, {plan.scratch_chunks} chunks of scratch"
    table = Table("rank", "channel", "step", "does", "after")
    for position, step in plan.steps():
        place = str(position.channel)
        if position.program != position.channel:
            place += f" (program {position.program})"
        after = ", ".join(f"{program}:{number}" for program, number in step.after)
        table.add_row(str(position.rank), place, str(position.step), escape(str(step)), after)
    console.print(title, markup=False, highlight=False)
    console.print(table)
    console.print(_verdict(plan), markup=False, highlight=False)


def _verdict(plan: Plan) -> str:
    try:
        proof = verify(plan)
    except PlanError as error:
        return f"wrong ({error.kind}): {error}"
    bits = "the same bits on all ranks" if proof.same_bits else "bits that differ between ranks"
    rounds = f"rounds {proof.roundings} times, {bits}" if plan.collective.is_reduction else "rounds nothing"
    sent = f"{proof.num_messages} messages of {proof.num_chunks_sent} chunks in all"
    return f"proven at a FIFO depth of {plan.fifo_depth}; {rounds}; {plan.num_steps} steps, {sent}"

