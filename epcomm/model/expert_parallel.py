"""The floor of a dispatch and a combine: bytes over the busiest link, and latencies that no byte count removes.

    floor = launch + signals + max(NVLink bytes / peak, NIC bytes / peak, HBM bytes / peak)

The three streams overlap perfectly, every rank starts at once, each sends its mean share. A real kernel can only be
slower. `reachable` is the same sum at rates that kernels have reached, with the copies that a wire format implies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from epcomm.errors import ConfigError
from epcomm.model.gpus import Gpu
from epcomm.model.routing import Routing, node_blocks, rank_blocks

OPERATIONS = ("dispatch", "combine")
MODES = ("throughput", "latency")
DTYPES = ("bfloat16", "float8")
# A row crosses the wire once per (token, expert), once per (token, rank) and is expanded (dispatch) or was reduced
# (combine) there, or once per (token, node) over the network and is passed on over NVLink.
WIRES = ("expert", "rank", "node")

SCALE_BLOCK = 128  # elements that share a float32 scale in float8: the format of DeepSeek-V3


@dataclass(frozen=True)
class Exchange:
    """One dispatch and combine. `tokens` is per rank; `dtype` is dispatch's, combine is bfloat16."""

    gpu: Gpu
    ranks: int
    tokens: int
    hidden: int = 7168
    routing: Routing = field(default_factory=Routing)
    mode: str = "throughput"
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("ranks", "tokens", "hidden"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.ranks > self.gpu.domain and self.ranks % self.gpu.domain:
            raise ConfigError(
                f"ranks is {self.ranks}; on {self.gpu.name} it must be at most {self.gpu.domain} or a multiple of that"
            )
        for name, allowed in (("mode", MODES), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be {' or '.join(allowed)}")

    @property
    def local_ranks(self) -> int:
        """Ranks of a node, that is of an NVLink domain."""
        return min(self.ranks, self.gpu.domain)

    @property
    def nodes(self) -> int:
        """NVLink domains."""
        return self.ranks // self.local_ranks

    def wires(self) -> tuple[str, ...]:
        """The wire formats that differ here."""
        return WIRES if self.nodes > 1 else WIRES[:2]

    def row_bytes(self, operation: str) -> int:
        """Bytes of one row: float8 has one byte per element and a float32 scale per 128 elements."""
        if operation == "dispatch" and self.dtype == "float8":
            return self.hidden + 4 * -(-self.hidden // SCALE_BLOCK)
        return 2 * self.hidden

    def rows_per_token(self, wire: str) -> float:
        """Expected rows of a token, its own rank's and node's included, in the granularity of a wire format."""
        if wire == "expert":
            return float(self.routing.topk)
        experts = self.routing.experts
        if wire == "rank":
            return self.routing.expected_blocks(rank_blocks(experts, self.ranks))
        return self.routing.expected_blocks(node_blocks(experts, self.ranks, self.local_ranks))

    def logical_bytes(self, operation: str, wire: str) -> float:
        """Bytes per rank, those that stay on the rank or node included: the numerator of most published bandwidths."""
        return self.tokens * self.rows_per_token(wire) * self.row_bytes(operation)


@dataclass(frozen=True)
class Traffic:
    """Mean bytes per rank of one operation; links in one direction (the other carries as much)."""

    nvlink: float
    nic: float
    memory: float  # HBM: the operation's input read once and its result written once
    staging: float  # HBM: landing, forwarding, expansion or reduction of rows, if nothing of it stays in L2


@dataclass(frozen=True)
class Prediction:
    """One operation with one wire format; times in µs."""

    operation: str
    wire: str
    traffic: Traffic
    launch: float
    signals: float
    nvlink: float
    nic: float
    memory: float
    reachable: float

    @property
    def bandwidth_bound(self) -> str:
        """The stream that takes longest."""
        return max(("nvlink", "nic", "memory"), key=lambda stream: getattr(self, stream))

    def floor(self, launched: bool = True) -> float:
        """µs below which the operation can't be; without the launch for comparison with times of kernels alone."""
        return launched * self.launch + self.signals + max(self.nvlink, self.nic, self.memory)


def traffic(exchange: Exchange, operation: str, wire: str) -> Traffic:
    """Bytes of an operation, from the rows per token that cross each link.

    Of rows sent directly to uniformly spread ranks, (local - 1)/ranks go to peers in the node and
    (ranks - local)/ranks leave it. A row per node leaves with probability (nodes - 1)/nodes, to the rank with the same
    place in that node, which is itself one of the `local` destinations.
    """
    ranks, local, nodes = exchange.ranks, exchange.local_ranks, exchange.nodes
    delivered = exchange.rows_per_token("expert" if wire == "expert" else "rank")
    if wire == "node":
        over_nvlink = delivered * (local - 1) / local
        over_nic = exchange.rows_per_token("node") * (nodes - 1) / nodes
        forwarded = over_nic
    else:
        over_nvlink, over_nic = delivered * (local - 1) / ranks, delivered * (ranks - local) / ranks
        forwarded = 0.0
    staged = 2 * forwarded
    if wire == "expert":
        # Dispatch writes rows where experts read them; combine's rows land at the token's rank and are read again.
        staged += 2 * delivered if operation == "combine" else 0
    else:
        # Dispatch reads each landed row and writes it per expert; combine reads a row per expert, lands one per rank.
        staged += delivered + exchange.routing.topk
    row = exchange.tokens * exchange.row_bytes(operation)
    return Traffic(row * over_nvlink, row * over_nic, row * (1 + delivered), row * staged)


def signal_time(exchange: Exchange, operation: str, wire: str) -> float:
    """µs of signals that follow each other: the rows' last one, its relay in a node, and before a throughput dispatch
    the counts, without which rows have no place in a packed result."""
    if exchange.ranks == 1:
        return 0.0
    nvlink, nic = exchange.gpu.nvlink_signal.microseconds, exchange.gpu.nic_signal.microseconds
    direct = nic if exchange.nodes > 1 else nvlink
    rows = nic + nvlink if wire == "node" else direct
    counts = direct if exchange.mode == "throughput" and operation == "dispatch" else 0.0
    return counts + rows


def predict(exchange: Exchange, operation: str, wire: str) -> Prediction:
    """The floor of one operation with one wire format, by the formula at the head of this module."""
    gpu, moved = exchange.gpu, traffic(exchange, operation, wire)
    signals = signal_time(exchange, operation, wire)
    reached = max(
        gpu.nvlink.microseconds(moved.nvlink, reached=True),
        gpu.nic.microseconds(moved.nic, reached=True),
        gpu.memory.microseconds(moved.memory + moved.staging, reached=True),
    )
    return Prediction(
        operation,
        wire,
        moved,
        gpu.launch.microseconds,
        signals,
        gpu.nvlink.microseconds(moved.nvlink),
        gpu.nic.microseconds(moved.nic),
        gpu.memory.microseconds(moved.memory),
        gpu.launch.microseconds + signals + reached,
    )


def predict_all(exchange: Exchange) -> list[Prediction]:
    """Both operations with every wire format."""
    return [predict(exchange, operation, wire) for operation in OPERATIONS for wire in exchange.wires()]
