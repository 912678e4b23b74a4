"""Plans among ranks of several hosts: every algorithm's results by definition, and what is refused there."""

from __future__ import annotations

import re
import time

import pytest
import torch
from collective_cases import payload, same_bits
from execution_checks import check_plan, check_plans
from failure_cases import Raised, raised_by, works
from host_cases import WORLDS, on_hosts

import epcomm
from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.errors import ConfigError, PeerFailedError
from epcomm.kernels.protocol.plans import NETWORK_CHANNELS
from epcomm.testing.adversary import delay_operations

SMALL = [(0, torch.int64), (1, torch.float32), (1501, torch.float16)]
MANY_TILES = 700_001  # float32


def check_some(comm: epcomm.Communicator) -> None:
    delay_operations(comm, seed=comm.size, longest=0.001)
    check_plans(comm, comm.size - 1, 2, SMALL)


@pytest.mark.parametrize("world", ["1+1", "1+2", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_every_algorithm(world: str, port: int) -> None:
    on_hosts(WORLDS[world], port, check_some, num_threads=1)


def check_nodes(comm: epcomm.Communicator) -> None:
    delay_operations(comm, seed=1, longest=0.001)
    for kind in ALGORITHMS["hierarchical"].forms:
        plan = ALGORITHMS["hierarchical"].plan(kind, comm.size, root=1, channels=2, ranks_per_node=2)
        check_plan(comm, plan, kind, 1501, torch.int64, root=1, in_place=plan.in_place)
    two_level = ALGORITHMS["two_level"].plan("alltoall", comm.size, ranks_per_node=2)
    check_plan(comm, two_level, "alltoall", 77, torch.int64, in_place=False)
    for kind in ("allreduce", "reduce_scatter"):
        check_plan(comm, "ring", kind, MANY_TILES, torch.float32)
    check_plan(comm, "one_shot", "allgather", MANY_TILES // 4, torch.float32)


def test_nodes_of_two_ranks(port: int) -> None:
    on_hosts(WORLDS["2+2"], port, check_nodes, num_threads=2)


def test_what_else_uses_the_memory_does_not_disturb(port: int) -> None:
    """Plans by turns with collectives that use the same slots, each on the heels of the other."""

    def body(comm: epcomm.Communicator) -> None:
        made = [ALGORITHMS[name] for name in ("ring", "two_shot")]
        plans = [algorithm.plan("allreduce", comm.size, channels=2, fifo_depth=2) for algorithm in made]
        for call in range(12):
            root = call % comm.size
            x = torch.arange(100_003) % 101 + comm.rank * call
            wanted = (torch.arange(100_003) % 101) * comm.size + call * sum(range(comm.size))
            assert torch.equal(comm.allreduce(x, algorithm=plans[call % 2]), wanted)
            assert torch.equal(comm.allreduce(x), wanted)
            mine = payload(comm.rank, (300_001,), torch.uint8, call)
            assert same_bits(comm.broadcast(mine, root), payload(root, mine.shape, torch.uint8, call))
            assert torch.equal(comm.allreduce(x, algorithm=plans[1 - call % 2]), wanted)

    for _ in range(2):
        on_hosts([0, 1, 2], port, body, num_threads=2)


def refuse(comm: epcomm.Communicator) -> list[Raised]:
    texts = []
    for options in ({"protocol": "ll"}, {"protocol": "ll128"}, {"channels": NETWORK_CHANNELS + 1}):
        plan = ALGORITHMS["ring"].plan("allreduce", comm.size, **options)
        texts.append(raised_by(lambda plan=plan: comm.allreduce(torch.ones(9), algorithm=plan)))
        comm.reset()
        works(comm)
    return texts


def test_what_is_refused(port: int) -> None:
    for found in on_hosts(WORLDS["1+1"], port, refuse):
        wanted_texts = ["protocol ll: wanted ranks of one node", "protocol ll128: wanted", "at most 8"]
        for raised, wanted in zip(found, wanted_texts, strict=True):
            assert type(raised.error) in (ConfigError, PeerFailedError) and re.search(wanted, raised.text), raised


def fail_between(comm: epcomm.Communicator) -> None:
    """One rank raises where the others are in a plan; after a reset plans count from anew."""
    for call in range(3):
        check_plan(comm, "ring", "allreduce", 5001, torch.int64)
        if comm.rank == call % comm.size:
            time.sleep(0.2)  # its last words may take longer to another host than a failure
            comm.abort("on purpose")
        else:
            raised = raised_by(lambda: comm.allreduce(torch.ones(5001), algorithm="ring"))
            assert type(raised.error) is PeerFailedError and "on purpose" in raised.text
        comm.reset()


def test_failures_and_resets(port: int) -> None:
    on_hosts(WORLDS["1+2"], port, fail_between)
