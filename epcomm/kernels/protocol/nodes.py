"""Which ranks share a node, as kernels look it up: a table of words in private memory.

The ranks of a node are numbered in rank order; they needn't be consecutive. *Rail* k joins the ranks with number k: all
nodes have ranks on the first `NUM_RAILS` rails.
"""

from __future__ import annotations

from collections.abc import Sequence

# ---- table (words): two numbers, then rows of one word per rank, then where each node's members begin and the last end
NUM_NODES, NUM_RAILS = 0, 1
ROWS = 2
NODE, NUMBER, MEMBERS = range(3)  # of a rank: its node, and its number there; the ranks by node and number
NUM_ROWS = 3


def node_table(nodes: Sequence[int]) -> list[int]:
    """The table for ranks on these nodes, which are numbered from 0."""
    members: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    numbers = []
    for rank, node in enumerate(nodes):
        numbers.append(len(members[node]))
        members[node].append(rank)
    starts = [0]
    for ranks in members:
        starts.append(starts[-1] + len(ranks))
    by_node = [rank for ranks in members for rank in ranks]
    return [len(members), min(map(len, members)), *nodes, *numbers, *by_node, *starts]
