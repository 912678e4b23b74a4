"""Reads what Triton's compiler wrote: accesses and orderings from PTX, products from its IR, registers from ptxas' log.

What an access is for is told by its source line, which `.loc` gives: payload moves in the branches of `if ... WIDE`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s")
_PACKAGE = Path(__file__).resolve().parents[2]
_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]+)"')
_MEMORY = re.compile(r"\s(?:ld|st|atom|red|fence|membar)\.[\w.:]+")
_BITS = re.compile(r"\.[bufs](8|16|32|64|128)$")
_FUNCTION = re.compile(r"(?:\.visible |\.weak |\.extern )?\.func\b")
_NO_FUNCTION = re.compile(r"\s*\.(?:visible \.entry|file|section)\b")
_CALL = re.compile(r"\bcall(?:\.uni)?\s+(?:\([^)]*\),\s*)?(\w+)")
_UNDEFINED = re.compile(r"^\.extern \.func\s+(?:\([^)]*\)\s*)?(\w+)", re.MULTILINE)
_OF_DRIVER = {"__assertfail", "vprintf"}  # assertions of the libraries print
_SYSTEM_FENCE = re.compile(r"\sfence\.(?:acq_rel|sc)\.sys;")
_LABEL = re.compile(r"\$L__BB\w+:")  # others mark lines for debuggers
_WRITE = re.compile(r"\s(?:st|atom|red)\.(?!param|local)")
_ORDERS = {"acquire", "release", "acq_rel", "sc"}
_SPACES = "global|shared|param|const|local|async"
_SCOPES = {"cta", "cluster", "gpu", "sys"}

_ASSIGNMENT = re.compile(r"\s*(%[\w#:]+)(?:, %[\w#:]+)* = \"?([\w.]+)\"?\s*(.*)")
_INT32 = re.compile(r": (?:tensor<(?:\d+x)+)?i32\b")
_CONSTANT_SOURCES = ("arith.constant", "tt.make_range")
_SHAPING = ("tt.splat", "tt.expand_dims", "tt.broadcast")


@dataclass(frozen=True)
class Access:
    """A global memory instruction and the line it comes from, of the innermost function."""

    instruction: str
    file: str
    line: int

    @property
    def is_load(self) -> bool:
        """True for loads, false for stores and atomics."""
        return self.instruction.startswith("ld.")

    @property
    def num_bytes(self) -> int:
        """Bytes that one thread moves with it."""
        bits = _BITS.search(self.instruction)
        vector = re.search(r"\.v(\d)\.", self.instruction)
        return (int(bits[1]) if bits else 0) // 8 * (int(vector[1]) if vector else 1)

    @property
    def order(self) -> str:
        """Its memory order, "" for none."""
        return next((part for part in self.instruction.split(".") if part in _ORDERS), "")

    @property
    def scope(self) -> str:
        """The scope of its order, "" for the default, which is the GPU."""
        return next((part for part in self.instruction.split(".") if part in _SCOPES), "")

    @property
    def function(self) -> str:
        """The function that the line is in."""
        return _functions(self.file).get(self.line, "")

    @property
    def branch(self) -> str:
        """ "wide" or "narrow" for payload, else ""."""
        return _branches(self.file).get(self.line, "")


def accesses(ptx: str) -> list[Access]:
    """Every load, store and atomic on global memory, and every fence."""
    files = {
        number: path for line in ptx.splitlines() if (match := _FILE.match(line)) for number, path in [match.groups()]
    }
    found, where, in_assembly = [], ("", 0), False
    for line in ptx.splitlines():
        if loc := _LOC.match(line):
            if not in_assembly:  # there, newer compilers count the lines of the assembly on from the source line
                where = (files.get(loc[1], ""), int(loc[2]))
        elif "inline asm" in line:
            in_assembly = "begin" in line
        elif not line.lstrip().startswith(("//", ".")):
            for match in _MEMORY.finditer(" " + line):
                instruction = match[0].strip()
                if ".global" in instruction or instruction.startswith(("fence.", "membar.")):
                    found.append(Access(instruction, *where))
    return found


def own_code(ptx: str) -> str:
    """It without the functions of the libraries that the kernel is linked with."""
    kept, is_kept = [], True
    for line in ptx.splitlines():
        if _FUNCTION.match(line):
            is_kept = False
        elif _NO_FUNCTION.match(line):
            is_kept = True
        if is_kept:
            kept.append(line)
    return "\n".join(kept)


def calls(ptx: str) -> tuple[str, ...]:
    """The functions that are called in it."""
    return tuple(sorted(set(_CALL.findall(ptx))))


def undefined(ptx: str) -> tuple[str, ...]:
    """The functions that it, or a library linked with it, calls and none defines; but those that the driver has."""
    return tuple(sorted(set(_UNDEFINED.findall(ptx)) - _OF_DRIVER))


def unreleased_puts(ptx: str) -> int:
    """Calls of a network's put that may read what a network card doesn't see yet.

    Between a fence of the whole system and the call, there must be neither stores nor a place that is jumped to.
    """
    count, is_released = 0, False
    for line in ptx.splitlines():
        if _SYSTEM_FENCE.search(line):
            is_released = True
        elif _LABEL.match(line) or _WRITE.search(line):
            is_released = False
        elif (call := _CALL.search(line)) and call[1].endswith("_put"):
            count += not is_released
    return count


def generic_accesses(ptx: str) -> int:
    """Loads and stores without a state space: none of them would be counted by `accesses`."""
    return len(re.findall(rf"\s(?:ld|st|atom|red)\.(?![\w.:]*\b(?:{_SPACES})\b)[\w.:]+\s", ptx))


def multimem_instructions(ptx: str) -> tuple[str, ...]:
    """The different multimem instructions in it: "multimem.st.relaxed.sys.global.v4.f32"."""
    return tuple(sorted(set(re.findall(r"\bmultimem\.(?:ld_reduce|st|red)\.[\w.:]+", ptx))))


def orderings(found: list[Access]) -> dict[str, int]:
    """How often each (order, scope) occurs, written like "acquire.sys"."""
    counts = Counter(f"{access.order}.{access.scope or 'gpu'}" for access in found if access.order)
    return dict(sorted(counts.items()))


def products_in_32_bits(ttir: str) -> int:
    """Products and left shifts of 32-bit integers in Triton's IR, except of a tile's lane numbers and constants.

    Rows times strides pass 2^32 bytes: a kernel has no business with such a product unless its data is 32-bit integers.
    """
    # A name may be given twice, in regions that don't see each other: the latest assignment is the visible one.
    is_bounded: dict[str, bool] = {}
    count = 0
    for line in ttir.splitlines():
        match = _ASSIGNMENT.match(line)
        if not match:
            continue
        name, operation, rest = match.groups()
        operands = re.findall(r"%[\w#]+", rest.split(" loc(")[0])
        is_product = operation in ("arith.muli", "arith.shli")
        bounded = all(is_bounded.get(operand, False) for operand in operands)
        is_bounded[name] = operation in _CONSTANT_SOURCES or ((is_product or operation in _SHAPING) and bounded)
        if is_product and _INT32.search(rest) and not bounded:
            count += 1
    return count


@dataclass(frozen=True)
class Resources:
    """What `ptxas -v` says of a kernel; bytes are per thread."""

    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int


def resources(log: str) -> Resources:
    """From the log of `ptxas -v`; the worst of all functions in it. Local memory counts as stack."""

    def largest(pattern: str) -> int:
        return max(map(int, re.findall(pattern, log)), default=0)

    registers = largest(r"Used (\d+) registers")
    if not registers:
        raise ValueError(f"ptxas said nothing of registers: {log!r}")
    stack = max(
        largest(r"(\d+) bytes stack frame"), largest(r"(\d+) bytes cumulative stack"), largest(r"(\d+) bytes lmem")
    )
    return Resources(registers, stack, largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads"))


@functools.cache
def _tree(file: str) -> ast.Module:
    # Triton's cache goes by what a function says, not by where it lies: the code may name another checkout
    path = _PACKAGE / file.rpartition(f"/{_PACKAGE.name}/")[2]
    path = path if path.is_file() else Path(file)
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


@functools.cache
def _functions(file: str) -> dict[int, str]:
    """The function of each line of a file."""
    found = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.FunctionDef):
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.name))
    return found


@functools.cache
def _branches(file: str) -> dict[int, str]:
    """Which lines of a file are in a branch for WIDE accesses, and which in the one for others."""
    found: dict[int, str] = {}
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.If) and "WIDE" in {
            name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)
        }:
            for branch, body in (("wide", node.body), ("narrow", node.orelse)):
                for statement in body:
                    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
                    found.update(dict.fromkeys(lines, branch))
    return found
