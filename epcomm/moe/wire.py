"""How often a row travels: once per (token, expert), or once per (token, rank). Picked by a cost formula.

By rank fewer rows cross the links, and each rank copies what arrived to its experts' places, and sums their outputs per
token before they travel back. With n experts per token, on d ranks, of which a share s is not the token's own, and a
link that moves `link_speed` times what memory moves, dispatch costs, in rows per token at the speed of memory,

    by expert   max(s n / link_speed, 1 + n)            it reads a row once and writes it n times
    by rank     max(s d / link_speed, 1 + d) + d + n    then it reads d rows and writes n

and combine the same with reads for writes. d is the expected number of different ranks of n different experts, chosen
evenly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb


def expected_ranks(num_experts: int, topk: int, owner: Sequence[int]) -> float:
    """How many ranks own at least one of `topk` different experts; `owner[e]` is the rank of expert e.

    A rank with m of E experts has none of them in C(E - m, topk) of the C(E, topk) choices.
    """
    choices = comb(num_experts, topk)
    return sum(1 - comb(num_experts - owned, topk) / choices for owned in Counter(owner).values())


def rows_at_memory_speed(size: int, rows: float, link_speed: float) -> float:
    """Time to send `rows` rows per token, and to receive as many, in rows at the speed of memory."""
    return max(rows * (size - 1) / size / link_speed, 1 + rows)


def cheaper_wire(size: int, num_experts: int, topk: int, owner: Sequence[int], link_speed: float) -> str:
    """ "expert" or "rank"; the same on all ranks for the same arguments."""
    ranks = expected_ranks(num_experts, topk, owner)
    by_expert = rows_at_memory_speed(size, topk, link_speed)
    by_rank = rows_at_memory_speed(size, ranks, link_speed) + ranks + topk
    return "rank" if by_rank < by_expert else "expert"
