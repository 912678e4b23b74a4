"""How an allreduce or reduce goes: which algorithms exist, which of them fit a request, and which one "auto" means."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch

from epcomm.collectives.cost.kernels import measured_kernel
from epcomm.collectives.plan import Plan
from epcomm.errors import ConfigError, UnsupportedError
from epcomm.kernels.protocol.arithmetic import SWITCH_DTYPES, SWITCH_OPS
from epcomm.kernels.protocol.collectives import ONE_SHOT_BYTES
from epcomm.kernels.protocol.lines import LL128, PROTOCOLS

if TYPE_CHECKING:
    from epcomm.collectives.cost.machines import Machine
    from epcomm.topology import Topology

ALGORITHMS = ("auto", "one_shot", "two_shot", "multimem")


def is_kernel(algorithm: str | Plan) -> TypeGuard[str]:
    """Whether a kernel written by hand does it; else it is a plan, or the algorithm that makes one."""
    return algorithm in ALGORITHMS


def check_algorithm(
    where: str, algorithm: str, num_bytes: int, dtype: torch.dtype, op: str, has_multicast: bool, spans_hosts: bool
) -> None:
    """Raises ConfigError if the algorithm can't do this reduction, UnsupportedError if it can't here."""
    argument = f"{where}: argument `algorithm`:"
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"{argument} wanted one of {ALGORITHMS}, got {algorithm!r}")
    if algorithm != "auto" and spans_hosts:
        raise UnsupportedError(
            f"{argument} {algorithm} reads other ranks' memory, and these ranks are on several hosts: only 'auto' works"
        )
    if algorithm == "one_shot" and num_bytes > ONE_SHOT_BYTES:
        raise ConfigError(f"{argument} one_shot takes up to {ONE_SHOT_BYTES} bytes, got {num_bytes}")
    if algorithm == "multimem":
        if dtype not in SWITCH_DTYPES or op not in SWITCH_OPS:
            dtypes = ", ".join(map(str, SWITCH_DTYPES))
            raise ConfigError(f"{argument} multimem does {' and '.join(SWITCH_OPS)} of {dtypes}, got {op} of {dtype}")
        if not has_multicast:
            raise UnsupportedError(
                f"{argument} multimem needs memory that NVLink's switch multicasts to, which these ranks don't have: "
                "sm_90 or newer behind an NVSwitch, one process and one GPU per rank; 'two_shot' works everywhere"
            )


def chosen_kernel(algorithm: str, num_bytes: int, spans_hosts: bool) -> str:
    """What `auto` means where nothing has a price, the same on all ranks; anything else means itself.

    Never multimem, whose additions are in the switch's order: what `auto` gives has the same bits from run to run.
    """
    if spans_hosts:
        return "rails"
    if num_bytes == 0:
        return "one_shot"  # no chunk, no wait: in the others ranks would not even meet
    return measured_kernel(num_bytes) if algorithm == "auto" else algorithm


def priced_machine(topology: Topology | None) -> Machine | None:
    """The machine on which `auto` goes by prices: the one that users told us of."""
    if topology is None:
        return None
    from epcomm.collectives.cost.machines import Machine  # others need nothing of it

    return Machine.of(topology)


def chosen_on(
    machine: Machine, num_bytes: int, dtype: torch.dtype, op: str, num_programs: int, has_ll128: bool
) -> str | Plan:
    """What `auto` means for an allreduce on a machine: a kernel's name, or a plan."""
    from epcomm.collectives.cost.choice import Request, choose  # here machines have loaded most of it

    name = str(dtype).removeprefix("torch.")
    protocols = tuple(each for each in PROTOCOLS if has_ll128 or each != LL128)
    chosen = choose(Request(num_bytes, machine, name, op=op, num_programs=num_programs, protocols=protocols))
    return chosen.algorithm if chosen.is_kernel else chosen.plan


def num_shares(num_bytes: int, num_nodes: int, partial_scale: int) -> int:
    """How many nodes finish each part of an allreduce by rails: one share each, or 1 where every node finishes all.

    Every node finishing all takes one hop, and a node sends `partial_scale` bytes per byte of the message to each other
    one; else it takes two, and each node sends the part ``1 / num_nodes`` of that and of the result. Two hops are for
    messages whose bytes take longer than a hop, if that saves any.
    """
    one_hop, two_hops = partial_scale * num_nodes, partial_scale + 1  # bytes that a node sends each other, scaled
    is_small = (num_nodes - 1) * num_bytes <= ONE_SHOT_BYTES
    return 1 if is_small or one_hop <= two_hops else num_nodes


def is_scattered_by_rails(num_bytes: int, most_members: int, partial_scale: int) -> bool:
    """Whether a reduce-scatter of `num_bytes` per rank is reduced on each host before anything travels.

    Else each rank sends its bytes to who sums them: as many rows of them as its node has members, of which the largest
    has `most_members`. By rails it is one of `partial_scale` and one of the result, which needs more hops.
    """
    return num_bytes > ONE_SHOT_BYTES and most_members > partial_scale + 1
