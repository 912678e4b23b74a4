"""An explanation for people: four answers, each a few lines or a table."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.cost.choice import SURE, Candidate
from epcomm.collectives.cost.machines import Machine
from epcomm.explain.explanation import MOST_SIMULATED, Explanation
from epcomm.rich_tables import aligned_table, counted, size_text

#: what is there before and after, of a request with its numbers filled in
_MEANINGS = {
    "allreduce": ("rank r has x_r, {size}, r = 0 .. {last}", "every rank has x_0 + ... + x_{last}, the same bits"),
    "allgather": ("rank r has block b_r, {size}, r = 0 .. {last}", "every rank has b_0, ..., b_{last}, {whole}"),
    "reduce_scatter": (
        "rank r has x_r, {ranks} blocks of {size}, r = 0 .. {last}", "rank r has block r of x_0 + ... + x_{last}",
    ),
    "broadcast": ("rank {root} has x, {size}", "every rank has x"),
    "reduce": ("rank r has x_r, {size}, r = 0 .. {last}", "rank {root} has x_0 + ... + x_{last}"),
    "alltoall": (
        "rank r has a block for each rank, {ranks} of {size}, r = 0 .. {last}",
        "rank r has what each rank had for it, by rank",
    ),
}  # fmt: skip

#: what an algorithm does, in a line
_IDEAS = {
    "ring": "every chunk goes from neighbour to neighbour around a ring of ranks: once around to sum, once to copy",
    "bidirectional_ring": "two rings that turn in opposite directions, each for half of the data",
    "double_binary_tree": "two trees, each for half of the data: sums go up, results down",
    "recursive_doubling": "log2(ranks) exchanges of everything, each with a rank twice as far away",
    "halving_doubling": "log2(ranks) exchanges: of ever less to sum, of ever more to copy",
    "bruck": "log2(ranks) steps to ranks at distances 1, 2, 4, ...; what has farther to go travels along",
    "one_shot": "one step: everybody sends each what it needs, and who gets inputs sums alone",
    "two_shot": "two steps: everybody has one block of all to sum or pass on, then hands it out",
    "hierarchical": "all pairs in each node, rings between nodes along the rails",
    "pat": "a tree per block, shifted from block to block, far ranks first",
    "swing": "halving and doubling with partners that swing from side to side of a ring",
    "direct": "everybody sends to everybody, in an order in which no two send to one at a time",
    "two_level": "in each node to who has the receiver's number, then all of a node's blocks along the rails",
}


def print_explanation(console: Console, explanation: Explanation) -> None:
    """The four answers: what state is wanted, which algorithm, how it maps onto the machine, does it fit."""
    _print_transition(console, explanation)
    _print_algorithm(console, explanation)
    _print_mapping(console, explanation)
    _print_fit(console, explanation)


def _print_transition(console: Console, explanation: Explanation) -> None:
    request = explanation.request
    numbers = {
        "size": f"{size_text(request.num_bytes)} of {request.dtype}", "ranks": request.num_ranks,
        "last": request.num_ranks - 1, "whole": size_text(request.num_bytes * request.num_ranks), "root": request.root,
    }  # fmt: skip
    before, after = (text.format(**numbers) for text in _MEANINGS[request.kind])
    who = "add and copy" if request.collective.is_reduction else "copy"
    console.print(f"[bold]1. State transition[/]: {request.kind}", highlight=False)
    console.print(
        f"   before: {before}\n   after:  {after}\n"
        f"   {explanation.bytes_sent / 1e6:.3f} MB have to leave each rank on average, if ranks {who}",
        highlight=False,
    )


def _print_algorithm(console: Console, explanation: Explanation) -> None:
    chosen = explanation.chosen
    console.print(f"\n[bold]2. Algorithm: {chosen.algorithm}[/], {_IDEAS[chosen.algorithm]}", highlight=False)
    table = _table("price, µs", "", "algorithm", "protocol", "channels", "pieces", "µs", "against best", "rounds")
    best = explanation.candidates[0].microseconds
    for each in _shown(explanation):
        table.add_row(
            "->" if each == chosen else "", each.algorithm, each.protocol, str(each.channels), str(each.pieces),
            *_prices(each, best), _roundings(each),
        )  # fmt: skip
    console.print(table)
    for line in _rules(explanation):
        console.print(f"   {line}", highlight=False)


def _rules(explanation: Explanation) -> list[str]:
    """By what is chosen besides prices."""
    request, machine = explanation.request, explanation.request.machine
    once = (
        f"{request.dtype}: only what rounds once is chosen. Kernels do; plans do with float32 partial sums, also on "
        "their way, which prices include."
    )
    rules = [once] if request.is_half and request.num_ranks > 2 else []
    if request.kind != "allreduce":
        return [*rules, f"{request.kind} takes plans only as algorithm=; its auto is a kernel written by hand."]
    if len(machine.nodes) > 1:
        return ["Ranks on several nodes: auto is the kernel that sums in each node, and then along the rails."]
    if machine.is_of_cores:
        return ["Ranks on cores: auto is the kernel that was measured to be the fastest for so many bytes."]
    plans = f"plans by {', '.join(request.protocols)} where a kernel's price is more than {SURE:g} times theirs"
    return [*rules, f"auto takes what can run: kernels, and {plans}."]


def _shown(explanation: Explanation) -> list[Candidate]:
    """Each algorithm's kernel and best plan, by how wide its partial sums are, and the chosen one, by price."""
    best: dict[tuple[str, bool, bool], Candidate] = {}
    for each in explanation.candidates:
        best.setdefault((each.algorithm, each.is_kernel, each.wide_sums), each)
    return sorted({*best.values(), explanation.chosen}, key=lambda each: each.microseconds)


