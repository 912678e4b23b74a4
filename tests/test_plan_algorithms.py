"""Every algorithm, collective and number of ranks: proven, and run in adversarial orders against the definition."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np
import pytest
from plan_checks import adversaries, assert_runs_right, inputs_of

from epcomm.collectives.algorithms import ALGORITHMS
from epcomm.collectives.algorithms.double_binary_tree import Tree, two_trees
from epcomm.collectives.algorithms.pat import tree_edges
from epcomm.collectives.algorithms.swing import swing_partner
from epcomm.collectives.plan import COLLECTIVES, Plan
from epcomm.collectives.plan.conditions import REDUCTIONS, ROOTED
from epcomm.collectives.plan.reference import execute
from epcomm.collectives.plan.verify import Proof, verify
from epcomm.errors import ConfigError

PAIRS = [(name, kind) for name, algorithm in ALGORITHMS.items() for kind in algorithm.forms]
#: what is done by powers of two of ranks only
POWERS_OF_TWO = {
    ("halving_doubling", "reduce_scatter"), ("halving_doubling", "allgather"),
    ("swing", "allreduce"), ("swing", "reduce_scatter"), ("swing", "allgather"),
}  # fmt: skip
MANY_RANKS = {"ring", "double_binary_tree", "recursive_doubling", "halving_doubling", "pat", "swing", "bruck", "direct"}


def proven(name: str, kind: str, num_ranks: int, **options) -> tuple[Plan, Proof]:
    plan = ALGORITHMS[name].plan(kind, num_ranks, **options)
    proof = verify(plan)
    assert proof.same_bits
    if not plan.collective.is_reduction or num_ranks == 1:
        assert proof.roundings == 0
    else:  # a sum of n terms is at least as deep as a balanced tree, at most a chain
        assert (num_ranks - 1).bit_length() <= proof.roundings <= num_ranks - 1
    return plan, proof


@pytest.mark.parametrize("num_ranks", range(1, 10))
@pytest.mark.parametrize("name, kind", PAIRS)
def test_up_to_nine_ranks(name, kind, num_ranks):
    if (name, kind) in POWERS_OF_TWO and num_ranks & (num_ranks - 1):
        with pytest.raises(ConfigError, match=f"wanted a power of two, got {num_ranks}"):
            ALGORITHMS[name].plan(kind, num_ranks)
        return
    for options in ({}, {"channels": 2, "pieces": 3}):
        roots = {0, num_ranks // 2, num_ranks - 1} if kind in ROOTED and not options else {num_ranks // 2}
        for root in roots if kind in ROOTED else {0}:
            plan, _ = proven(name, kind, num_ranks, root=root, **options)
            assert_runs_right(plan, adversaries(plan, num_ranks)[1:4:2] if options else None)


@pytest.mark.parametrize("num_ranks", [16, 32])
@pytest.mark.parametrize("name, kind", [pair for pair in PAIRS if pair[0] in MANY_RANKS])
def test_many_ranks(name, kind, num_ranks):
    plan, _ = proven(name, kind, num_ranks, root=num_ranks - 1 if kind in ROOTED else 0)
    assert_runs_right(plan, adversaries(plan)[1:2])


@pytest.mark.parametrize(
    "name, kind", [pair for pair in PAIRS if "ranks_per_node" in ALGORITHMS[pair[0]].options]
)
def test_nodes(name, kind):
    for num_nodes, size in product((1, 2, 3), (1, 2, 3)):
        num_ranks = num_nodes * size
        for options in ({}, {"channels": 2}):
            root = num_ranks // 2 if kind in ROOTED else 0
            plan, _ = proven(name, kind, num_ranks, root=root, ranks_per_node=size, **options)
            assert_runs_right(plan, adversaries(plan, num_ranks)[1:4:2])
    plan, _ = proven(name, kind, 16, ranks_per_node=4)
    crossings = {
        (position.rank, step.send_to) for position, step in plan.steps()
        if step.op.sends and position.rank // 4 != step.send_to // 4
    }  # fmt: skip
    assert all(src % 4 == dst % 4 for src, dst in crossings)  # on their rails only
    with pytest.raises(ConfigError, match="ranks_per_node: wanted a divisor of 6, got 4"):
        ALGORITHMS[name].plan(kind, 6, ranks_per_node=4)


def chunks_between_nodes(plan: Plan, size: int) -> int:
    return sum(
        step.count for position, step in plan.steps() if step.op.sends and position.rank // size != step.send_to // size
    )


def test_hierarchies_cross_nodes_less():
    """Of 16 ranks in 4 nodes: in units of the data that a node's ranks hold together."""
    def crossed(name: str, kind: str, **options) -> float:
        plan = ALGORITHMS[name].plan(kind, 16, **options)
        return chunks_between_nodes(plan, 4) / plan.collective.num_chunks

    nodes = {"ranks_per_node": 4}
    assert crossed("hierarchical", "allreduce", **nodes) == 2 * (4 - 1)  # a ring of 4 nodes
    assert crossed("two_shot", "allreduce") == 2 * 12
    assert crossed("two_level", "alltoall", **nodes) == crossed("direct", "alltoall") == 16 * 12
    messages = [
        sum(position.rank // 4 != step.send_to // 4 for position, step in plan.steps() if step.op.sends)
        for plan in (ALGORITHMS["two_level"].plan("alltoall", 16, **nodes), ALGORITHMS["direct"].plan("alltoall", 16))
    ]
    assert messages == [16 * 3, 16 * 12]


@pytest.mark.parametrize("fifo_depth", [2, 3, 8])
@pytest.mark.parametrize("name, kind", PAIRS)
def test_shallow_fifos(name, kind, fifo_depth):
    """More pieces than slots: the compiler's order doesn't deadlock."""
    plan, _ = proven(name, kind, 4, pieces=10, fifo_depth=fifo_depth)
    assert plan.fifo_depth == fifo_depth
    assert_runs_right(plan, adversaries(plan)[1:3])


def test_bandwidth():
    """Chunks that a rank sends at most, of an allreduce whose input is 1: a ring's are the least."""
    def most_sent(name: str, num_ranks: int) -> float:
        plan = ALGORITHMS[name].plan("allreduce", num_ranks)
        sent = [0] * num_ranks
        for position, step in plan.steps():
            sent[position.rank] += step.count if step.op.sends else 0
        return max(sent) / plan.collective.num_chunks

    for name in ("ring", "bidirectional_ring", "two_shot", "halving_doubling", "swing", "pat"):
        assert most_sent(name, 8) == 2 * 7 / 8, name
    assert most_sent("one_shot", 8) == 7
    assert most_sent("recursive_doubling", 8) == 3
    assert most_sent("double_binary_tree", 8) <= 2


def able(kinds: Iterable[str], sizes: Iterable[int]) -> list[tuple[str, str, int]]:
    """(algorithm, collective, number of ranks) of those that can be made."""
    return [
        (name, kind, size) for (name, kind), size in product(PAIRS, sizes)
        if kind in kinds and not ((name, kind) in POWERS_OF_TWO and size & (size - 1))
    ]  # fmt: skip


@pytest.mark.parametrize("name, kind, num_ranks", able(REDUCTIONS, (2, 5, 8)))
def test_roundings_by_running(name, kind, num_ranks):
    """Sums that count how deep they are: the deepest is what the proof says."""
    plan, proof = proven(name, kind, num_ranks)
    zeros = [np.zeros(len(given), np.int64) for given in inputs_of(plan.collective)]
    outputs = execute(plan, zeros, reduce=lambda a, b: np.maximum(a, b) + 1).outputs
    assert max(int(output.max(initial=0)) for output in outputs) == proof.roundings


@pytest.mark.parametrize("name, kind, num_ranks", able(["allreduce"], (3, 5, 8)))
def test_all_ranks_get_the_same_bits(name, kind, num_ranks):
    """Of float32 numbers of very different sizes, whose sum depends on the order."""
    plan, _ = proven(name, kind, num_ranks)
    generator = np.random.default_rng(num_ranks)
    shapes = [(len(given), 500) for given in inputs_of(plan.collective)]
    inputs = [generator.standard_normal(shape) * 10.0 ** generator.integers(-6, 6, shape) for shape in shapes]
    inputs = [given.astype(np.float32) for given in inputs]
    assert (sum(inputs) != sum(inputs[::-1])).any()
    first = execute(plan, inputs).outputs[0]
    for in_place, scheduler in product((False, True), adversaries(plan)[:4]):
        for output in execute(plan, inputs, in_place=in_place, scheduler=scheduler).outputs:
            assert output.tobytes() == first.tobytes()


def test_every_collective_has_algorithms():
    for kind in COLLECTIVES:
        assert sum(kind in algorithm.forms for algorithm in ALGORITHMS.values()) >= 3


def test_arguments():
    ring = ALGORITHMS["ring"]
    for call, problem in (
        (lambda: ring.plan("alltoall", 2), "ring does allreduce, allgather"),
        (lambda: ring.plan("allreduce", 0), "num_ranks: wanted an integer >= 1"),
        (lambda: ring.plan("allreduce", 2, nodes=2), "unknown options nodes; ring has order"),
        (lambda: ring.plan("allreduce", 3, order=[0, 1, 1]), "order: wanted all ranks below 3"),
        (lambda: ring.plan("reduce", 2, root=2), "root: wanted a rank below 2"),
        (lambda: ring.plan("reduce", 2, channels=0), "channels: wanted an integer >= 1"),
        (lambda: ring.plan("reduce", 2, pieces=1.5), "pieces: wanted an integer >= 1"),
        (lambda: ring.plan("allreduce", 4, fifo_depth=1), "no order of its steps was found for FIFOs of 1"),
    ):
        with pytest.raises(ConfigError, match=problem):
            call()


@pytest.mark.parametrize("name", ["ring", "bidirectional_ring"])
@pytest.mark.parametrize("kind", ALGORITHMS["ring"].forms)
def test_rings_in_any_order(name, kind):
    order = [3, 0, 4, 1, 2]
    plan, _ = proven(name, kind, 5, order=order, root=4 if kind in ROOTED else 0)
    assert_runs_right(plan)
    neighbours = {(order[i], order[(i + 1) % 5]) for i in range(5)}
    if name == "bidirectional_ring":
        neighbours |= {(b, a) for a, b in neighbours}
    assert {(position.rank, step.send_to) for position, step in plan.steps() if step.op.sends} <= neighbours


@pytest.mark.parametrize("num_ranks", [*range(1, 20), 32, 63])
def test_two_trees(num_ranks):
    """Both span all ranks, none has children in both, and they are of logarithmic height."""
    def walk(tree: Tree, depth: int = 0):
        yield tree.rank, bool(tree.children), depth
        for child in tree.children:
            yield from walk(child, depth + 1)

    nodes = [list(walk(tree)) for tree in two_trees(range(num_ranks))]
    for found in nodes:
        assert sorted(rank for rank, _, _ in found) == list(range(num_ranks))
        assert max(depth for _, _, depth in found) <= num_ranks.bit_length()
    inner = [{rank for rank, has_children, _ in found if has_children} for found in nodes]
    assert not inner[0] & inner[1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8, 13, 64])
def test_pat_trees(num_ranks):
    edges = list(tree_edges(num_ranks))
    assert sorted(to for _, to in edges) == list(range(1, num_ranks))
    known = {0}
    for giver, taker in edges:
        assert giver in known
        known.add(taker)


def test_swing_distances():
    """Partners of each other, and after all steps everyone has everyone's; never as far as halving and doubling."""
    for bits in range(1, 9):
        size = 1 << bits
        has = [{rank} for rank in range(size)]
        farthest = 0
        for step in range(bits):
            partners = [swing_partner(rank, step, size) for rank in range(size)]
            assert all(partners[partner] == rank for rank, partner in enumerate(partners))
            assert all(not has[rank] & has[partner] for rank, partner in enumerate(partners))
            has = [has[rank] | has[partner] for rank, partner in enumerate(partners)]
            distances = [(partner - rank) % size for rank, partner in enumerate(partners)]
            farthest = max(farthest, *(min(distance, size - distance) for distance in distances))
        assert all(len(found) == size for found in has)
        assert farthest <= max(1, size // 2 - 1 if size > 2 else 1)
