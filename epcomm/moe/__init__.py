"""Expert parallelism: tokens go to the ranks that own their experts, and the experts' outputs come back."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {"MoELayer": "layer", "Router": "router", "Experts": "experts", "DenseBlock": "state_dict"}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Names of the layer's parts, resolved on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value
