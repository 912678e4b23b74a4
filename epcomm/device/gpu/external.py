"""Functions of device libraries that kernels are linked with, and which arguments they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.language import core


def external(name: str, num_arguments: int) -> Callable[..., Any]:
    """A function by its symbol: of int64 numbers, called by every thread, with an int32 result that means nothing.

    (A call without a result has no place in Triton's language.)
    """

    @core.extern
    def call(*arguments: Any, _semantic: Any = None) -> Any:
        types = {(core.dtype("int64"),) * num_arguments: (name, core.dtype("int32"))}
        return core.extern_elementwise("", "", list(arguments), types, is_pure=False, _semantic=_semantic)

    return call
