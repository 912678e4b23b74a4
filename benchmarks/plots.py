"""A PNG of a result document: how many times faster epcomm is, and bandwidth beside the roofline."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.results import SUBJECT
from benchmarks.tables import size_text

_COLOURS = {
    "epcomm": "#1b7837",
    "gloo": "#d6604d",
    "mpi": "#4393c3",
    "mpi packed": "#92c5de",
    "epcomm elsewhere": "#a6dba0",
}


def plot_document(document: dict, path: Path) -> str | None:
    """Write the PNG; the reason if it could not be made."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed"
    matplotlib.use("Agg")
    rows = [row for row in document["rows"] if _counts(document, row)]
    if not rows:
        return "no measurements"
    draw = {"expert_parallel": _plot_expert_parallel, "allreduce": _plot_allreduce}[document["bench"]]
    figure = draw(rows)
    figure.suptitle(f"{document['machine']['cpu']}, {document['machine']['cores']} cores", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    return None


def _counts(document: dict, row: dict) -> bool:
    """Cold rows of the whole operation, of the variant that counts."""
    return row["temperature"] == "cold" and row.get("best", False) and row["phase"] in ("round_trip", "allreduce")


def _plot_expert_parallel(rows: list[dict]) -> Any:
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(row["label"] for row in rows))
    libraries = list(dict.fromkeys(row["library"] for row in rows))
    figure = Figure(figsize=(12, 1.6 + 0.42 * len(labels)), layout="constrained")
    ratio_axes, rate_axes = figure.subplots(1, 2, sharey=True)
    subject = {row["label"]: row for row in rows if row["library"] == SUBJECT}
    height = 0.8 / len(libraries)
    for index, library in enumerate(libraries):
        mine = {row["label"]: row for row in rows if row["library"] == library}
        places = [position + (index - (len(libraries) - 1) / 2) * height for position in range(len(labels))]
        rates = [mine[label]["gb_per_s"] if label in mine else 0.0 for label in labels]
        rate_axes.barh(places, rates, height, label=library, color=_COLOURS.get(library))
        if subject and not library.startswith(SUBJECT):
            ratios = [
                mine[label]["p50_us"] / subject[label]["p50_us"] if label in mine and label in subject else math.nan
                for label in labels
            ]
            ratio_axes.barh(places, ratios, height, color=_COLOURS.get(library))
            for place, ratio in zip(places, ratios, strict=True):
                if not math.isnan(ratio):
                    ratio_axes.text(ratio, place, f" {ratio:.1f}x", va="center", fontsize=6)
    for position, label in enumerate(labels):
        roofline = next(
            (row["roofline_gb_per_s"] for row in rows if row["label"] == label and "roofline_gb_per_s" in row), None
        )
        if roofline is not None:
            rate_axes.plot([roofline, roofline], [position - 0.45, position + 0.45], color="black", linewidth=1)
    ratio_axes.set_yticks(range(len(labels)), labels, fontsize=7)
    ratio_axes.invert_yaxis()
    ratio_axes.set_xscale("log")
    ratio_axes.axvline(1.0, color="black", linewidth=0.5)
    ratio_axes.set_xlabel("times the time of epcomm (cold, route + dispatch + combine)")
    rate_axes.set_xlabel("payload GB/s per rank (black: copy roofline)")
    rate_axes.legend(fontsize=7)
    return figure


def _plot_allreduce(rows: list[dict]) -> Any:
    from matplotlib.figure import Figure

    groups = sorted({(row["case"]["ranks"], row["case"]["dtype"]) for row in rows})
    figure = Figure(figsize=(11, 3.2 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), 2, squeeze=False)
    for (ranks, dtype), (ratio_axes, rate_axes) in zip(groups, grid, strict=True):
        mine = [row for row in rows if (row["case"]["ranks"], row["case"]["dtype"]) == (ranks, dtype)]
        subject = {row["case"]["bytes"]: row["p50_us"] for row in mine if row["library"] == SUBJECT}
        for library in dict.fromkeys(row["library"] for row in mine):
            line = sorted((row["case"]["bytes"], row) for row in mine if row["library"] == library)
            style = {"label": library, "color": _COLOURS.get(library), "marker": ".", "linewidth": 1}
            rate_axes.plot([size for size, _ in line], [row["gb_per_s"] for _, row in line], **style)
            both = [(size, row["p50_us"] / subject[size]) for size, row in line if size in subject]
            if library != SUBJECT and both:
                ratio_axes.plot([size for size, _ in both], [ratio for _, ratio in both], **style)
        ratio_axes.axhline(1.0, color="black", linewidth=0.5)
        ratio_axes.set_title(f"{ranks} ranks, {dtype}: times the time of epcomm (cold)", fontsize=8)
        rate_axes.set_title("payload GB/s per rank (cold)", fontsize=8)
        for axes in (ratio_axes, rate_axes):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ticks = sorted({row["case"]["bytes"] for row in mine})[::2]
            axes.set_xticks(ticks, [size_text(size) for size in ticks], fontsize=6)
            axes.grid(True, linewidth=0.3)
        rate_axes.legend(fontsize=7)
    return figure
