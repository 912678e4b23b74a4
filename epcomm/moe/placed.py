"""Where a handle's experts are: what follows from it, how it is changed between steps, the loads that ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from epcomm.errors import ConfigError
from epcomm.moe.bind import Binder
from epcomm.moe.calls import Calls
from epcomm.moe.config import Config
from epcomm.moe.memory import Memory
from epcomm.moe.placement import Load, Placement
from epcomm.moe.turns import Turns
from epcomm.operation import Operation
from epcomm.runtime import Runtime
from epcomm.work import Fifo


class PlacedExperts:
    """The part of `ExpertParallel` that depends on the placement. Everything else in a handle stays as it was made."""

    rank: int
    name: str  # in texts; that of another placement is another one
    device: torch.device
    config: Config
    #: logical ids of this rank's experts, by local number
    local_expert_ids: list[int]
    #: the same, int64 on the handle's device
    local_experts: torch.Tensor
    _runtime: Runtime
    _fifo: Fifo
    _memory: Memory
    _turns: Turns

    def _place(self, config: Config, name: str) -> None:
        """Host state for a placement. Its `Calls` tell routings along the one before apart from later ones.

        Its `Binder` makes operations with another name: were a peer stopped by a failure before it changed, then after
        a reset they don't match.
        """
        self.config, self.name = config, name
        self.local_expert_ids = config.experts_of(self.rank)
        self.local_experts = torch.tensor(self.local_expert_ids, dtype=torch.int64, device=self.device)
        self._local_physical = torch.tensor(config.physical_of(self.rank), dtype=torch.int64, device=self.device)
        self._binder = Binder(self._runtime, self._memory, config, name)
        self._calls = Calls(self._runtime, self._binder, config, self.name)
        self._mapped = config.placement  # where it takes one to find a physical expert
        if self._mapped is not None:
            self._mapped.prepare(self.device)  # a capture couldn't

    def _place_first(self, config: Config, name: str, barrier: Callable[[str], Operation]) -> None:
        self._first_name, self._barrier = name, barrier
        self._load = Load(config.num_experts, device=self.device) if config.track_load else None
        self._place(config, name)

    @property
    def load(self) -> Load | None:
        """Rows per logical expert of all ranks' tokens: ``load.total``, and ``load.mean`` per routing, for `rebalance`.

        The same on all ranks: it is what they exchange anyway, counted when a routing's counts are known (throughput:
        in route; latency: in its first dispatch). `Communicator.reset` clears it, as ranks may have failed at different
        points. None without ``track_load=True``.
        """
        return self._load

    @property
    def placement(self) -> Placement:
        """Which logical experts are on which rank, by local number."""
        config = self.config
        if config.placement is not None:
            return config.placement
        return Placement(tuple(tuple(config.experts_of(rank)) for rank in range(config.size)))

    def set_placement(self, placement: Placement | Sequence[int]) -> None:
        """Collective: from the next routing on, experts are where `placement` says; moving weights is the caller's job.

        `local_experts` changes, what was received stays valid, but earlier routings can't be used any more (`dispatch`
        and `combine` raise `ClosedError`), nor may CUDA graphs that were captured before be replayed. The handle's
        memory stays: a placement may have as many experts in all, and on a rank (unless there is `max_recv_rows`), as
        the one it was made with. ``rebalance([0] * num_experts, size, num_physical=...)`` is one to begin with.

        Raises:
            ConfigError: it doesn't fit, a split operation is unfinished, or a graph is being captured. MismatchError:
            ranks passed different ones.
        """
        where = f"rank {self.rank}: set_placement"
        config = self._calls.checked(self._replaced, where, placement)
        self._turns.require_finished("set_placement")
        barrier = self._barrier(f"set_placement({self._first_name}, {config.placement_text})")

        def change() -> str:
            # Behind the barrier all ranks have read the counts that were exchanged, which now get another shape. A peer
            # may send new ones before this rank is done here: they lie where nothing is read until then.
            self._turns.require_finished("set_placement")  # one that was queued before has had its turn by now
            self._runtime.run(barrier)
            self._memory.set_placement(config)
            return self._runtime.sequence  # the number of that barrier: the same on all ranks

        number = self._fifo.call(change, False, barrier.text)
        self._place(config, f"{self._first_name} placed by {number}")

    def _replaced(self, where: str, placement: Any) -> Config:
        self._calls._check_open(where)
        if self._runtime.target.stream.is_capturing():
            raise ConfigError(f"{where}: wanted a call outside of a capture, got one during it")
        return self.config.with_placement(where, placement)
