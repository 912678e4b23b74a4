"""From a process group to the communicator that its buffers share, and how an argument error is raised there."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from epcomm.communicator import Communicator
from epcomm.errors import ConfigError, EpcommError, UnsupportedError
from epcomm.initialize import init

# it lives as long as its group: buffers come and go, and who drops one last differs from rank to rank
_communicators: weakref.WeakKeyDictionary[Any, Communicator] = weakref.WeakKeyDictionary()


def communicator_of(group: Any, comm: Any = None, device: Any = None) -> Communicator:
    """Collective for the first buffer of a group: the communicator of its ranks.

    Args:
        group: a `torch.distributed.ProcessGroup`, or an epcomm `Communicator`.
        comm: DeepEP's alternative, an MPI communicator: not supported.
        device: of the tensors; default: the current CUDA device if there is one, else "cpu".
    """
    if isinstance(group, Communicator):
        return group
    if group is None:
        if comm is not None:
            raise UnsupportedError("deep_ep: argument `comm`: wanted a `group`, got an MPI communicator")
        raise ConfigError("deep_ep: argument `group`: wanted a ProcessGroup, got None")
    found = _communicators.get(group)
    if found is None or found.closed:
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        found = _communicators[group] = init(group, device=device)
    return found


def rejected(comm: Communicator, operation: str, text: str, kind: type[EpcommError] = ConfigError) -> EpcommError:
    """An error to raise because of an argument, before anything was sent; the peers raise, too."""
    return comm.reject(kind(f"rank {comm.rank}: {operation}: {text}"))
