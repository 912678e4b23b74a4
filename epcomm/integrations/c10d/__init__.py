"""A backend of `torch.distributed`: once this is imported, ``dist.init_process_group("epcomm")`` runs on epcomm.

torch imports it by itself (entry point ``torch.backends``), so it is cheap: the rest is loaded by the first group.
Ranks of `epcomm.launch` meet with ``init_method="epcomm://"``; elsewhere that means what ``"env://"`` does.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from epcomm.integrations.c10d.rendezvous import meet


def register() -> None:
    """Tells torch of the backend and of the init_method, unless it knows them."""
    if "epcomm" not in dist.Backend.backend_list:
        dist.Backend.register_backend("epcomm", _create, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("epcomm", meet)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    from epcomm.integrations.c10d.process_group import ProcessGroup

    return ProcessGroup(store, rank, size, timeout)


register()