def _prices(candidate: Candidate, best: float) -> tuple[str, str]:
    """In µs, and in prices of the best."""
    price = candidate.microseconds
    return (f"{price:.1f}", f"{price / best:.2f}x") if candidate.has_price else ("-", "-")


def _roundings(candidate: Candidate) -> str:
    if candidate.request.num_ranks > MOST_SIMULATED:
        return "once" if candidate.rounds_once else "-"
    number = candidate.roundings
    return "never" if number == 0 else "once" if number == 1 else f"{number} times"


def _print_mapping(console: Console, explanation: Explanation) -> None:
    chosen, machine = explanation.chosen, explanation.request.machine
    world, costs = machine.world, chosen.costs
    console.print(f"\n[bold]3. Mapping[/] onto {escape(machine.name)}", highlight=False)
    lines = [f"{machine.num_ranks} ranks in {counted(len(machine.nodes), 'node')}"]
    if "order" in ALGORITHMS[chosen.algorithm].options:
        order = world.order or range(machine.num_ranks)
        shown = " ".join(map(str, list(order)[:32])) + (" ..." if machine.num_ranks > 32 else "")
        lines.append(f"ring order: {shown}")
    lines.append(
        f"protocol {chosen.protocol}: {costs.efficiency:.0%} of a link's bytes are payload, "
        f"{costs.launch:g} µs before the first step"
    )
    channels, pieces = counted(chosen.channels, "channel"), counted(chosen.pieces, "piece")
    speed = f" of {costs.channel:.1f} GB/s" if costs.channel < math.inf else ""
    lines.append(f"{channels}{speed}, in {pieces}")
    if chosen.wide_sums and not chosen.is_kernel:
        lines.append(f"partial sums of {explanation.request.dtype} are float32, on their way too")
    timeline = explanation.timeline
    if timeline is not None:
        chunk = explanation.request.num_bytes / chosen.plan.collective.num_chunks
        lines.append(f"{chosen.plan.num_steps} steps, chunks of {size_text(chunk)}")
    console.print("\n".join(f"   {line}" for line in lines), highlight=False, markup=False)
    if explanation.busiest_links:
        table = _table("busiest links", "link", "busy")
        for name, share in explanation.busiest_links:
            table.add_row(escape(name), f"{share:.0%}")
        console.print(table)


def _print_fit(console: Console, explanation: Explanation) -> None:
    console.print("\n[bold]4. Fit[/]")
    lines, shares = [], explanation.shares
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    if explanation.timeline is not None:
        lines.append(f"simulated: {explanation.microseconds:.1f} µs; price: {explanation.chosen.microseconds:.1f} µs")
        lines.append(f"critical path: {parts}")
    elif not shares:
        lines.append(f"no price: {_unpriced(explanation.request.machine)}")
    else:
        lines.append(f"price: {explanation.microseconds:.1f} µs; more than {MOST_SIMULATED} ranks are not simulated")
        lines.append(f"of the price: {parts}")
    if explanation.bound and explanation.chosen.has_price:  # one rank's is 0
        ratio = explanation.microseconds / explanation.bound
        lines.append(f"cut bound: {explanation.bound:.1f} µs, no matter the algorithm; this is {ratio:.2f} times that")
    console.print("\n".join(f"   {line}" for line in lines), highlight=False, markup=False)
    _print_advice(console, explanation)


def _unpriced(machine: Machine) -> str:
    """Why a kernel that runs has no price."""
    sizes = [len(ranks) for ranks in machine.nodes]
    if len(set(sizes)) > 1:
        return f"it is known among nodes of one size only; these have {min(sizes)} to {max(sizes)} ranks"
    return "some ranks that talk to each other have no link, and take what way there is"


def _print_advice(console: Console, explanation: Explanation) -> None:
    """Whether the collective is the right thing to ask for, by where the time goes and by what others would take."""
    kind, lines = explanation.request.kind, []
    if explanation.request.num_ranks == 1:
        console.print("   One rank: there is nothing to communicate.")
        return
    if not explanation.chosen.has_price:
        return
    is_fixed = explanation.is_mostly_fixed
    if is_fixed:
        lines.append(
            f"Most of the time is fixed cost, not bytes: several small {kind}s as one, or one in the kernel that "
            "makes or uses the data, save more than another algorithm."
        )
    elif is_fixed is not None:
        lines.append("Bytes dominate: what helps is to send fewer.")
        if explanation.bound is not None and explanation.bound < 0.6 * explanation.microseconds:
            lines.append("There is room up to the bound: see the busiest links and the critical path's queues.")
    if kind == "alltoall":
        lines.append(
            "Rows for experts: dispatch sends what the routing needs, each row once per rank; equal blocks are as "
            "large as the fullest. `epcomm model ep` prices it."
        )
    console.print("\n".join(f"   {line}" for line in lines), highlight=False, markup=False)
    table = _table(f"is {kind} the right thing to ask for?", "if", "ask for", "µs", "against this")
    price = explanation.chosen.microseconds
    for alternative, microseconds in explanation.alternatives:
        names = ", ".join(alternative.kinds)
        table.add_row(alternative.when, names, f"{microseconds:.1f}", f"{microseconds / price:.2f}x")
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    return aligned_table(title, *columns, text=("", "algorithm", "protocol", "link", "if", "ask for"))
