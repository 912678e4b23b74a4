"""`--record` writes results/<name>.json: what of test_<name>.py was run, with which versions, and what came of it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write tests/integrations/results/<name>.json")


def framework_of(test: Path) -> str:
    """"vllm" for test_vllm.py and test_vllm_serving.py: vllm.txt says what they need."""
    name = test.stem.removeprefix("test_")
    return max((path.stem for path in HERE.glob("*.txt") if name.startswith(path.stem)), key=len)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    if report.when == "call" or report.failed:
        outcomes = item.session.stash.setdefault(_OUTCOMES, {}).setdefault(framework_of(item.path), {})
        outcomes[item.name] = {"outcome": report.outcome, **dict(report.user_properties)}
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not session.config.getoption("--record", default=False):
        return
    for name, outcomes in session.stash.get(_OUTCOMES, {}).items():
        requirements = (HERE / f"{name}.txt").read_text()
        packages = re.findall(r"^(?:# alone: )?([\w.-]+)==", requirements, re.MULTILINE)
        versions = {package: importlib.metadata.version(package) for package in packages}
        head = {"python": platform.python_version(), **versions}
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / f"{name}.json").write_text(json.dumps({**head, "tests": outcomes}, indent=1) + "\n")


_OUTCOMES: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
