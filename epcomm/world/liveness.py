"""Who is still there: the ends of peers' processes, of this host by pidfd, of other hosts by their links."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from epcomm.device import control
from epcomm.world import monitor
from epcomm.world.abort import AbortRegion
from epcomm.world.hub import Hub


@dataclass
class _Listener:
    """What a rank does with what it hears. `generation` is the rank's; None once it has left: it hears no more."""

    abort: AbortRegion
    is_leader: bool
    generation: Callable[[], int | None]

    def lost(self, rank: int) -> None:
        """A rank of another host is gone."""
        generation = self.generation()
        if generation is not None:
            tell = self.abort.relay if self.is_leader else self.abort.tell_self
            tell(generation, control.PEER_LOST, rank)

    def ended(self, rank: int) -> bool:
        """The process of a rank of this host has ended."""
        generation = self.generation()
        if generation is not None:
            self.abort.tell_self(generation, control.PEER_LOST, rank)
        return False

    def failed(self, rank: int, generation: int, reason: int, text: bytes) -> None:
        self.abort.relay(generation, reason, rank, text)

    def text_of(self, rank: int, fingerprint: int) -> str | None:
        return self.abort.text_of(rank, fingerprint)


def watch_peers(
    abort: AbortRegion, hub: Hub, pidfds: Mapping[int, int], generation: Callable[[], int | None]
) -> Callable[[], None]:
    """Raises abort words for what becomes of peers, until the returned function is called, which says goodbye.

    `pidfds` are those of this host's other ranks, by rank; they are closed at the end.
    """
    listener = _Listener(abort, hub.rank in hub.leaders, generation)
    for rank, pidfd in pidfds.items():
        monitor.watch(pidfd, partial(listener.ended, rank))
    hub.links.listen(listener)

    def stop() -> None:
        monitor.forget(pidfds.values())
        for pidfd in pidfds.values():
            os.close(pidfd)
        hub.links.leave()

    return stop
