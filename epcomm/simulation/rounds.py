"""Regular algorithms in rounds, for worlds of any size: max-plus arithmetic on whole arrays of ranks.

A round is a set of messages that are sent at once, those of one rank one after the other. Messages share the links that
they have in common evenly. A rank goes on to the next round when it has sent its own and has got those for it; ranks
that nothing holds back run ahead. Where a rank has several programs all this holds for each of them by itself, but for
the links, which they share. Between rounds, ranks may copy what they have.

Messages may be in pieces, which go on as soon as they are there. A program does a round with all pieces before the next
one, as plans do. So three times of each program are kept: when it can go on with the first piece, when with the last
one, and when it has done the round with all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from epcomm.errors import ConfigError
from epcomm.simulation.costs import BYTES_PER_MICROSECOND, Costs
from epcomm.simulation.network import NO_LINK, Network, Routes

#: relative difference of times that are the same but for rounding
_SAME = 1e-11


@dataclass(frozen=True)
class Round:
    """At least one message, from `src` to `dst`, ranks, int64 [messages] each; none from a rank to itself.

    Each carries `share` of the collective's unit, in `parts` steps of its sender. `forwards`: the step that receives
    one of them is the one that sends in the next round; else receiving is a step of its own. `is_sum`: they are partial
    sums. `lane`: which of its sender's programs sends each message, and which of its receiver's receives it, int64
    [messages]; one program if None. `repeat`: so many such rounds follow one another. `anew`: its
    programs are its own: they wait for what they send, not for earlier rounds' last pieces.
    """

    src: np.ndarray
    dst: np.ndarray
    share: float
    parts: int = 1
    forwards: bool = False
    is_sum: bool = False
    lane: np.ndarray | None = None
    repeat: int = 1
    anew: bool = False

    def num_bytes(self, unit: float, wide_sums: bool) -> float:
        """Bytes of one message, with `unit` bytes in the collective's unit."""
        return unit * self.share * (2.0 if wide_sums and self.is_sum else 1.0)


@dataclass(frozen=True)
class Copy:
    """Each of `ranks`, int64, copies `share` of the collective's unit to a place of its own, in `parts` steps, and then
    goes on with all its programs.
    """

    ranks: np.ndarray
    share: float
    parts: int = 1


@dataclass(frozen=True)
class _Work:
    """What a round costs a piece: µs per message until its last byte left, and its latency; per program its sending,
    receiving.

    `src`, `dst`: the programs of each message, numbered lane by lane.
    """

    src: np.ndarray
    dst: np.ndarray
    repeat: int
    later_pieces: int
    transfer: np.ndarray
    latency: np.ndarray
    sending: np.ndarray  # with fixed costs
    receiving: np.ndarray  # the same, without what the next round's sending includes
    last: np.ndarray  # what that is, should there be no next round
    cycle: np.ndarray  # from one piece to the next
    link_time: np.ndarray


