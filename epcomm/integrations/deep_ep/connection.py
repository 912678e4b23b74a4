"""What all kinds of buffers have: the communicator of a process group, and handles of their own."""

from __future__ import annotations

from typing import Any

import torch

from epcomm.communicator import Communicator
from epcomm.errors import ConfigError, EpcommError, UnsupportedError
from epcomm.integrations.deep_ep.handles import BufferHandles
from epcomm.integrations.groups import handles_of


class ConnectedBuffer:
    """A buffer's communicator and handles. Its memory is taken by its calls, as they need it.

    Buffers of one group share a communicator, ``communicator``, which lives as long as the group. After an error it is
    failed until all ranks call ``buffer.communicator.reset()``.
    """

    def __init__(self, group: Any, comm: Any = None, device: Any = None):
        """Collective for the first buffer of a group.

        Args:
            group: a `torch.distributed.ProcessGroup`, or an epcomm `Communicator`.
            comm: DeepEP's alternative, an MPI communicator: not supported.
            device: of the tensors; default: the current CUDA device if there is one, else "cpu".
        """
        self.group, self.communicator = group, _communicator_of(group, comm, device)
        self._handles = BufferHandles(self.communicator)

    def destroy(self) -> None:
        """Collective: frees the buffer's memory. Idempotent. What was received stays valid."""
        self._handles.close()

    def get_comm_stream(self) -> Any:
        """The current stream, which operations run on."""
        return torch.get_device_module(self.communicator.device).current_stream()

    def _rejected(self, operation: str, text: str) -> EpcommError:
        """An error to raise because of an argument, before anything was sent; the peers raise, too."""
        comm = self.communicator
        return comm.reject(ConfigError(f"rank {comm.rank}: {operation}: {text}"))


def _communicator_of(group: Any, comm: Any, device: Any) -> Communicator:
    if isinstance(group, Communicator):
        return group
    if group is None:
        if comm is not None:
            raise UnsupportedError("deep_ep: argument `comm`: wanted a `group`, got an MPI communicator")
        raise ConfigError("deep_ep: argument `group`: wanted a ProcessGroup, got None")
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return handles_of(group, device).comm
