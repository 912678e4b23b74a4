"""What a kernel found and left in its context, as text and exceptions."""

from __future__ import annotations

from typing import Any

from epcomm.device import control
from epcomm.errors import CapacityError, ConfigError, EpcommError, TimeoutError
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
