"""The line that tells people of connections that are broken."""

from __future__ import annotations

import threading
import time

from skyproxy.errors import say

_QUIET_SECONDS = 1.0
"""An outage that is over sooner is not worth a line."""


class Outage:
    """The one line that tells people of a broken session, for all its connections.

    Attributes:
        patience_seconds: how long somebody will try.
    """

    def __init__(self, where: str, patience_seconds: float) -> None:
        """Make the outage line of one session.

        Args:
            where: the worker's address.
            patience_seconds: how long somebody will try.
        """
        self._where = where
        self.patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._broken = 0
        self._began = 0.0
        self._timer: threading.Timer | None = None
        self._was_told = False

    @property
    def is_going_on(self) -> bool:
        """True if any connection is broken now."""
        return self._broken > 0

    def begin(self, reason: str) -> None:
        """Count a connection that broke; tell people, unless it is back soon."""
        with self._lock:
            self._broken += 1
            if self._broken == 1:
                self._began, self._was_told = time.monotonic(), False
                self._timer = threading.Timer(_QUIET_SECONDS, self._tell, (reason,))
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Count a connection that is back, or abandoned."""
        with self._lock:
            self._broken -= 1
            if self._broken or self._timer is None:
                return
            self._timer.cancel()
            self._timer = None
            if self._was_told:
                say(f"connected again after {time.monotonic() - self._began:.1f} s; nothing was lost.")

    def give_up(self) -> None:
        """Say nothing more: the error says it."""
        with self._lock:
            self._was_told = False
            if self._timer is not None:
                self._timer.cancel()

    def _tell(self, reason: str) -> None:
        with self._lock:
            if self._broken and self._timer is not None:
                self._was_told = True
                say(
                    f"the connection to {self._where} is broken ({reason.rstrip('.')}). Trying to restore it for up "
                    f"to {self.patience_seconds:g} s; Ctrl-C ends a wait, and cancels what is queued."
                )
