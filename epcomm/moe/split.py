"""What ``split=True`` returns: an operation that has sent, and receives when it is finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Split:
    """Half of a dispatch or combine: whatever runs before `finish` overlaps with the peers' sending.

    Attributes: ``text``; ``expected``: of a dispatch into a block whose shape is known before its rows, the `Received`
    that `finish` will return (its ``rows_in_block()`` can be handed on, but is undefined until then); else None.
    """

    def __init__(self, receive: Callable[[], Any], text: str, expected: Any = None):
        self._receive: Callable[[], Any] | None = receive
        self._result: Any = None
        self._error: BaseException | None = None
        self.text, self.expected = text, expected

    def finish(self) -> Any:
        """Receives, and returns what the call would have returned without ``split=True``. Again: the same.

        Every rank finishes before its next dispatch or combine on this handle. Raises what went wrong meanwhile, and
        `ClosedError` after a reset.
        """
        if self._receive is not None:
            receive, self._receive = self._receive, None
            try:
                self._result = receive()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        return self._result

    def abandon(self, error: BaseException) -> None:
        """For the handle: there is nothing to receive any more; lets go of what it holds."""
        if self._receive is not None:
            self._receive, self._error, self.expected = None, error, None
