"""The change of a session from one worker to another: the parts that the other one is given, and a move that waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from skyproxy.errors import ConfigurationError
from skyproxy.protocol.messages import Welcome
from skyproxy.session.batch_log import BatchLog
from skyproxy.session.restoring import NewSession
from skyproxy.session.waiters import Waiter
from skyproxy.transport.base import Transport

_PARTS = 3
"""Parts that another worker is given: the operations, the bulk connection, and the uploads that it needs."""


OpenAnew = Callable[[str, threading.Event], NewSession]
"""Opens a session on another worker, or on the same one after its restart: `open_anew(reason, stop)`. It raises
SessionLostError where none is to be had."""

Bring = Callable[[str, str, int], object]
"""Copies a snapshot to where another worker finds it, unless it does so already: `bring(name, number, sequence)`."""


class Handover:
    """A session's change to another worker, which is complete once that one has all parts of it.

    Attributes:
        is_complete: whether it has.
        moved: set when it is complete; None where nobody asked for the change.
    """

    def __init__(self, on_complete: Callable[[Handover], object], moved: Waiter | None = None) -> None:
        """Begin without any part.

        Args:
            on_complete: called with this when the last part is there.
            moved: see the attribute.
        """
        self.is_complete = False
        self.moved = moved
        self._on_complete = on_complete
        self._missing = _PARTS
        self._lock = threading.Lock()

    def note_part(self) -> None:
        """Take note that the other worker has one of the parts; three threads see to one each."""
        with self._lock:
            self._missing -= 1
            is_complete = self._missing == 0
        if is_complete:
            self.is_complete = True
            self._on_complete(self)


class Fresh(NamedTuple):
    """A connection in place of one that broke.

    Attributes:
        link: the connection.
        welcome: what the worker said to it.
        start: where it belongs to a new session, which was restored: the batch of the snapshot; else None.
        handover: the change that it is a part of, where `start` is given.
        recoveries: how many there were when it was made, where `start` is given.
    """

    link: Transport
    welcome: Welcome
    start: int | None = None
    handover: Handover | None = None
    recoveries: int = 0

    @classmethod
    def pair(cls, opened: NewSession, start: int, handover: Handover) -> tuple[Fresh, Fresh]:
        """Return the operations and the bulk connection of a session that was restored."""
        welcome = opened.welcome
        return cls(opened.operations, welcome, start, handover), cls(opened.bulk, welcome, start, handover)


class PreparedMove(NamedTuple):
    """A session on another worker that is ready to go on with this one.

    Attributes:
        opened: its connections.
        start: the batch of the snapshot that was loaded there.
        on_moved: called before anything is sent there.
        moved: set when all is there.
    """

    opened: NewSession
    start: int
    on_moved: Callable[[], object]
    moved: Waiter

    def can_be_made(self, log: BatchLog) -> bool:
        """Return whether all that came since the snapshot can be done there, too; if not, end it and say why."""
        hole = log.hole_after(self.start)
        if self.start in log.starts() and hole is None:
            return True
        self.opened.close()
        reason = hole.reason if hole is not None else "more was done than SKYPROXY_MAX_LOG_BYTES allows"
        self.moved.fail(
            ConfigurationError(
                f"the session was not moved: since its snapshot {reason}, which cannot be done again. It goes on where "
                "it was; try again."
            )
        )
        return False
