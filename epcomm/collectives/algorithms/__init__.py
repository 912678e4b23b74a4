"""Algorithms that make plans, by name: ``ALGORITHMS["ring"].plan("allreduce", num_ranks=8, channels=2)``."""

from epcomm.collectives.algorithms.algorithm import Algorithm
from epcomm.collectives.algorithms.all_pairs import ONE_SHOT, TWO_SHOT
from epcomm.collectives.algorithms.alltoall import DIRECT, TWO_LEVEL
from epcomm.collectives.algorithms.bidirectional_ring import BIDIRECTIONAL_RING
from epcomm.collectives.algorithms.bruck import BRUCK
from epcomm.collectives.algorithms.double_binary_tree import DOUBLE_BINARY_TREE
from epcomm.collectives.algorithms.halving_doubling import HALVING_DOUBLING
from epcomm.collectives.algorithms.hierarchical import HIERARCHICAL
from epcomm.collectives.algorithms.pat import PAT
from epcomm.collectives.algorithms.recursive_doubling import RECURSIVE_DOUBLING
from epcomm.collectives.algorithms.ring import RING
from epcomm.collectives.algorithms.swing import SWING

ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        RING, BIDIRECTIONAL_RING, DOUBLE_BINARY_TREE, RECURSIVE_DOUBLING, HALVING_DOUBLING, BRUCK, ONE_SHOT, TWO_SHOT,
        HIERARCHICAL, PAT, SWING, DIRECT, TWO_LEVEL,
    )
}  # fmt: skip

__all__ = ["ALGORITHMS", "Algorithm"]
