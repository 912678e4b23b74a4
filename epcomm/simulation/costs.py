"""What a plan's execution costs besides the links: an alpha-beta model with the sender's overhead (LogGP's o and G)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from epcomm.errors import ConfigError

BYTES_PER_MICROSECOND = 1e3  # of 1 GB/s


@dataclass(frozen=True)
class Costs:
    """µs and GB/s of whoever runs the steps; by default all of that is free, and only links take time.

    `launch`: passes once, before any step. `step`: a program is busy that long with each step, besides moving bytes.
    `channel`: GB/s at which one program moves the bytes of a step. `efficiency`: the payload's share of what a link
    carries, 0.5 for LL, whose flags are as large as the data. `latency`: the least µs between a message's last byte
    leaving and its receiver seeing it, by the kind of link ("nvlink", "network"...); a way that has several kinds takes
    the largest, and a link's own latencies where they are more.
    """

    launch: float = 0.0
    step: float = 0.0
    channel: float = math.inf
    efficiency: float = 1.0
    latency: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("launch", "step"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"costs: {name}: wanted µs >= 0, got {getattr(self, name)!r}")
        if not self.channel > 0:
            raise ConfigError(f"costs: channel: wanted GB/s > 0, got {self.channel!r}")
        if not 0 < self.efficiency <= 1:
            raise ConfigError(f"costs: efficiency: wanted a share above 0 and up to 1, got {self.efficiency!r}")

    def moving(self, num_bytes: float) -> float:
        """µs in which one program moves so many bytes."""
        return num_bytes / (self.channel * BYTES_PER_MICROSECOND)

    def least_latency(self, kinds: frozenset[str]) -> float:
        """The least latency of a way with links of these kinds."""
        return max((self.latency.get(kind, 0.0) for kind in kinds), default=0.0)
