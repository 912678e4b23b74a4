"""How ranks that must all take the same way find out whether they can, and which one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from epcomm.errors import ConfigError, UnsupportedError

T = TypeVar("T")

#: sends a payload to all ranks and returns everyone's, by rank
Exchange = Callable[[bytes], list[bytes]]


def refusal(check: Callable[[], object]) -> str:
    """Why a check raises UnsupportedError; "" if it doesn't."""
    try:
        check()
    except UnsupportedError as error:
        return str(error)
    return ""


def agreed(what: str, exchange: Exchange, attempt: Callable[[], T]) -> T:
    """Collective: what `attempt` returns; UnsupportedError on all ranks, with the reason, if it fails on one."""
    result: T | None = None
    failure = ""
    try:
        result = attempt()
    except Exception as error:  # it isn't documented what the networks' bindings raise
        failure = str(error) if isinstance(error, UnsupportedError) else f"{type(error).__name__}: {error}"
    failures = [pickle.loads(payload) for payload in exchange(pickle.dumps(failure))]
    for rank, message in enumerate(failures):
        if message:
            raise UnsupportedError(f"{what}: rank {rank}: {message}")
    return result  # type: ignore[return-value]


def require_same(wanted: str, exchange: Exchange, detail: Any = None) -> list[Any]:
    """Collective: everyone's `detail`, by rank; raises ConfigError unless all ranks want the same transport."""
    said = [pickle.loads(payload) for payload in exchange(pickle.dumps((wanted, detail)))]
    if len({transport for transport, _ in said}) > 1:
        found = ", ".join(sorted({repr(transport) for transport, _ in said}))
        raise ConfigError(f"init: argument `transport`: wanted the same on all ranks, got {found}")
    return [each for _, each in said]


def first_taken(wanted: str, attempts: Mapping[str, Callable[[], T]]) -> T:
    """What the attempt of a transport returns, of "auto" the first one that isn't refused by an UnsupportedError.

    Raises UnsupportedError with why each was refused. All ranks take the same way if each attempt ends alike on all.
    """
    reasons = []
    for name in attempts if wanted == "auto" else (wanted,):
        try:
            return attempts[name]()
        except UnsupportedError as error:
            reasons.append(str(error))
    raise UnsupportedError(f"init: argument `transport`: got {wanted!r}, but {'; '.join(reasons)}")
