"""Plans as JSON: one step per line, nothing that follows from the rest.

    {"format": "epcomm-plan/1", "name": "ring", "collective": "allgather", "num_ranks": 2, "num_chunks": 1, "root": 0,
     "scratch_chunks": 0, "fifo_depth": 8, "in_place": true, "out_of_place": true,
     "protocol": "simple", "wide_sums": false, "ranks": [
      [{"channel": 0, "steps": [
        {"op": "copy", "src": ["input", 0], "dst": ["output", 0]},
        {"op": "send", "src": ["input", 0], "to": 1},
        {"op": "recv", "dst": ["output", 1], "from": 1, "after": [[0, 0]]}]}],
      ...

`ranks` has a list of programs for each rank. `count` is 1, `protocol` "simple" and `wide_sums` false unless given;
`after` names (program, step) of the same rank.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable
from json import scanner
from json.decoder import JSONObject  # type: ignore[attr-defined]
from typing import Any, TypeVar

from epcomm.collectives.plan.conditions import Collective
from epcomm.collectives.plan.plan import Dependency, Location, Op, Plan, Program, Step
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.lines import SIMPLE

FORMAT = "epcomm-plan/1"
T = TypeVar("T")

_HEADER = {"name": str, "collective": str, "num_ranks": int, "num_chunks": int, "root": int, "scratch_chunks": int,
           "fifo_depth": int, "in_place": bool, "out_of_place": bool}  # fmt: skip
_PROTOCOL, _WIDE_SUMS = "protocol", "wide_sums"  # which plans didn't have from the beginning
_OPS = {op.value: op for op in Op}


def to_json(plan: Plan) -> str:
    """The plan as text, which `from_json` turns into an equal plan."""
    collective = plan.collective
    header = {
        "format": FORMAT,
        "name": plan.name,
        "collective": collective.kind,
        "num_ranks": collective.num_ranks,
        "num_chunks": collective.num_chunks,
        "root": collective.root,
        "scratch_chunks": plan.scratch_chunks,
        "fifo_depth": plan.fifo_depth,
        "in_place": plan.in_place,
        "out_of_place": plan.out_of_place,
        _PROTOCOL: plan.protocol,
        _WIDE_SUMS: plan.wide_sums,
    }
    ranks = ",\n".join(
        "  [" + ",\n   ".join(_program_text(program) for program in programs) + "]" for programs in plan.programs
    )
    return json.dumps(header)[:-1] + f',\n "ranks": [\n{ranks}\n ]}}\n'


def _program_text(program: Program) -> str:
    steps = ",\n     ".join(json.dumps(_step_object(step)) for step in program.steps)
    return f'{{"channel": {program.channel}, "steps": [' + (f"\n     {steps}" if steps else "") + "]}"


def _step_object(step: Step) -> dict[str, Any]:
    fields = {
        "op": step.op.value,
        "src": step.src,
        "dst": step.dst,
        "count": None if step.count == 1 else step.count,
        "from": step.receive_from,
        "to": step.send_to,
        "after": step.after or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


class _Located(dict):
    """A JSON object that knows the line it begins in."""

    line = 0


class _Decoder(json.JSONDecoder):
    """Makes `_Located` of objects. The scanner written in Python asks this class; the one in C would not."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._line_ends = [found.start() for found in re.finditer("\n", text)]
        self.parse_object = self._located
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _located(self, text_and_start: tuple[str, int], *arguments: Any) -> tuple[_Located, int]:
        fields, end = JSONObject(text_and_start, *arguments)
        located = _Located(fields)
        located.line = bisect.bisect(self._line_ends, text_and_start[1]) + 1
        return located, end


