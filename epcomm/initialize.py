"""`init`: from what a rank knows of its peers to a communicator, and which communicator is the default one."""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from epcomm.communicator import Communicator
from epcomm.errors import ClosedError, ConfigError, UnsupportedError
from epcomm.hosts.transport import TRANSPORTS
from epcomm.kernels.cpu.target import CpuTarget
from epcomm.kernels.target import Target, make_target
from epcomm.runtime import LONGEST_TIMEOUT
from epcomm.world import bootstrap, rendezvous
from epcomm.world.agreement import Terms, agree

if TYPE_CHECKING:
    from epcomm.topology import Topology

_process_default: Communicator | None = None
_thread_default: contextvars.ContextVar[Communicator | None] = contextvars.ContextVar("epcomm_default", default=None)


def init(
    group: Any = None,
    *,
    store: Any = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: Any = None,
    transport: str = "auto",
    num_threads: int | None = None,
    sm_budget: int | None = None,
    topology: Topology | None = None,
    timeout: float = 600.0,
) -> Communicator:
    """Collective: makes a communicator and, if there is none yet, the default one.

    Args:
        group: a `torch.distributed.ProcessGroup`; its store is used once, to exchange addresses.
        store, rank, world_size: a `torch.distributed` store, this rank and the number of ranks.
            Without group and store: `epcomm.launch`, else the default group, else torchrun's environment, else a
            world of one rank.
        device: "cpu" (None means that) or a CUDA device, the same kind on all ranks. Several ranks may share a device.
        transport: the same on all ranks. On a cpu it is how ranks on several hosts reach each other: "ucx", "tcp", or
            "auto": UCX where all ranks have an RDMA device that it can use, else TCP. Those of one host share memory,
            and with "shared_memory" there must be no others. On CUDA "peer_memory" (load and store over NVLink or PCIe,
            on one host), "nvshmem" or "gin" (NCCL's GPU-initiated networking), or "auto": the first of these that no
            rank refuses. With the last two each rank is a process, and results on symmetric memory end with the
            communicator.
        num_threads: programs per operation on each rank, the least that any rank asks for; default: cores / ranks. On
            CUDA it has no effect.
        sm_budget: on CUDA what `num_threads` is on a cpu, where it has no effect: how many of the GPU's multiprocessors
            an operation may keep busy; default: see `kernels.gpu.cuda.default_sm_budget`. 0, which all ranks must agree
            on, moves data with the GPUs' copy engines; a kernel of one program is left for the barriers, and for what
            computes.
        topology: the machine that the ranks are on, the same on all ranks: one of `epcomm.topology.PRESETS`, or read by
            `from_nccl_xml`. Its ranks are ours in this order; those of one machine of it are on one host. By it "auto"
            chooses how to allreduce. None: what is known of this one, see `Communicator.topology`.
        timeout: seconds that an operation may wait for its peers.

    Raises ConfigError for a wrong argument, UnsupportedError if `device` or, on all ranks and with the reasons, no
    transport can be used, TimeoutError if not all ranks came in time.
    """
    if not (isinstance(timeout, (int, float)) and 0 < timeout <= LONGEST_TIMEOUT):
        raise ConfigError(f"init: argument `timeout`: wanted seconds > 0 and <= {LONGEST_TIMEOUT:g}, got {timeout!r}")
    for name, number, least in (("num_threads", num_threads, 1), ("sm_budget", sm_budget, 0)):
        if number is not None and not (isinstance(number, int) and number >= least):
            raise ConfigError(f"init: argument `{name}`: wanted an integer of at least {least}, got {number!r}")
    target = _target(_device(device), transport, sm_budget)
    machine = "none" if topology is None else _named(topology)
    hub = bootstrap.connect(rendezvous.find_rendezvous(group, store, rank, world_size, timeout), timeout)
    try:
        wanted = num_threads if target.runs_on_threads else sm_budget
        wanted = wanted or target.default_num_programs(hub.size)
        num_programs = agree(hub, Terms(wanted, target.kind, machine), timeout)
        communicator = Communicator(hub, target, num_programs, timeout, topology)
    except BaseException:
        hub.close()  # peers that wait for this rank see it go
        raise
    launched = rendezvous.launched_rank.get()
    if launched is not None:
        launched.runtimes.append(weakref.ref(communicator._runtime))
    _make_default(communicator, per_thread=launched is not None and launched.is_thread)
    return communicator


def _make_default(communicator: Communicator, per_thread: bool) -> None:
    global _process_default
    current = _thread_default.get() if per_thread else _process_default
    if current is not None and not current.closed:
        return
    if per_thread:
        _thread_default.set(communicator)
    else:
        _process_default = communicator


def default_communicator() -> Communicator:
    """The communicator behind `epcomm.allreduce` and its relatives."""
    communicator = _thread_default.get() or _process_default
    if communicator is None:
        raise ClosedError("there is no communicator: call epcomm.init() first")
    return communicator


def _device(device: Any) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:  # torch's text says what it knows
        raise ConfigError(f"init: argument `device`: wanted a torch device, got {device!r}: {error}") from None


def _target(device: torch.device, transport: str, sm_budget: int | None) -> Target:
    """What runs the kernels of ranks on `device`."""
    chosen = make_target.get()
    if chosen is None and device.type == "cuda":
        from epcomm.heap.transport import TRANSPORTS as OF_GPUS
        from epcomm.kernels.gpu.cuda import CudaTarget

        _check_transport(transport, OF_GPUS)
        return CudaTarget(device, sm_budget, transport)
    if chosen is None and device.type != "cpu":
        raise UnsupportedError(f"init: argument `device`: epcomm serves cpu and cuda, got {device}")
    if chosen is None:
        _check_transport(transport, TRANSPORTS)
        return CpuTarget(transport)
    target = chosen()
    _check_transport(transport, (target.transport,))
    return target


def _named(topology: Topology) -> str:
    """A topology's name, and what tells it from others."""
    from epcomm.topology import Topology

    if not isinstance(topology, Topology):
        raise ConfigError(f"init: argument `topology`: wanted an epcomm.topology.Topology, got {topology!r}")
    return f"{topology.name} ({topology.num_ranks} ranks, {topology.fingerprint})"


def _check_transport(transport: str, offered: Sequence[str]) -> None:
    if transport not in ("auto", *offered):
        wanted = ", ".join(map(repr, ("auto", *offered)))
        raise ConfigError(f"init: argument `transport`: wanted one of {wanted}, got {transport!r}")
