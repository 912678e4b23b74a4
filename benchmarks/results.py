"""The JSON document that every bench writes: how it was measured, on what, and one row per number.

    schema       "epcomm-bench/1"          bench       "expert_parallel" | "allreduce"
    command      list of words             options     the bench's options
    timestamp    UTC, ISO 8601             git         {revision, modified}
    machine      {cpu, architecture, cores, caches, memory_gib, kernel, load}
    versions     {epcomm, torch, numpy, numba, mpi4py, openmpi, python}
    absent       {library: reason}         failures    [text]        skipped    [{case, reason}]
    roofline     [{ranks, row_bytes, working_set, gb_per_s, method, methods}]
    rows         [row]

    row          {case, label, contestant, library, phase, temperature, p50_us, p95_us, p99_us, min_us, samples,
                  mean_us, bytes, gb_per_s, roofline_gb_per_s, roofline_fraction, dropped, best, ratios}

Times are microseconds of the slowest rank. `phase` is dispatch, combine, round_trip, allreduce, or a part of dispatch
(route, exchange, rows). `temperature`: cold (right after the other contestants ran), warm (called again at once), hot
(a loop without barriers). `bytes` are those that one rank moves, `dropped` marks a variant that was too slow to be
measured further, `best` the variant that counts for its library, `ratios` says how many times faster than the best of
each other library an epcomm row is.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.world import REPOSITORY, Outcome

SCHEMA = "epcomm-bench/1"
SUBJECT = "epcomm"


def new_document(bench: str, options: dict, command: list[str] | None = None) -> dict:
    """An empty document of the machine and moment."""
    return {
        "schema": SCHEMA,
        "bench": bench,
        "command": [_without_folder(word) for word in (command or sys.argv)],
        "options": options,
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "git": _git(),
        "machine": _machine(),
        "versions": _versions(),
        "absent": {},
        "failures": [],
        "skipped": [],
        "roofline": [],
        "rows": [],
    }


def row(
    case: dict,
    label: str,
    contestant: str,
    library: str,
    phase: str,
    temperature: str,
    numbers: dict[str, float],
    *,
    payload_bytes: float | None = None,
    roofline: dict | None = None,
    dropped: bool = False,
) -> dict:
    """One row; bandwidth and fraction of the roofline follow from the median time."""
    result: dict[str, Any] = {
        "case": case,
        "label": label,
        "contestant": contestant,
        "library": library,
        "phase": phase,
        "temperature": temperature,
        **numbers,
    }
    if payload_bytes is not None:
        rate = payload_bytes / numbers["p50_us"] / 1e3
        result |= {"bytes": round(payload_bytes), "gb_per_s": float(f"{rate:.4g}")}
        if roofline is not None:
            result |= {
                "roofline_gb_per_s": roofline["gb_per_s"],
                "roofline_fraction": float(f"{rate / roofline['gb_per_s']:.3g}"),
            }
    if dropped:
        result["dropped"] = True
    return result


def add_outcome(document: dict, outcome: Outcome) -> None:
    """Take over what a world reported."""
    document["rows"] += outcome.events("row")
    document["roofline"] += outcome.events("roofline")
    document["skipped"] += [item for item in outcome.events("skipped") if item not in document["skipped"]]
    document["absent"] |= outcome.absent
    if outcome.error is not None:
        document["failures"].append(outcome.error)


def rate_contestants(document: dict) -> None:
    """Mark the best variant of each library and put the ratios into the subject's rows.

    The variant with the best median of the whole iteration counts, in each of its phases too.
    """
    groups: dict[tuple[str, str], list[dict]] = {}
    for item in document["rows"]:
        groups.setdefault((item["label"], item["temperature"]), []).append(item)
    for rows in groups.values():
        best: dict[str, dict] = {}
        for item in rows:
            if item["phase"] in ("round_trip", "allreduce") and not item.get("dropped"):
                if item["library"] not in best or item["p50_us"] < best[item["library"]]["p50_us"]:
                    best[item["library"]] = item
        winners = {library: item["contestant"] for library, item in best.items()}
        for item in rows:
            item["best"] = winners.get(item["library"]) == item["contestant"]
        for item in rows:
            if item["library"].startswith(SUBJECT):
                item["ratios"] = {
                    other["library"]: round(other["p50_us"] / item["p50_us"], 2)
                    for other in rows
                    if other["best"] and other["phase"] == item["phase"] and not other["library"].startswith(SUBJECT)
                }


def save(document: dict, path: Path) -> None:
    """Write the document, one row per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in document.items() if key != "rows"}
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
    text += ",\n".join("  " + json.dumps(item) for item in document["rows"]) + "\n ]\n}\n"
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> dict:
    """Read a document back."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if document.get("schema") != SCHEMA:
        raise ValueError(f"{path.name}: schema {document.get('schema')!r}, wanted {SCHEMA!r}")
    return document


def _without_folder(word: str) -> str:
    """A command word without the folders of the machine it ran on."""
    option, equals, value = word.rpartition("=")
    if value.startswith("/"):
        path = Path(value)
        value = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
    return option + equals + value


def _git() -> dict:
    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False
            )
        except OSError:
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    changes = ask("status", "--porcelain", "--untracked-files=no", "--", "epcomm", "benchmarks")
    return {"revision": ask("rev-parse", "HEAD"), "modified": None if changes is None else bool(changes)}


def _machine() -> dict:
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),  # before the bench: other work makes sleeping libraries slower
    }


def _caches() -> dict[str, str]:
    """Size of each data cache of core 0."""
    caches = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        if (folder / "type").read_text().strip() != "Instruction":
            caches[f"L{(folder / 'level').read_text().strip()}"] = (folder / "size").read_text().strip()
    return caches


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("epcomm", "torch", "numpy", "numba", "mpi4py", "openmpi"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
