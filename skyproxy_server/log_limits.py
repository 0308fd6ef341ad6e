"""A bound on the log lines that strangers can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from skyproxy_server import audit

_BURST = 50
_PERIOD_SECONDS = 10.0
_MOST_KINDS = 1024


class RepetitionFilter(logging.Filter):
    """Lets through a number of lines of one kind in a period, and says how many it held back.

    A kind is a message before its arguments are put in, so that what a peer sends cannot make new ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing seen.

        Args:
            clock: tells seconds.
        """
        super().__init__()
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown; the first one of a new period says what the last one held back.

        The audit's lines always are: each has a token's name, and strangers cause none.
        """
        if record.name == audit.NAME:
            return True
        kind, now = str(record.msg), self._clock()
        began, count = self._seen.get(kind, (now, 0))
        if now - began >= _PERIOD_SECONDS:
            held = count - _BURST
            if held > 0:
                record.msg, record.args = f"{record.getMessage()} (and {held} more like it before)", ()
            began, count = now, 0
        if len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = began, count + 1
        return count < _BURST
