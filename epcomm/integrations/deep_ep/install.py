"""`install`: makes ``import deep_ep`` mean this package."""

from __future__ import annotations

import sys
from importlib import import_module

from epcomm.errors import UnsupportedError

_PACKAGE = "epcomm.integrations.deep_ep"
#: names that clients import, and the modules that have what they look for there
_ALIASES = {
    "deep_ep": _PACKAGE,
    "deep_ep.utils": f"{_PACKAGE}.events",
    "deep_ep.utils.event": f"{_PACKAGE}.events",
    "deep_ep.buffers": _PACKAGE,
    "deep_ep.buffers.legacy": f"{_PACKAGE}.buffer",
    "deep_ep_cpp": _PACKAGE,
}


def install() -> None:
    """From now on ``import deep_ep`` in this process means `epcomm.integrations.deep_ep`, an installed DeepEP or not.

    Call it before the client is imported: many look for DeepEP then. Again: no effect.

    Raises UnsupportedError if another deep_ep is imported already; nothing is changed then.
    """
    modules = {name: import_module(target) for name, target in _ALIASES.items()}
    for name, module in modules.items():
        found = sys.modules.get(name, module)
        if found is not module:
            where = getattr(found, "__file__", None) or "no file"
            raise UnsupportedError(
                f"deep_ep.install: wanted no other `{name}` in this process, got one from {where}, which whoever "
                "imported it goes on using; call install() before anything imports deep_ep"
            )
    sys.modules.update(modules)
