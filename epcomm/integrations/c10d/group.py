"""What a process group is besides its operations: communicators, names, and an end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from epcomm.communicator import Communicator
from epcomm.initialize import init

CPU = torch.device("cpu")


class Group(dist.ProcessGroup):
    """A group of ranks with a communicator for each device of its tensors.

    The one for CPUs is made at once. Any other is made by the first operation on its device, which all ranks must call.
    """

    _device_types = [CPU, torch.device("cuda")]  # where torch finds a device for what it sends itself
    supports_splitting = False  # torch asks when a group is bound to a device

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        super().__init__(rank, size)  # type: ignore[call-arg]  # that of (store, rank, size) fails in torch 2.13
        self._store, self._timeout = store, timeout.total_seconds()
        self._name = self._description = ""
        self._communicators: dict[torch.device, Communicator] = {}
        self._communicator(CPU)

    def _communicator(self, device: torch.device) -> Communicator:
        if device not in self._communicators:
            self._communicators[device] = init(
                store=self._store, rank=self.rank(), world_size=self.size(), device=device, timeout=self._timeout
            )
        return self._communicators[device]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def getBackendName(self) -> str:
        return "epcomm"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        """What `destroy_process_group` does. Collective, unless the group has failed."""
        for communicator in self._communicators.values():
            communicator.close()

    def abort(self) -> None:
        """Fails the group on all ranks and leaves it."""
        for communicator in self._communicators.values():
            communicator.abort("the process group was aborted")
            communicator.close()
