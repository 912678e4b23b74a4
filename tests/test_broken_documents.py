"""Documents broken at random: whatever is wrong with a plan or a topology is told with its line, or by the proof."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.plan.json_format import from_json, to_json
from epcomm.collectives.plan.msccl import from_msccl, to_msccl
from epcomm.collectives.plan.verify import verify
from epcomm.errors import ConfigError, PlanError
from epcomm.topology import from_nccl_xml

PLANS = [ALGORITHMS["ring"].plan("allreduce", 3, channels=2), ALGORITHMS["bruck"].plan("alltoall", 3)]
DUMPS = sorted((Path(__file__).parent / "data" / "topology").glob("*.xml"))
READ: dict[str, tuple[Callable[[str, str], object], list[str]]] = {
    "json": (lambda text, where: verify(from_json(text, where)), [to_json(plan) for plan in PLANS]),
    "msccl": (lambda text, where: verify(from_msccl(text, where)), [to_msccl(plan) for plan in PLANS]),
    "dump": (from_nccl_xml, [path.read_text() for path in DUMPS]),
}
STRAY = ['"', "<", "{", "9", "-", "\0", "é", "null", "1e99", "NaN", "99999999999999999999"]
NUMBERS = ["", "-1", "0", "1", "99999", str(2**63 - 1), str(2**63), str(-(2**70)), "1e400", "0x10", "x"]


def broken(text: str, choose: random.Random) -> str:
    """With a character less or more, another number or word in a place, cut off, or a line less or more."""
    at, lines = choose.randrange(len(text)), text.splitlines(keepends=True)
    line = choose.randrange(len(lines))

    def instead(pattern: str, words: list[str]) -> str:
        found = choose.choice(list(re.finditer(pattern, text)))
        return text[: found.start()] + choose.choice(words) + text[found.end() :]

    return choose.choice([
        lambda: text[:at] + text[at + 1 :],
        lambda: text[:at] + choose.choice(STRAY) + text[at:],
        lambda: instead(r"-?\d+", NUMBERS),
        lambda: instead("[a-z_]+", re.findall("[a-z_]+", text)),
        lambda: text[:at],
        lambda: "".join(lines[:line] + lines[line + 1 :]),
        lambda: "".join([*lines[:line], choose.choice(lines), *lines[line:]]),
    ])()  # fmt: skip


@pytest.mark.parametrize("kind", READ)
def test_broken_documents(kind: str) -> None:
    read, texts = READ[kind]
    found: Counter[str] = Counter()
    for seed in range(400):
        choose = random.Random(seed)
        text = broken(choose.choice(texts), choose)
        try:
            read(text, "mine")
            found["right"] += 1  # what was changed is a name, a size, or nothing that matters
        except PlanError as error:
            found[error.kind] += 1
        except ConfigError as error:
            assert re.match(r"mine, line \d+:", str(error)), error
            assert int(re.findall(r"line (\d+)", str(error))[0]) <= text.count("\n") + 1
            found["document"] += 1
    assert found["document"] > 100 and found["right"] < 200, found
    assert kind == "dump" or {"message", "result"} <= set(found), found
