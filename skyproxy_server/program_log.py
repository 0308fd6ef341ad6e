"""The worker's own log: lines on standard error, one a message, whatever peers put into them."""

from __future__ import annotations

import logging
import sys

from skyproxy.errors import visible
from skyproxy_server.log_limits import RepetitionFilter


class OneLineFormatter(logging.Formatter):
    """Escapes control characters of messages: what a peer sent must not look like a line of ours."""

    def __init__(self, session: str = "") -> None:
        """Args:
        session: the session that this process is for, named in each line.
        """
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._prefix = f"[{session[:8]}] " if session else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = self._prefix + visible(record.message).replace("\n", "\\n")
        return super().formatMessage(record)


def log_to_stderr(level: str, session: str = "") -> None:
    """Send the worker's own log to standard error; not the root logger's, which clients' functions have here.

    Args:
        level: how much.
        session: the session that this process is for.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter(session))
    handler.addFilter(RepetitionFilter())
    own = logging.getLogger("skyproxy")
    own.handlers[:] = [handler]
    own.propagate = False
    own.setLevel(level)
