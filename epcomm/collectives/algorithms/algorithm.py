"""What an algorithm is: a program in the language for each collective that it can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from epcomm.collectives.language import Collective, Trace
from epcomm.collectives.plan import FIFO_DEPTH, Plan
from epcomm.errors import ConfigError
from epcomm.kernels.protocol.lines import SIMPLE


@dataclass(frozen=True)
class Form:
    """How an algorithm does one collective.

    `program(collective, **options)` is run inside of a `Trace`; `num_chunks(num_ranks)` is the collective's unit that
    it is written for. It raises ConfigError for numbers of ranks that it can't serve.
    """

    program: Callable[..., None]
    num_chunks: Callable[[int], int] = lambda num_ranks: 1
    in_place: bool = True


@dataclass(frozen=True)
class Algorithm:
    """An algorithm by the collectives it can do; `options` are names of arguments that its programs take."""

    name: str
    forms: Mapping[str, Form]
    options: tuple[str, ...] = ()

    def plan(
        self,
        collective: str,
        num_ranks: int,
        *,
        root: int = 0,
        channels: int = 1,
        pieces: int = 1,
        fifo_depth: int = FIFO_DEPTH,
        protocol: str = SIMPLE,
        wide_sums: bool = False,
        **options: Any,
    ) -> Plan:
        """The plan of a collective among `num_ranks` ranks.

        `channels` and `pieces` multiply the number of chunks: channels work side by side, pieces follow one another
        (`Trace.plan`). `protocol`: "simple", "ll" or "ll128". `wide_sums`: see `Plan`. ConfigError if the algorithm
        doesn't do this, or not with so many ranks.
        """
        where = f"{self.name} {collective}"
        form = self.forms.get(collective)
        if form is None:
            raise ConfigError(f"{where}: {self.name} does {', '.join(self.forms)}")
        if unknown := sorted(set(options) - set(self.options)):
            known = ", ".join(self.options) or "none"
            raise ConfigError(f"{where}: unknown options {', '.join(unknown)}; {self.name} has {known}")
        if type(num_ranks) is not int or num_ranks < 1:
            raise ConfigError(f"{where}: num_ranks: wanted an integer >= 1, got {num_ranks!r}")
        wanted = Collective(collective, num_ranks, form.num_chunks(num_ranks), root)
        with Trace(where, wanted, in_place=form.in_place) as trace:
            form.program(wanted, **options)
        plan = trace.plan(channels=channels, pieces=pieces, fifo_depth=fifo_depth, protocol=protocol)
        return replace(plan, wide_sums=wide_sums)


def require_power_of_two(where: str, num_ranks: int) -> None:
    """ConfigError unless the number of ranks is a power of two."""
    if num_ranks & (num_ranks - 1):
        raise ConfigError(f"{where}: num_ranks: wanted a power of two, got {num_ranks}")
