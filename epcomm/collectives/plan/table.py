"""A plan for people: a table with a row per step."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.collectives.plan.plan import Plan
from epcomm.collectives.plan.verify import Proof, verify
from epcomm.errors import PlanError


def print_plan(plan: Plan, console: Console | None = None) -> bool:
    """Prints what the plan is, its steps, and what was proven about it or why it is wrong; returns if it is right."""
    console = console or Console()
    placements = " and ".join("in place" if in_place else "out of place" for in_place in plan.placements)
    table = Table("rank", "channel", "step", "does", "after")
    for position, step in plan.steps():
        place = str(position.channel)
        if position.program != position.channel:
            place += f" (program {position.program})"
        after = ", ".join(f"{program}:{number}" for program, number in step.after)
        table.add_row(str(position.rank), place, str(position.step), escape(str(step)), after)
    memory = f"{plan.scratch_chunks} chunks of scratch"
    sums = ", partial sums in float32" if plan.wide_sums else ""
    _print(console, f"{plan.name}: {plan.collective}, {placements}, {memory}, protocol {plan.protocol}{sums}")
    console.print(table)
    return print_verdict(plan, console)


def print_verdict(plan: Plan, console: Console) -> bool:
    """Prints what is proven about the plan, or why it is wrong; returns if it is right."""
    try:
        proof = verify(plan)
    except PlanError as error:
        _print(console, f"wrong ({error.kind}): {error}")
        return False
    _print(console, _proof_text(plan, proof))
    return True


def _proof_text(plan: Plan, proof: Proof) -> str:
    bits = "the same bits on all ranks" if proof.same_bits else "bits that differ between ranks"
    times = "once" if proof.roundings == 1 else f"{proof.roundings} times"
    rounds = f"rounds {times}, {bits}" if plan.collective.is_reduction else "rounds nothing"
    sent = f"{proof.num_messages} messages of {proof.num_chunks_sent} chunks in all"
    return f"proven at a FIFO depth of {plan.fifo_depth}; {rounds}; {plan.num_steps} steps, {sent}"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
