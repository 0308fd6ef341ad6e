"""The worker's own log: lines on standard error, one a message, whatever peers put into them."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

from skyproxy.errors import visible
from skyproxy_server.log_limits import RepetitionFilter

LOG_TAIL: deque[str] = deque(maxlen=100)
"""The latest lines, for the web view."""
_MAX_TAIL_CHARACTERS = 300
_MAX_CHARACTERS = 4000
"""The most of one message that is written: peers choose what is in it."""
if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler


class OneLineFormatter(logging.Formatter):
    """Escapes control characters of messages: what a peer sent must not look like a line of ours."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._second = -1, ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the time of a record; that of the last one, where it is of the same second."""
        second, text = self._second
        if second != int(record.created):
            second, text = int(record.created), time.strftime(self.default_time_format, time.localtime(record.created))
            self._second = second, text
        return f"{text},{int(record.msecs):03d}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = record.message
        if len(text) > _MAX_CHARACTERS:
            text = f"{text[:_MAX_CHARACTERS]} [{len(text) - _MAX_CHARACTERS} more characters]"
        record.message = visible(text).replace("\n", "\\n")
        return super().formatMessage(record)


class _HandlerWithTail(_StreamHandler):
    """Writes lines, and keeps the latest of them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            LOG_TAIL.append(line[:_MAX_TAIL_CHARACTERS])
            self.stream.write(line + self.terminator)
            self.flush()
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)


def log_to_stderr(level: str) -> None:
    """Send the worker's own log to standard error; not the root logger's, which clients' functions have here.

    Args:
        level: how much.
    """
    handler = _HandlerWithTail(sys.stderr)
    handler.setFormatter(OneLineFormatter())
    handler.addFilter(RepetitionFilter())
    own = logging.getLogger("skyproxy")
    own.handlers[:] = [handler]
    own.propagate = False
    own.setLevel(level)
