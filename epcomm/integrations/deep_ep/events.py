"""DeepEP's events: how a caller orders what it computes and what was sent.

epcomm's operations run on the current stream (CUDA), or are done when the call returns (CPU). So an event says little
more than a stream's own: it has happened on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class EventHandle:
    """What the current stream of this device has been given so far."""

    def __init__(self) -> None:
        self._event = torch.cuda.current_stream().record_event() if torch.cuda.is_initialized() else None

    def current_stream_wait(self) -> None:
        """The current stream goes on once that is done."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


class EventOverlap:
    """An `EventHandle`, or None where there is nothing to wait for. As a context manager it waits at the end.

    Attributes: ``event``; ``extra_tensors``, which are kept alive.
    """

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors
        self.hook_after_wait: Callable[[], Any] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """The current stream waits for the event; then a registered hook runs, once."""
        if self.event is not None:
            self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """`hook_after_wait` runs at the end of the next `current_stream_wait`."""
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """For ``with event(release_handle=True):``."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *error: Any) -> None:
        self.current_stream_wait(self._releases)
        self._releases = False


def wait_for(event: EventOverlap | EventHandle | None) -> None:
    """What follows on the current stream comes after `event`."""
    if event is not None:
        event.current_stream_wait()


def event_of(is_async: bool) -> EventOverlap:
    """What a call returns: an event if it was asked not to wait."""
    return EventOverlap(EventHandle() if is_async else None)