def from_json(text: str, where: str = "plan") -> Plan:
    """The plan that a text describes; ConfigError with the line and the reason if it describes none.

    `where`: what messages call the text. What a plan is to do is not looked at: that is for `verify`.
    """
    try:
        document = _Decoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}, line {error.lineno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{where}: not a plan: nested too deeply") from None
    if not isinstance(document, _Located):
        raise ConfigError(f"{where}, line 1: wanted an object, got {_shown(document)}")
    return _in_line(where, document, lambda: _plan(where, document))


def _plan(where: str, document: _Located) -> Plan:
    needed = ["format", *_HEADER, "ranks"]
    _check_names(document, needed, [*needed, _PROTOCOL, _WIDE_SUMS])
    if document["format"] != FORMAT:
        raise ConfigError(f"`format`: wanted {FORMAT!r}, got {_shown(document['format'])}")
    header = {name: _typed(name, document[name], kind) for name, kind in _HEADER.items()}
    collective = Collective(header["collective"], header["num_ranks"], header["num_chunks"], header["root"])
    programs = tuple(
        tuple(_program(where, program) for program in _typed("ranks", rank, list))
        for rank in _typed("ranks", document["ranks"], list)
    )
    return Plan(
        header["name"], collective, programs, header["scratch_chunks"], header["fifo_depth"],
        in_place=header["in_place"], out_of_place=header["out_of_place"],
        protocol=_typed(_PROTOCOL, document.get(_PROTOCOL, SIMPLE), str),
        wide_sums=_typed(_WIDE_SUMS, document.get(_WIDE_SUMS, False), bool),
    )  # fmt: skip


def _program(where: str, value: Any) -> Program:
    program = _typed("a program", value, _Located)

    def read() -> Program:
        _check_names(program, ["channel", "steps"], ["channel", "steps"])
        steps = (_step(where, step) for step in _typed("steps", program["steps"], list))
        return Program(_number("channel", program["channel"]), tuple(steps))

    return _in_line(where, program, read)


def _step(where: str, value: Any) -> Step:
    step = _typed("a step", value, _Located)

    def read() -> Step:
        _check_names(step, ["op"], ["op", "src", "dst", "count", "from", "to", "after"])
        if _typed("op", step["op"], str) not in _OPS:
            raise ConfigError(f"`op`: wanted one of {', '.join(_OPS)}, got {step['op']!r}")
        src, dst = (_location(name, step[name]) if name in step else None for name in ("src", "dst"))
        receive_from, send_to = (_number(name, step[name]) if name in step else None for name in ("from", "to"))
        after = tuple(
            Dependency(*(_number("after", number) for number in _pair("after", pair)))
            for pair in _typed("after", step.get("after", []), list)
        )
        count = _number("count", step.get("count", 1))
        return Step(_OPS[step["op"]], src, dst, count, receive_from, send_to, after)

    return _in_line(where, step, read)


def _in_line(where: str, located: _Located, read: Callable[[], T]) -> T:
    """What `read` returns. An error of its own gets the line; one from further inside has it."""
    try:
        return read()
    except _LineError:
        raise
    except ConfigError as error:
        raise _LineError(f"{where}, line {located.line}: {error}") from None


class _LineError(ConfigError):
    """Says which line is wrong."""


def _check_names(given: _Located, needed: list[str], known: list[str]) -> None:
    missing = [name for name in needed if name not in given]
    unknown = [name for name in given if name not in known]
    if missing or unknown:
        problems = [f"misses {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
        raise ConfigError("; ".join(problems))


def _typed(name: str, value: Any, kind: type) -> Any:
    # A bool is an int for Python only. Lists have no line of their own, objects their type's name.
    if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
        kinds = {_Located: "an object", list: "a list", str: "a text", int: "an integer", bool: "true or false"}
        raise ConfigError(f"`{name}`: wanted {kinds[kind]}, got {_shown(value)}")
    return value


def _number(name: str, value: Any) -> int:
    if _typed(name, value, int) < 0:
        raise ConfigError(f"`{name}`: wanted an integer >= 0, got {value}")
    return value


def _pair(name: str, value: Any) -> list:
    if len(_typed(name, value, list)) != 2:
        raise ConfigError(f"`{name}`: wanted pairs, got {_shown(value)}")
    return value


def _location(name: str, value: Any) -> Location:
    buffer, offset = _pair(name, value)
    return Location(_typed(name, buffer, str), _number(name, offset))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
