"""The errors that epcomm raises. A message says what was wanted and got, on which rank, in which operation."""

from __future__ import annotations

import builtins
from typing import Any


class EpcommError(RuntimeError):
    """Base class of every error raised by epcomm."""


class ConfigError(EpcommError, ValueError):
    """An argument is wrong: its type, shape, dtype, device or value."""


class CapacityError(EpcommError, ValueError):
    """More tokens or rows than the memory that was reserved for them."""


class TimeoutError(EpcommError, builtins.TimeoutError):
    """A wait reached its deadline; the message names the awaited rank, operation and phase."""


class PeerLostError(EpcommError):
    """A peer's process ended while it was still a member of the communicator. `rank` is the peer, -1 if unknown."""

    def __init__(self, message: str, rank: int = -1):
        super().__init__(message)
        self.rank = rank


class PeerFailedError(EpcommError):
    """A peer raised an error; the message quotes it."""


class MismatchError(EpcommError):
    """Two ranks called different operations, or the same operation with different arguments."""


class ClosedError(EpcommError):
    """The communicator, handle or routing was closed, reset, or belongs to the parent of a fork."""


class UnsupportedError(EpcommError):
    """The request is valid but this target, machine or build cannot serve it."""


class PlanError(EpcommError, ValueError):
    """A plan is wrong. `kind` says how, `step` and `other` (two steps' positions, or None) where.

    Kinds: "range" (a step names what isn't there), "message" (sends and receives don't match), "deadlock", "race" (two
    accesses to a chunk that nothing orders), "result" (the collective's result isn't what ends up in memory).
    """

    def __init__(self, kind: str, message: str, step: Any = None, other: Any = None):
        super().__init__(message)
        self.kind, self.step, self.other = kind, step, other
