"""Moves tensors between the ranks of a distributed ML job: expert-parallel dispatch and combine, and collectives."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# resolved on first use, so that `import epcomm` stays light
_HOMES = {
    "init": "initialize",
    "Communicator": "communicator",
    "default_communicator": "initialize",
    "launch": "launcher",
    "Work": "work",
    "ExpertParallel": "moe.expert_parallel",
    "Float8": "moe.quantize",
    "MXFP8": "moe.quantize",
    "NVFP4": "moe.quantize",
    "Placement": "moe.placement",
    "rebalance": "moe.placement",
    "errors": "errors",
}
_ON_DEFAULT_COMMUNICATOR = (
    "allreduce allgather gather reduce_scatter scatter alltoall alltoallv broadcast reduce barrier send recv recv_any "
    "bind_allreduce expert_parallel"
).split()

__all__ = [*_HOMES, *_ON_DEFAULT_COMMUNICATOR]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = import_module(f"epcomm.{_HOMES[name]}")
        value = home if name == "errors" else getattr(home, name)
    elif name in _ON_DEFAULT_COMMUNICATOR:
        value = _on_default_communicator(name)
    else:
        # with these Python asks whether `epcomm.all_reduce` means `allreduce`
        raise AttributeError(f"module 'epcomm' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    globals()[name] = value
    return value


def _on_default_communicator(name: str) -> Any:
    from epcomm.communicator import Communicator
    from epcomm.initialize import default_communicator

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(default_communicator(), name)(*args, **kwargs)

    method = getattr(Communicator, name)
    call.__name__ = call.__qualname__ = name
    call.__doc__ = method.__doc__
    call.__wrapped__ = method  # type: ignore[attr-defined]  # for inspect.signature
    return call


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
