"""Who the ranks of a communicator are: a rendezvous tells a rank its place and spreads one text of each.

That is a torch store, which may be a process group's or torchrun's, or what `epcomm.launch` told the rank.
"""

from __future__ import annotations

import contextvars
import os
import socket
import uuid
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from epcomm.errors import ConfigError, PeerFailedError, TimeoutError, UnsupportedError


@dataclass
class StoreRendezvous:
    """Ranks that share a `torch.distributed` store: one all-gather of a text, and hosts that all of them can reach."""

    store: Any
    rank: int
    size: int

    def allgather(self, text: str, timeout: float) -> list[str]:
        # counted in the store, so that a rank that opens a new client to the same store still agrees with the others
        turn = self.store.add(f"epcomm/{self.size}/turn/{self.rank}", 1)
        names = [f"epcomm/{self.size}/{turn}/{rank}" for rank in range(self.size)]
        gone = [f"{name}/gone" for name in names]
        self.store.delete_key(gone[self.rank])
        self.store.set(names[self.rank], text)
        try:
            self.store.wait(names, _deadline(timeout))
        except RuntimeError as error:  # torch raises DistStoreError, a RuntimeError, at its deadline
            absent = [rank for rank, name in enumerate(names) if not self.store.check([name])]
            missing = [rank for rank in absent if not self.store.check([gone[rank]])] or absent
            self.store.set(gone[self.rank], "")
            self.store.delete_key(names[self.rank])  # the next attempt begins where the others still are
            self.store.add(f"epcomm/{self.size}/turn/{self.rank}", -1)
            raise TimeoutError(
                f"rank {self.rank}: init waited {timeout:g} s for rank(s) {missing} of {self.size} to come to the store"
            ) from error
        return [self.store.get(name).decode() for name in names]

    def store_hosts(self) -> list[str]:
        """The host of a `TCPStore`, which may be wrapped; none of other stores."""
        store = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        return [store.host] if hasattr(store, "host") else []


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


def find_rendezvous(
    group: Any, store: Any, rank: int | None, world_size: int | None, timeout: float
) -> StoreRendezvous | LaunchedRank:
    """The first that applies: a group, a store, `epcomm.launch`, the default group, torchrun's environment, alone."""
    import torch.distributed as dist

    if group is not None and store is not None:
        raise ConfigError("init: arguments `group` and `store` exclude each other")
    if group is not None:
        return _of_group(group)
    if store is not None:
        if rank is None or world_size is None:
            raise ConfigError("init: argument `store` needs `rank` and `world_size` as well")
        if not isinstance(store, dist.Store):
            raise ConfigError(f"init: argument `store`: wanted a torch.distributed store, got {store!r}")
        if not (isinstance(rank, int) and isinstance(world_size, int) and 0 <= rank < world_size):
            wanted = f"wanted 0 <= rank < world_size={world_size!r}"
            raise ConfigError(f"init: argument `rank`: {wanted}, got {rank!r}")
        return StoreRendezvous(store, rank, world_size)
    if rank is not None or world_size is not None:
        raise ConfigError("init: arguments `rank` and `world_size` need `store` as well")
    launched = launched_rank.get()
    if launched is not None:
        return launched
    if dist.is_available() and dist.is_initialized():
        return _of_group(dist.group.WORLD)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if "MASTER_ADDR" in os.environ:
            return _of_environment(timeout)
        if os.environ["WORLD_SIZE"] != "1":  # not alone: that would give wrong results in silence
            got = f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']}"
            raise ConfigError(
                f"init: the environment has {got}, but no MASTER_ADDR and MASTER_PORT to meet at, as torchrun sets them"
            )
    return LaunchedRank(0, 1, f"epcomm-{uuid.uuid4().hex}")


def _of_group(group: Any) -> StoreRendezvous:
    """By the group's store: it has our deadline, and serves whatever the group's back end takes tensors on."""
    import torch.distributed as dist

    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError("init: argument `group`: this process is not a member of the group")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(f"init: argument `group`: wanted a torch.distributed.ProcessGroup, got {group!r}")
    store = group.get_group_store()
    if store is None:
        raise UnsupportedError("init: argument `group`: it has no store; pass `store`, `rank` and `world_size` instead")
    own = store.clone()  # type: ignore[attr-defined]  # while a client waits, nobody else can use it
    return StoreRendezvous(own, group.rank(), group.size())


def _of_environment(timeout: float) -> StoreRendezvous:
    """By what torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
    import torch.distributed as dist

    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=_deadline(timeout)))
    except ValueError as error:
        raise ConfigError(f"init: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of the environment: {error}") from None
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        if "EADDRINUSE" in str(error):
            wanted = f"wanted a free port, {where} is taken"
            raise ConfigError(f"init: MASTER_ADDR:MASTER_PORT of the environment: {wanted}") from None
        raise TimeoutError(
            f"rank {os.environ['RANK']}: init waited up to {timeout:g} s for the others at MASTER_ADDR:MASTER_PORT, "
            f"{where}: {error}"
        ) from None
    return StoreRendezvous(store, rank, size)


def _deadline(seconds: float) -> timedelta:
    """As stores take it: in whole milliseconds, of which 0 are for ever."""
    return timedelta(seconds=max(seconds, 0.001))


def host_identity() -> str:
    """Equal for two processes that can share memory and a Unix socket: host name, boot, network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.readlink('/proc/self/ns/net')}"
