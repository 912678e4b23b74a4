"""XML whose elements know their line, for files that others wrote: plans, topologies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from epcomm.errors import ConfigError


@dataclass
class Element:
    """An element, and the line its start tag begins in. `where` is what messages call the document."""

    tag: str
    attributes: dict[str, str]
    line: int
    where: str
    children: list[Element] = field(default_factory=list)

    def find(self, tag: str) -> Iterator[Element]:
        """The children of this tag."""
        return (child for child in self.children if child.tag == tag)

    def descendants(self, tag: str) -> Iterator[Element]:
        """All elements of this tag inside of this one, in the document's order."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.descendants(tag)

    def wrong(self, problem: str) -> NoReturn:
        """Raises ConfigError with the line."""
        raise ConfigError(f"{self.where}, line {self.line}: <{self.tag}>: {problem}")

    def text(self, name: str, default: str | None = None) -> str:
        """An attribute; ConfigError if it is missing and has no default."""
        value = self.attributes.get(name, default)
        if value is None:
            self.wrong(f"misses the attribute {name}")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """An attribute that is an integer, hexadecimal if it begins with 0x."""
        text = self.text(name, None if default is None else str(default))
        try:
            return int(text, 16 if text.lower().startswith("0x") else 10)
        except ValueError:
            self.wrong(f"{name}: wanted an integer, got {text!r}")

    def number(self, name: str) -> float:
        """An attribute that begins with a number; what follows after a space is its unit."""
        text = self.text(name)
        try:
            return float(text.split()[0])
        except (ValueError, IndexError):
            self.wrong(f"{name}: wanted a number, got {text!r}")


def parse_xml(text: str, where: str) -> Element:
    """The root element of a document; ConfigError with the line if it isn't well-formed, or declares entities."""
    parser = expat.ParserCreate()
    top = Element("", {}, 1, where)
    path = [top]

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = Element(tag, attributes, parser.CurrentLineNumber, where)
        path[-1].children.append(element)
        path.append(element)

    def refuse_doctype(*arguments: object) -> None:
        raise ConfigError(f"{where}, line {parser.CurrentLineNumber}: a DOCTYPE has no place here")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda tag: path.pop()
    parser.StartDoctypeDeclHandler = refuse_doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ConfigError(f"{where}, line {error.lineno}: not XML: {expat.errors.messages[error.code]}") from None
    return top.children[0]
