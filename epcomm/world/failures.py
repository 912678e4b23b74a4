"""What a kernel found and left in its context, as text and exceptions."""

from __future__ import annotations

import itertools
from typing import Any

from epcomm.device import control
from epcomm.errors import CapacityError, ConfigError, EpcommError, MismatchError, TimeoutError
from epcomm.kernels.protocol.sites import describe_site


def awaited(context: Any) -> str:
    """Whom the last failed wait was for, and what for; `context` are the words of a context block."""
    return f"rank {int(context[control.FAILED_PEER])}, {describe_site(int(context[control.FAILED_SITE]))}"


def error_found(status: int, where: str, context: Any) -> EpcommError:
    """The exception for what stopped an operation here, or for what an earlier one left to be told."""
    wanted, found = int(context[control.FAILED_WANTED]), int(context[control.FAILED_FOUND])
    if status == control.CAPACITY_BEFORE:
        rows = f"argument `max_recv_rows`: wanted at least {wanted}, got {found}; rows past it were dropped"
        return CapacityError(f"{where}: an earlier route or dispatch found: {rows}")
    if status == control.BAD_VALUE_BEFORE:
        token, slot = divmod(wanted, found)
        index = f"argument `topk_idx`: wanted -1 or an expert, got neither at [{token}, {slot}], and took it for -1"
        return ConfigError(f"{where}: an earlier route found: {index}")
    seconds = int(context[control.TIMEOUT_NS]) / 1e9
    return TimeoutError(f"{where}: waited {seconds:g} s for {awaited(context)}: wanted {wanted:#x}, found {found:#x}")


def mismatch_found(where: str, own: str, peer: int, other: str) -> MismatchError:
    """The exception where a peer is in another operation: what differs, if it is the same one with other arguments."""
    (own_name, own_arguments), (other_name, other_arguments) = _name_and_arguments(own), _name_and_arguments(other)
    pairs = itertools.zip_longest(own_arguments, other_arguments, fillvalue="nothing")
    differing = ", ".join(f"{mine} and {theirs}" for mine, theirs in pairs if mine != theirs)
    wanted = "all ranks must call the same operations in the same order"
    if own_name == other_name and differing:
        wanted = f"wanted the same arguments on all ranks, got here and there {differing}"
    return MismatchError(f"{where}: rank {peer} is in {other}; {wanted}")


def _name_and_arguments(text: str) -> tuple[str, list[str]]:
    """Of ``name(a=1, b=(2, 3))`` the name, and ``a=1`` and ``b=(2, 3)``."""
    name, _, rest = text.partition("(")
    arguments, depth = [""], 0
    for letter in rest.removesuffix(")"):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            arguments.append("")
        else:
            arguments[-1] += letter
    return name, [argument.strip() for argument in arguments]
