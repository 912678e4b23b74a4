"""What ``split=True`` returns: an operation that has sent, and receives when it is finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Split:
    """Half of a dispatch or combine: whatever runs before `finish` overlaps with the peers' sending."""

    def __init__(self, receive: Callable[[], Any], text: str):
        self._receive: Callable[[], Any] | None = receive
        self._result: Any = None
        self.text = text

    def finish(self) -> Any:
        """Receives, and returns what the call would have returned without ``split=True``. Again: the same result.

        Every rank finishes before its next dispatch or combine on this handle. Raises what went wrong meanwhile.
        """
        if self._receive is not None:
            receive, self._receive = self._receive, None
            self._result = receive()
        return self._result
