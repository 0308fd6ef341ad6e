"""Attempts at what a session does on a connection beside its own two: made again where that connection breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from skyproxy.errors import ConnectError, SessionLostError
from skyproxy.interrupts import raised_by_handler

if TYPE_CHECKING:
    from skyproxy.session.session import Session

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_Result = TypeVar("_Result")


def attempt(session: Session, act: Callable[[], _Result]) -> _Result:
    """Return what `act` gives; it is called anew where it meets a connection that is broken, and the session goes on.

    Args:
        session: whose worker is asked.
        act: opens a connection, and may be called any number of times.

    Raises:
        ConnectError, SessionLostError: the session is over, would end with such a connection, has tried for as long as
            it does with its own, or the worker has no room for this connection.
    """
    until, pause = time.monotonic() + session.settings.reconnect_seconds, _FIRST_PAUSE_SECONDS
    was_there = False
    while True:
        try:
            return act()
        except (ConnectError, SessionLostError) as error:
            if raised_by_handler(error):
                raise
            session.check()
            # A worker makes room when it notices that the connection before is broken; for a first one nobody does.
            has_no_room = bool(getattr(error, "code_name", "")) and not was_there
            if has_no_room or not session.outlives(error) or time.monotonic() >= until:
                raise
            was_there = True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
