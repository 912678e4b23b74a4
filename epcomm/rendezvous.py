"""Who the ranks of a communicator are: a rendezvous tells a rank its place and spreads one text of each.

That is a torch store, a process group, or what `epcomm.launch` told the rank.
"""

from __future__ import annotations

import contextvars
import os
import socket
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from epcomm.errors import ConfigError, PeerFailedError, TimeoutError


class Rendezvous(Protocol):
    """What a bootstrap needs from outside: who I am, one all-gather of a text, and hosts that all ranks can reach."""

    rank: int
    size: int

    def allgather(self, text: str, timeout: float) -> list[str]: ...

    def store_hosts(self) -> list[str]: ...


@dataclass
class StoreRendezvous:
    """Ranks that share a `torch.distributed` store."""

    store: Any
    rank: int
    size: int

    def allgather(self, text: str, timeout: float) -> list[str]:
        # counted in the store, so that a rank that opens a new client to the same store still agrees with the others
        turn = self.store.add(f"epcomm/turn/{self.rank}", 1)
        key = f"epcomm/{turn}"
        self.store.set(f"{key}/{self.rank}", text)
        names = [f"{key}/{rank}" for rank in range(self.size)]
        try:
            self.store.wait(names, timedelta(seconds=timeout))
        except RuntimeError as error:  # torch raises DistStoreError, a RuntimeError, at its deadline
            missing = [rank for rank, name in enumerate(names) if not self.store.check([name])]
            raise TimeoutError(
                f"rank {self.rank}: init waited {timeout:g} s for rank(s) {missing} of {self.size} to come to the store"
            ) from error
        return [self.store.get(name).decode() for name in names]

    def store_hosts(self) -> list[str]:
        return _store_hosts(self.store)


@dataclass
class GroupRendezvous:
    """The ranks of a `torch.distributed` process group."""

    group: Any
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        import torch.distributed as dist

        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ConfigError("init: argument `group`: this process is not a member of the group")

    def allgather(self, text: str, timeout: float) -> list[str]:
        import torch.distributed as dist

        texts: list[Any] = [None] * self.size
        dist.all_gather_object(texts, text, group=self.group)
        return texts

    def store_hosts(self) -> list[str]:
        import torch.distributed as dist

        group: Any = dist.group.WORLD if self.group is None else self.group
        return _store_hosts(group.get_group_store()) if hasattr(group, "get_group_store") else []


@dataclass
class LaunchedRank:
    """What `epcomm.launch` tells a rank: its place, and the name under which each of its communicators meets."""

    rank: int
    size: int
    name: str
    is_thread: bool = False
    abandoned: Any = None  # an event of thread ranks: one of them ended with an exception
    turn: int = 0
    runtimes: list[Any] = field(default_factory=list)  # weak references: failed if the rank ends with an exception

    def next_hub_name(self) -> str:
        self.turn += 1
        return f"{self.name}-{self.turn}"

    def check(self) -> None:
        """Raises if a rank will not come any more."""
        if self.abandoned is not None and self.abandoned.is_set():
            raise PeerFailedError(f"rank {self.rank}: init: another rank ended with an exception")


#: Set by `epcomm.launch`, in a process's main thread or per thread rank.
launched_rank: contextvars.ContextVar[LaunchedRank | None] = contextvars.ContextVar("epcomm_rank", default=None)


def find_rendezvous(group: Any, store: Any, rank: int | None, world_size: int | None) -> Rendezvous | LaunchedRank:
    """The first that applies: a group, a store, `epcomm.launch`, the default group, torchrun's environment, alone."""
    if group is not None and store is not None:
        raise ConfigError("init: arguments `group` and `store` exclude each other")
    if group is not None:
        return GroupRendezvous(group)
    if store is not None:
        if rank is None or world_size is None:
            raise ConfigError("init: argument `store` needs `rank` and `world_size` as well")
        if not 0 <= rank < world_size:
            raise ConfigError(f"init: argument `rank`: wanted 0 <= rank < world_size={world_size}, got {rank}")
        return StoreRendezvous(store, rank, world_size)
    if rank is not None or world_size is not None:
        raise ConfigError("init: arguments `rank` and `world_size` need `store` as well")
    launched = launched_rank.get()
    if launched is not None:
        return launched
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return GroupRendezvous(None)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        env_store, env_rank, env_size = next(dist.rendezvous("env://"))
        return StoreRendezvous(env_store, env_rank, env_size)
    return LaunchedRank(0, 1, f"epcomm-{uuid.uuid4().hex}")


def _store_hosts(store: Any) -> list[str]:
    """The host of a `TCPStore`, which may be wrapped; none of other stores."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return [store.host] if hasattr(store, "host") else []


def host_identity() -> str:
    """Equal for two processes that can share memory and a Unix socket: host name, boot, network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.readlink('/proc/self/ns/net')}"
