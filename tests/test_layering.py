"""The import rule: a module imports only from its own layer and from layers under it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# From low to high. A name stands for epcomm/<name>.py or everything in epcomm/<name>/, unless a longer name matches.
LAYERS = [
    ["errors", "xml_elements"],
    ["heap", "device"],
    ["kernels.protocol"],
    ["kernels", "kernels.cpu", "kernels.gpu"],
    ["operation", "work", "topology", "model.gpus"],
    ["world"],
    ["hosts"],
    ["runtime"],
    ["collectives.plan"],
    ["collectives.language", "simulation"],
    ["collectives.algorithms"],
    ["collectives.cost"],
    ["moe", "collectives"],
    ["communicator", "initialize"],
    ["launcher", "model", "explain", "rich_tables", "testing", "__init__"],
    ["cli"],
    ["integrations"],
]
# Neighbours in one layer may import each other, except for these.
STRANGERS = [{"moe", "collectives"}, {"kernels.cpu", "kernels.gpu"}]

MAX_LINES = 350
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "epcomm"
MODULES = sorted(PACKAGE.rglob("*.py"))

HEIGHT = {unit: height for height, layer in enumerate(LAYERS) for unit in layer}


def unit_of(module: str) -> str | None:
    """The table's longest name for a dotted module: "epcomm.kernels.cpu.copy" -> "kernels.cpu"; None if it has none."""
    parts = module.split(".")[1:] or ["__init__"]
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in HEIGHT), None)


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import of epcomm in a module that lies in `package`, lazy ones included.

    `from a import b` yields a.b: whether b is a module or a name in a, the table's longest match is the right unit.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "epcomm")


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    importer = unit_of(module)
    if importer is None:
        return [f"{module} has no place in LAYERS"]
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for line, name in imported_modules(source, package):
        # A name that is no unit under epcomm itself (`from epcomm import init`) comes from the facade.
        imported = unit_of(name) or "__init__"
        if HEIGHT[imported] > HEIGHT[importer]:
            found.append(f"{module}:{line} ({importer}) imports {name} ({imported}), which is in a layer above it")
        elif {importer, imported} in STRANGERS:
            found.append(f"{module}:{line} ({importer}) imports {name}: these two must not know each other")
    return found


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_module_imports_only_from_layers_under_it(path: Path) -> None:
    is_package = path.stem == "__init__"
    parts = path.relative_to(ROOT).with_suffix("").parts
    module = ".".join(parts[:-1] if is_package else parts)
    assert violations(path.read_text(), module, is_package) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("epcomm.errors", "import epcomm.heap.cpu"),
        ("epcomm.heap.arena", "from epcomm.runtime import Runtime"),
        ("epcomm.device.cpu", "from ..kernels.protocol import latency"),
        ("epcomm.kernels.cpu.latency", "def lazy():\n    from epcomm.moe.routing import Routing"),
        ("epcomm.kernels.cpu.latency", "from epcomm.kernels import gpu"),
        ("epcomm.kernels.protocol.latency", "from ..cpu import latency"),
        ("epcomm.runtime", "from . import communicator"),
        ("epcomm.moe.autograd", "from epcomm import init"),
        ("epcomm.moe.autograd", "import epcomm"),
        ("epcomm.moe.autograd", "from ..collectives.reductions import allreduce"),
        ("epcomm.collectives.plan.verify", "from epcomm.collectives.language import chunk"),
        ("epcomm.collectives.language.trace", "from ..algorithms import ALGORITHMS"),
        ("epcomm.kernels.cpu.latency", "from epcomm.collectives.plan import Plan"),
        ("epcomm.collectives.reductions", "import importlib\nimportlib.import_module('epcomm.moe')"),
        ("epcomm.communicator", "if TYPE_CHECKING:\n    from .cli import main"),
        ("epcomm.cli.main", "from epcomm.integrations import c10d"),
        ("epcomm.misplaced", ""),
    ],
)
def test_checker_catches_violation(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


def test_checker_resolves_relative_import_in_a_package() -> None:
    assert len(violations("from ..kernels import cpu", "epcomm.device", is_package=True)) == 1
    assert violations("from .segment import Segment", "epcomm.heap", is_package=True) == []


@pytest.mark.parametrize(
    "module, source",
    [
        ("epcomm.kernels.cpu.latency", "import numba\nfrom ..protocol import latency\nfrom epcomm.device import put"),
        ("epcomm.moe.routing", "from ..errors import ConfigError\nfrom . import autograd\nfrom epcomm import errors"),
        ("epcomm.cli.main", "import epcomm\nfrom epcomm.testing.ranks import run"),
        ("epcomm.heap.arena", "import epcomm_unrelated"),
    ],
)
def test_checker_allows(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_import_does_not_load_compilers() -> None:
    code = "import epcomm, sys; print(sorted({'numba', 'llvmlite', 'triton'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_names_say_what_a_module_is_for() -> None:
    names = [path for path in PACKAGE.rglob("*") if path.stem.strip("_") in VAGUE_NAMES]
    assert [relative(path) for path in names] == []


def test_modules_are_short() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}
