"""Inputs of an expert-parallel case and the oracle for its result.

Every rank can compute every rank's inputs. Expert `e` multiplies a row by `scale(e)`, a multiple of 1/4 chosen so
that the factors of a token's experts add up exactly and differ from a wrong expert's by more than rounding can; the
result is checked in float64 from this definition.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

import torch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_USUAL = ("throughput", "bfloat16")  # left out of labels
_CHECK_ROWS = 256


@dataclass(frozen=True)
class Case:
    """One shape to measure. `tokens` is per rank; `layout` is that of the received rows."""

    ranks: int
    tokens: int
    hidden: int
    experts: int
    topk: int
    layout: str = "flat"
    dtype: str = "bfloat16"
    mode: str = "throughput"
    model: str = ""

    def __post_init__(self) -> None:
        if self.experts % self.ranks:
            raise ValueError(
                f"the competitors need experts divisible by ranks: got {self.experts} experts on {self.ranks} ranks"
            )
        if self.topk > self.experts:
            raise ValueError(f"topk {self.topk} exceeds the number of experts {self.experts}")
        if self.layout not in ("flat", "contiguous", "padded"):
            raise ValueError(f"unknown layout {self.layout!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}, one of {', '.join(DTYPES)}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * DTYPES[self.dtype].itemsize

    def as_dict(self) -> dict:
        """For the JSON document."""
        return asdict(self)

    def label(self) -> str:
        """A short name for progress, tables and plots."""
        shape = f"{self.tokens} x {self.hidden}, {self.experts} experts, top-{self.topk}"
        kind = " ".join(word for word in (self.mode, self.layout, self.dtype) if word not in _USUAL)
        return ", ".join(filter(None, [self.model, f"{self.ranks} ranks", shape, kind]))


def scale(experts: torch.Tensor) -> torch.Tensor:
    """The factor of each expert: 1/4, 1/2, 3/4 or 1."""
    return (experts % 4 + 1) / 4


class Workload:
    """A rank's share of a case: `x` [tokens, hidden] and `topk_idx` [tokens, topk], experts distinct."""

    def __init__(self, case: Case, rank: int, seed: int = 0):
        self.case, self.rank, self.seed = case, rank, seed
        self.dtype = DTYPES[case.dtype]
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        self.x = torch.randn(case.tokens, case.hidden, generator=generator).to(self.dtype)
        self.topk_idx = self.routing_of(rank)
        self.local_experts = case.experts // case.ranks

    def routing_of(self, rank: int) -> torch.Tensor:
        """The `topk_idx` of any rank."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + 500 + rank)
        draws = torch.rand(self.case.tokens, self.case.experts, generator=generator)
        return draws.topk(self.case.topk, dim=-1).indices.contiguous()

    @cached_property
    def pairs(self) -> torch.Tensor:
        """Rows by (source, destination): how many tokens of the source have an expert on the destination."""
        counts = torch.zeros(self.case.ranks, self.case.ranks, dtype=torch.int64)
        for source in range(self.case.ranks):
            owners = self.routing_of(source) // self.local_experts
            for destination in range(self.case.ranks):
                counts[source, destination] = (owners == destination).any(dim=-1).sum()
        return counts

    @cached_property
    def expert_counts(self) -> torch.Tensor:
        """Selections by (source, expert)."""
        routings = [self.routing_of(source) for source in range(self.case.ranks)]
        return torch.stack([torch.bincount(routing.view(-1), minlength=self.case.experts) for routing in routings])

    @property
    def max_expert_rows(self) -> int:
        """The largest number of (token, expert) rows that a rank sends or receives."""
        received = self.expert_counts.sum(0).view(self.case.ranks, -1).sum(-1)
        return int(max(received.max(), self.expert_counts.sum(-1).max()))

    @property
    def max_rank_rows(self) -> int:
        """The largest number of (token, rank) rows that a rank sends or receives."""
        return int(max(self.pairs.sum(0).max(), self.pairs.sum(1).max()))

    def payload_rows(self) -> float:
        """Rows of the case's layout that a rank writes in dispatch and reads in combine, averaged over ranks."""
        rows = self.pairs if self.case.layout == "flat" else self.expert_counts
        return float(rows.sum()) / self.case.ranks

    def check(self, out: torch.Tensor) -> None:
        """Compare a combined output with the definition; the bound is three roundings of the output type."""
        tolerance = 2.0 * torch.finfo(self.dtype).eps
        factor = scale(self.topk_idx.double()).sum(-1, keepdim=True)
        for begin in range(0, self.case.tokens, _CHECK_ROWS):
            rows = slice(begin, begin + _CHECK_ROWS)
            want = self.x[rows].double() * factor[rows]
            excess = (out[rows].double() - want).abs() - tolerance * want.abs()
            bad = ~(excess <= 1e-30)
            if bad.any():
                token, column = (int(index) for index in bad.nonzero()[0])
                got, wanted = float(out[begin + token, column]), float(want[token, column])
                raise AssertionError(f"token {begin + token}, column {column}: got {got}, wanted {wanted}")