class Schedule:
    """Rounds on a network: the messages' ways are found once, for any number of bytes.

    `one_program`: a rank's programs take turns, on a core that runs them all.
    """

    def __init__(self, rounds: Sequence[Round | Copy], network: Network, *, one_program: bool = False):
        self.rounds, self.network = rounds, network
        self._routes = {
            number: network.routes(each.src, each.dst)
            for number, each in enumerate(rounds) if isinstance(each, Round)
        }  # fmt: skip
        lanes = [each.lane for each in rounds if isinstance(each, Round) and each.lane is not None]
        self._one_program = one_program
        self._num_lanes = 1 if one_program else 1 + max((int(lane.max()) for lane in lanes), default=0)

    def times(
        self,
        num_bytes: float,
        costs: Costs | None = None,
        *,
        channels: int = 1,
        pieces: int = 1,
        wide_sums: bool = False,
    ) -> np.ndarray:
        """When each rank is done, µs, float64 [num_ranks], with `num_bytes` in the collective's unit; none before the
        busiest link has carried all that goes through it.

        `channels` programs of a rank share each message, and `pieces` of it follow one another. Of a repeated round
        only so many repetitions are computed as it takes to see their period: max-plus systems have one.
        """
        if channels < 1 or pieces < 1:
            raise ConfigError(f"schedule: wanted channels and pieces >= 1, got {channels} and {pieces}")
        costs, unit, ranks = costs or Costs(), num_bytes / pieces, self.network.num_ranks
        times, last = np.full((3, self._num_lanes * ranks), costs.launch), np.zeros(self._num_lanes * ranks)
        busy_links = np.zeros(len(self.network.bandwidth))
        for number, each in enumerate(self.rounds):
            if isinstance(each, Copy):
                copying = np.zeros(ranks)
                copying[each.ranks] = each.parts * costs.step + costs.moving(unit * each.share) / channels
                of_ranks = np.stack([self._of_ranks(row) for row in _received(times, last, pieces)])
                times = np.tile(_received(of_ranks, copying, pieces), self._num_lanes)
                last = np.zeros_like(last)
                continue
            work = self._work(number, each, each.num_bytes(unit, wide_sums), costs, channels, pieces)
            last[work.src] = 0.0  # the steps that send in this round
            times = _received(times, last, pieces)
            if each.anew and not self._one_program:
                times[2] = costs.launch
            times = _repeated(times, work)
            busy_links += each.repeat * work.link_time
            last = work.last.copy()
        done = self._of_ranks(_received(times, last, pieces).max(axis=0))
        return np.maximum(done, costs.launch + pieces * busy_links.max(initial=0.0))

    def link_times(self, num_bytes: float, costs: Costs | None = None, *, wide_sums: bool = False) -> np.ndarray:
        """µs that each link is busy with the collective's messages, float64 [num_links]."""
        busy = np.zeros(len(self.network.bandwidth))
        for number, each in enumerate(self.rounds):
            if isinstance(each, Round):
                size = each.num_bytes(num_bytes, wide_sums)
                busy += each.repeat * self._link_time(self._routes[number], size, costs or Costs())
        return busy

    def _link_time(self, routes: Routes, num_bytes: float, costs: Costs) -> np.ndarray:
        """Of messages of so many bytes, all of them together."""
        rates = self.network.bandwidth * BYTES_PER_MICROSECOND * costs.efficiency
        used = routes.paths[routes.paths != NO_LINK]
        return np.bincount(used, minlength=len(rates)) * num_bytes / rates

    def _of_ranks(self, time: np.ndarray) -> np.ndarray:
        """When all of each rank's programs are done."""
        return time.reshape(self._num_lanes, -1).max(axis=0)

    def _work(self, number: int, round: Round, num_bytes: float, costs: Costs, channels: int, pieces: int) -> _Work:
        """Of a round whose messages have so many bytes."""
        routes, ranks, size = self._routes[number], self.network.num_ranks, self._num_lanes * self.network.num_ranks
        first = 0 if round.lane is None or self._num_lanes == 1 else round.lane * ranks
        src, dst = first + round.src, first + round.dst
        rates = self.network.bandwidth * BYTES_PER_MICROSECOND * costs.efficiency
        used = routes.paths != NO_LINK
        link_time = self._link_time(routes, num_bytes, costs)
        moving, overhead = costs.moving(num_bytes) / channels, costs.step * round.parts
        whole = num_bytes / rates[routes.paths[:, 0]]  # of all channels' parts, which queue at the first link of all
        alone = np.maximum(whole / channels, moving) + overhead
        by_itself = np.bincount(src, alone, minlength=size)
        sending = by_itself + _most(src, whole + overhead - alone, size)
        shared = np.where(used, link_time[routes.paths], 0.0).max(axis=1) + overhead
        transfer = np.maximum(shared, sending[src])
        sending = np.maximum(sending, _most(src, transfer, size))
        num_received = np.bincount(dst, minlength=size)
        forwarded = np.minimum(num_received, 1) * round.forwards
        receiving, last = (count * (overhead + moving) for count in (num_received - forwarded, forwarded))
        cycle = np.maximum(sending, by_itself + receiving)
        return _Work(
            src, dst, round.repeat, pieces - 1, transfer, routes.latencies(costs), sending, receiving, last, cycle,
            link_time,
        )  # fmt: skip


def _most(programs: np.ndarray, times: np.ndarray, size: int) -> np.ndarray:
    """The longest time of each program, 0 of those without."""
    longest = np.zeros(size)
    np.maximum.at(longest, programs, times)
    return longest


def _received(times: np.ndarray, each: np.ndarray, pieces: int) -> np.ndarray:
    """The programs' times after a step more for each piece, of so many µs; programs with 0 have none."""
    first, last, free = times
    done = np.maximum(np.maximum(first + pieces * each, last + each), free)
    return np.where(each > 0, np.stack([first + each, done, done]), times)


def _repeated(times: np.ndarray, work: _Work) -> np.ndarray:
    """The programs' times after a round and its repetitions.

    Once all have taken the same time since some repetition, they will again in as many more. The repetition to
    compare with moves on in steps that double, as in Brent's search for cycles.
    """
    left, since, anchor, window = work.repeat, 0, times, 1
    while left:
        times = _after(times, work)
        left, since = left - 1, since + 1
        taken = times - anchor
        if np.ptp(taken) <= _SAME * taken.max():
            periods, left = divmod(left, since)
            times = times + periods * taken
            since, anchor, window = 0, times, left + 1  # no more of them fit
        elif since == window:
            since, anchor, window = 0, times, 2 * window
    return times


def _after(times: np.ndarray, work: _Work) -> np.ndarray:
    first, last, free = times
    begin, later = np.maximum(first, free), work.later_pieces * work.cycle
    sent = begin + later + work.sending
    next_first, next_last = sent.copy(), np.maximum(sent, last + work.sending)
    first_sent = begin[work.src] + work.transfer
    last_sent = np.maximum(begin + later, last)[work.src] + work.transfer
    np.maximum.at(next_first, work.dst, first_sent + work.latency)
    np.maximum.at(next_last, work.dst, last_sent + work.latency)
    return np.stack([next_first, next_last, sent]) + work.receiving
