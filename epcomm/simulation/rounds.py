"""Regular algorithms in rounds, for worlds of any size: max-plus arithmetic on whole arrays of ranks.

A round is a set of messages that are sent at once, those of one rank one after the other. Messages share the links that
they have in common evenly. A rank goes on to the next round when it has sent its own and has got those for it; ranks
that nothing holds back run ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epcomm.errors import ConfigError
from epcomm.simulation.costs import BYTES_PER_MICROSECOND, Costs
from epcomm.simulation.network import NO_LINK, Network

#: relative difference of times that are the same but for rounding
_SAME = 1e-11


@dataclass(frozen=True)
class Round:
    """At least one message, from `src` to `dst`, ranks, int64 [messages] each; none from a rank to itself.

    Each carries `share` of the collective's unit, in `parts` steps of its sender. `forwards`: the step that receives
    one of them is the one that sends in the next round; else receiving is a step of its own. `is_sum`: they are partial
    sums. `repeat`: so many such rounds follow one another.
    """

    src: np.ndarray
    dst: np.ndarray
    share: float
    parts: int = 1
    forwards: bool = False
    is_sum: bool = False
    repeat: int = 1

    def num_bytes(self, unit: float, wide_sums: bool) -> float:
        """Bytes of one message, with `unit` bytes in the collective's unit."""
        return unit * self.share * (2.0 if wide_sums and self.is_sum else 1.0)


@dataclass(frozen=True)
class _Work:
    """What a round costs: µs per message until its last byte left, and its latency; per rank its sending, receiving."""

    round: Round
    transfer: np.ndarray
    latency: np.ndarray
    sending: np.ndarray  # a rank's program, with fixed costs
    receiving: np.ndarray  # the same, without what the next round's sending includes
    last: np.ndarray  # what that is, should there be no next round
    link_time: np.ndarray


class Schedule:
    """Rounds on a network: the messages' ways are found once, for any number of bytes."""

    def __init__(self, rounds: Sequence[Round], network: Network):
        self.rounds, self.network = rounds, network
        self._routes = [network.routes(each.src, each.dst) for each in rounds]

    def times(
        self,
        num_bytes: float,
        costs: Costs | None = None,
        *,
        channels: int = 1,
        pieces: int = 1,
        wide_sums: bool = False,
    ) -> np.ndarray:
        """When each rank is done, µs, float64 [num_ranks], with `num_bytes` in the collective's unit.

        `channels` programs of a rank share each message. `pieces` follow one another: the first one goes through all
        rounds, each later one adds what the busiest rank or link does in all of them. Of a repeated round only so many
        repetitions are computed as it takes to see their period: max-plus systems have one.
        """
        if channels < 1 or pieces < 1:
            raise ConfigError(f"schedule: wanted channels and pieces >= 1, got {channels} and {pieces}")
        costs, ranks = costs or Costs(), self.network.num_ranks
        time, last = np.full(ranks, costs.launch), np.zeros(ranks)
        busy_links, busy_ranks = np.zeros(len(self.network.bandwidth)), np.zeros(ranks)
        for number, each in enumerate(self.rounds):
            work = self._work(number, each.num_bytes(num_bytes / pieces, wide_sums), costs, channels)
            time = _repeated(time, work)
            busy_links += each.repeat * work.link_time
            busy_ranks += each.repeat * (work.sending + work.receiving)
            last = work.last
        return time + last + (pieces - 1) * max(busy_links.max(initial=0.0), busy_ranks.max(initial=0.0))

    def _work(self, number: int, num_bytes: float, costs: Costs, channels: int) -> _Work:
        """Of a round whose messages have so many bytes."""
        round, routes = self.rounds[number], self._routes[number]
        rates = self.network.bandwidth * BYTES_PER_MICROSECOND * costs.efficiency
        used = routes.paths != NO_LINK
        link_time = np.bincount(routes.paths[used], minlength=len(rates)) * num_bytes / rates
        moving, overhead = costs.moving(num_bytes) / channels, costs.step * round.parts
        alone = np.maximum(num_bytes / rates[routes.paths[:, 0]], moving) + overhead
        sending = np.bincount(round.src, alone, minlength=self.network.num_ranks)
        shared = np.where(used, link_time[routes.paths], 0.0).max(axis=1) + overhead
        transfer = np.maximum(shared, sending[round.src])
        np.maximum.at(sending, round.src, transfer)
        num_received = np.bincount(round.dst, minlength=self.network.num_ranks)
        forwarded = np.minimum(num_received, 1) * round.forwards
        receiving, last = (count * (overhead + moving) for count in (num_received - forwarded, forwarded))
        return _Work(round, transfer, routes.latencies(costs), sending, receiving, last, link_time)


def _repeated(time: np.ndarray, work: _Work) -> np.ndarray:
    """The ranks' times after a round and its repetitions.

    Once all ranks have taken the same time since some repetition, they will again in as many more. The repetition to
    compare with moves on in steps that double, as in Brent's search for cycles.
    """
    left, since, anchor, window = work.round.repeat, 0, time, 1
    while left:
        time = _after(time, work)
        left, since = left - 1, since + 1
        taken = time - anchor
        if np.ptp(taken) <= _SAME * taken.max():
            periods, left = divmod(left, since)
            time = time + periods * taken
            since, anchor, window = 0, time, left + 1  # no more of them fit
        elif since == window:
            since, anchor, window = 0, time, 2 * window
    return time


def _after(time: np.ndarray, work: _Work) -> np.ndarray:
    sent = time[work.round.src] + work.transfer
    later = time + work.sending
    np.maximum.at(later, work.round.dst, sent + work.latency)
    return later + work.receiving
