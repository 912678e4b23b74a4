"""Tables of a result document for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.results import SUBJECT

_TEMPERATURES = ("hot", "cold", "warm")


def print_document(document: dict, console: Console) -> None:
    """Where it ran, the roofline, the measurements, what was absent or failed."""
    machine, versions = document["machine"], document["versions"]
    console.print(
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    )
    if machine["load"] > 0.25 * machine["cores"]:
        console.print(f"[yellow]the machine was busy when this began[/]: load {machine['load']}")
    if document["roofline"]:
        console.print(roofline_table(document))
    if document["rows"]:
        tables = {"expert_parallel": expert_parallel_tables, "allreduce": allreduce_tables}
        for table in tables[document["bench"]](document):
            console.print(table)
    for name, reason in document["absent"].items():
        console.print(f"[yellow]without {name}[/]: {reason}", highlight=False)
    for item in document["skipped"]:
        console.print(f"[yellow]skipped[/] {item['case']}: {item['reason']}", highlight=False)
    for text in document["failures"]:
        console.print("[red]failed[/]")
        console.print(text, markup=False, highlight=False)


def _table(title: str, first: str, *others: str) -> Table:
    """A compact table whose first column is text."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right", no_wrap=True, min_width=max(len(column), 4))
    return table


def roofline_table(document: dict) -> Table:
    """Copy bandwidth of each rank with all ranks copying."""
    table = _table(
        "Copy roofline, per rank with all ranks copying at once", "ranks", "row bytes", "working set", "GB/s", "method"
    )
    for item in document["roofline"]:
        cells = [item["ranks"], item["row_bytes"], size_text(item["working_set"]), item["gb_per_s"], item["method"]]
        table.add_row(*map(str, cells))
    return table


def expert_parallel_tables(document: dict) -> list[Table]:
    """One table: a section per case, a line per contestant and temperature; then the parts of dispatch."""
    table = _table(
        "Dispatch and combine: microseconds of the slowest rank, median; % of the copy roofline; times epcomm's time",
        "contestant",
        *("", "round trip", "p95", "dispatch", "GB/s", "%", "combine", "GB/s", "%", "ratio"),
    )
    for label, rows in _by_label(document["rows"]).items():
        table.add_section()
        table.add_row(f"[bold]{label}[/]")
        for contestant in _contestants(rows):
            for temperature in _TEMPERATURES:
                phases = {
                    row["phase"]: row
                    for row in rows
                    if row["contestant"] == contestant and row["temperature"] == temperature
                }
                if "round_trip" in phases:
                    table.add_row(*_expert_parallel_line(contestant, temperature, phases, rows))
    return [table, *_phase_tables(document)]


def _expert_parallel_line(contestant: str, temperature: str, phases: dict[str, dict], rows: list[dict]) -> list[str]:
    whole = phases["round_trip"]
    cells = [contestant, temperature, time_text(whole["p50_us"]), time_text(whole["p95_us"])]
    for name in ("dispatch", "combine"):
        row = phases.get(name, {})
        cells += [
            time_text(row["p50_us"]) if row else "",
            f"{row['gb_per_s']:.2f}" if "gb_per_s" in row else "",
            f"{100 * row['roofline_fraction']:.0f}" if "roofline_fraction" in row else "",
        ]
    return [*cells, _ratio_to_subject(whole, rows)]


def _ratio_to_subject(row: dict, rows: list[dict]) -> str:
    """How many times faster epcomm is than this row."""
    if row["library"] == SUBJECT:
        return ""
    for other in rows:
        same = all(other[key] == row[key] for key in ("phase", "temperature"))
        if same and other["library"] == SUBJECT and other.get("best"):
            return f"{row['p50_us'] / other['p50_us']:.1f}x"
    return ""


def _phase_tables(document: dict) -> list[Table]:
    """Route, exchange and rows of a dispatch, where measured."""
    table = _table("Parts of a dispatch, microseconds, warm", "case", "route", "exchange", "rows", "rows are")
    for label, rows in _by_label(document["rows"]).items():
        parts = {row["phase"]: row["p50_us"] for row in rows if row["phase"] in ("route", "exchange", "rows")}
        if len(parts) == 3:
            total = sum(parts.values())
            times = [time_text(parts[name]) for name in ("route", "exchange", "rows")]
            table.add_row(label, *times, f"{100 * parts['rows'] / total:.0f} %")
    return [table] if table.row_count else []


def allreduce_tables(document: dict) -> list[Table]:
    """One table per world size and dtype: a line per message size."""
    tables = []
    groups: dict[tuple[int, str], dict[int, list[dict]]] = {}
    for row in document["rows"]:
        case = row["case"]
        groups.setdefault((case["ranks"], case["dtype"]), {}).setdefault(case["bytes"], []).append(row)
    for (ranks, dtype), sizes in groups.items():
        table = _table(
            f"allreduce, {ranks} ranks, {dtype}: microseconds of the slowest rank, median",
            "bytes",
            *("", "epcomm", "bound", "gloo", "mpi", "x gloo", "x mpi", "GB/s", "% of copy"),
        )
        for size, rows in sizes.items():
            for temperature in _TEMPERATURES:
                line = {row["contestant"]: row for row in rows if row["temperature"] == temperature}
                if line:
                    table.add_row(size_text(size), temperature, *_allreduce_line(line))
        tables.append(table)
    return tables


def _allreduce_line(line: dict[str, dict]) -> list[str]:
    names = ("epcomm", "epcomm, bound", "gloo", "mpi")
    cells = [time_text(line[name]["p50_us"]) if name in line else "" for name in names]
    subject = min((line[name] for name in names[:2] if name in line), key=lambda row: row["p50_us"], default=None)
    if subject is None:
        return cells
    for name in names[2:]:
        cells.append(f"{line[name]['p50_us'] / subject['p50_us']:.1f}x" if name in line else "")
    cells.append(f"{subject['gb_per_s']:.2f}" if "gb_per_s" in subject else "")
    cells.append(f"{100 * subject['roofline_fraction']:.0f}" if "roofline_fraction" in subject else "")
    return cells


def time_text(microseconds: float) -> str:
    """Microseconds to about three digits."""
    return (
        f"{microseconds:.2f}"
        if microseconds < 10
        else f"{microseconds:.1f}"
        if microseconds < 100
        else f"{microseconds:,.0f}"
    )


def size_text(num_bytes: int) -> str:
    """Bytes with a binary unit."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << scale:
            return f"{num_bytes / (1 << scale):.4g} {unit}"
    return f"{num_bytes} B"


def _by_label(rows: list[dict]) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["label"], []).append(row)
    return groups


def _contestants(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["contestant"] for row in rows))
