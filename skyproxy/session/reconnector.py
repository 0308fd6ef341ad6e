"""Opens the connections of a session anew when they break: to the worker that keeps it, or to another one."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from skyproxy.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectError,
    SessionLostError,
    VersionMismatchError,
)
from skyproxy.protocol.connection import Connection
from skyproxy.protocol.messages import OPERATIONS, Goodbye, Welcome
from skyproxy.session.handover import Fresh
from skyproxy.session.outage import Outage
from skyproxy.transport.base import Transport

logger = logging.getLogger("skyproxy.session")

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0
_SPREAD = (0.5, 1.5)
"""The clients of one network come back at different moments."""
_REFUSALS = 3
"""Refused connections in a row after which nothing listens there any more; a tunnel that is restarted takes less."""
_FINAL = (AuthenticationError, VersionMismatchError, ConfigurationError)
"""Refusals that another attempt would meet, too."""
_TRY_LATER = frozenset({"", "too-many-sessions"})
"""The reasons of refusals that another attempt may not meet."""
_WORKER_ENDED = frozenset({"shutdown", "crashed"})
"""The reasons of a worker's goodbye for which a protected session goes on with another one."""


class Reopen(Protocol):
    """Opens one more connection of a session; `received` counts the answers that came on the one before."""

    def __call__(self, role: str, received: int) -> tuple[Transport, Welcome]:
        """Open the connection.

        Raises:
            ConnectError: it did not come about.
        """


class Recovery(Protocol):
    """Has another worker go on with a session whose worker is gone; see `session.protection`.

    Attributes:
        patience_seconds: how long to try to reach a worker that does not refuse before another one is asked for.
    """

    patience_seconds: float

    @property
    def is_leaving(self) -> bool:
        """True if another worker is ready, and waits for the operations connection to this one to be replaced."""

    @property
    def is_suspended(self) -> bool:
        """True if the session is without a worker now, and needs none."""

    def leave(self, abandon: Callable[[], object]) -> tuple[Fresh, Fresh] | None:
        """Return the operations and the bulk connection to a worker that is ready; None where there is none.

        Args:
            abandon: called before that is where the session is.
        """

    def recover(self, reason: str, stop: threading.Event) -> tuple[Fresh, Fresh]:
        """Return the operations and the bulk connection of a session that was restored.

        Raises:
            SessionLostError: that is not possible.
        """

    def replay(self, fresh: Fresh, before: Connection) -> None:
        """Send what the snapshot lacks of what had left on the connection before, and take note of it there."""

    def cut_bulk(self, recoveries: int) -> object:
        """Have the thread that reads the bulk connection notice that its worker is gone; see `cut_older`."""

    def cut_operations(self, recoveries: int) -> object:
        """The same for the operations connection."""


class Reconnector:
    """Opens a session's connections anew, again and again, while there is hope.

    Attributes:
        outage: what people are told.
        explain_end: how the worker's process ended; None while it lives, or where nobody knows.
        resumes: whether the worker keeps the session when a connection breaks.
        recovery: has another worker go on where this one is gone; None where the session ends then.
        recoveries: how often that was done.
    """

    def __init__(self, reopen: Reopen, where: str, patience_seconds: float, *, resumes: bool = True) -> None:
        """Make the reconnector of one session.

        Args:
            reopen: opens a connection.
            where: the worker's address, for people.
            patience_seconds: how long to try.
            resumes: whether the worker keeps the session when a connection breaks.
        """
        self.resumes = resumes
        self.recovery: Recovery | None = None
        self.recoveries = 0
        self._abandoned = -1
        self._restored_bulk: Fresh | None = None
        self._recovered = threading.Condition()
        self.outage = Outage(where, patience_seconds)
        self.explain_end: Callable[[], tuple[str, str] | None] = lambda: None
        self._reopen = reopen
        self.patience_seconds = patience_seconds
        self._stop = threading.Event()

    @property
    def is_active(self) -> bool:
        """True if a connection that breaks is replaced at all."""
        return self.resumes or self.recovery is not None

    def may_try_again(self, error: ConnectError | SessionLostError) -> bool:
        """Tell whether a connection that ended in this way, or did not come about, is worth another attempt."""
        is_final = isinstance(error, _FINAL) or getattr(error, "code_name", "") not in _TRY_LATER
        return self.is_active and not is_final

    def is_behind(self, role: str, recoveries: int) -> bool:
        """Return whether a connection that was made after so many recoveries is to be left for another worker."""
        recovery = self.recovery
        is_leaving = recovery is not None and role == OPERATIONS and recovery.is_leaving
        return self.recoveries > recoveries or is_leaving

    def outlives(self, goodbye: Goodbye | None, recoveries: int) -> bool:
        """Return whether the session goes on although the worker has said this on a connection, if anything.

        Args:
            goodbye: what it said.
            recoveries: how many there had been when that connection was made.
        """
        if goodbye is None or self._abandoned >= recoveries:
            return True
        recovery = self.recovery
        if recovery is None:
            return False
        # The worker that the session leaves may end it there before all connections are cut.
        return recovery.is_leaving or recovery.is_suspended or goodbye.code_name in _WORKER_ENDED

    def stop(self) -> None:
        """End every attempt."""
        self._stop.set()
        with self._recovered:
            self._recovered.notify_all()

    def connect(self, role: str, link: Transport, recoveries: int, reason: str) -> Fresh:
        """Return a connection in place of one that broke.

        Args:
            role: its kind.
            link: the broken one.
            recoveries: how many there had been when that one was made.
            reason: why it broke.

        Raises:
            SessionLostError: the worker is gone, or has no such session any more, or did not answer in time.
        """
        self.outage.begin(reason)
        try:
            try:
                recovery = self.recovery
                if recovery is not None and recovery.is_suspended:
                    self.outage.give_up()  # this is not an outage
                    raise SessionLostError(reason)
                left = self._leave(role, recoveries)
                if left is not None:
                    return left
                if not self.resumes or link.connection.goodbye is not None:
                    raise SessionLostError(reason)
                return self._connect(role, link.connection.answers, recoveries, reason)
            except SessionLostError as lost:
                if self.recovery is None or self._stop.is_set():
                    raise
                return self._recover(self.recovery, role, recoveries, str(lost).rstrip("."))
        except BaseException:
            self.outage.give_up()
            raise
        finally:
            self.outage.end()

    def _leave(self, role: str, recoveries: int) -> Fresh | None:
        """Go on with the worker that a move has prepared, if there is one."""
        recovery = self.recovery
        if recovery is None or role != OPERATIONS:
            return None
        left = recovery.leave(lambda: self._abandon(recoveries))
        return self._hand_over(recovery, recoveries, left) if left is not None else None

    def _recover(self, recovery: Recovery, role: str, recoveries: int, reason: str) -> Fresh:
        """Go on with another worker: the thread of the operations sees to it, that of the bulk connection waits."""
        self._abandon(recoveries)
        if role != OPERATIONS:
            recovery.cut_operations(recoveries)
            return self._wait_for_recovery(recoveries, reason)
        recovery.cut_bulk(recoveries)
        return self._hand_over(recovery, recoveries, recovery.recover(reason, self._stop))

    def _abandon(self, recoveries: int) -> None:
        """Make no connection anew to a session that is as old as this."""
        self._abandoned = max(self._abandoned, recoveries)

    def _hand_over(self, recovery: Recovery, recoveries: int, found: tuple[Fresh, Fresh]) -> Fresh:
        operations, bulk = found
        with self._recovered:
            self.recoveries = number = recoveries + 1
            before, self._restored_bulk = self._restored_bulk, bulk._replace(recoveries=number)
            self._recovered.notify_all()
        recovery.cut_bulk(recoveries)  # one that came back meanwhile, to the session before
        if before is not None:  # nobody came for it
            before.link.close()
        return operations._replace(recoveries=number)

    def _wait_for_recovery(self, recoveries: int, reason: str) -> Fresh:
        with self._recovered:
            while self._restored_bulk is None or self.recoveries <= recoveries:
                if self._stop.is_set():
                    raise SessionLostError(reason)
                self._recovered.wait()
            fresh, self._restored_bulk = self._restored_bulk, None
            return fresh

    def _connect(self, role: str, received: int, recoveries: int, reason: str) -> Fresh:
        patience_seconds = self.patience_seconds
        if self.recovery is not None:
            patience_seconds = min(patience_seconds, self.recovery.patience_seconds)
        until = time.monotonic() + patience_seconds
        pause, refusals = _FIRST_PAUSE_SECONDS, 0
        while not self._stop.is_set():
            if self._abandoned >= recoveries or self.explain_end() is not None:
                raise SessionLostError(reason)
            try:
                fresh = Fresh(*self._reopen(role, received))
                if self._abandoned < recoveries:
                    return fresh
                fresh.link.cut()  # the session is elsewhere by now, or this may be the connection to that place already
                continue
            except _FINAL as problem:
                raise SessionLostError(
                    f"{reason}; and the worker no longer lets this client in: {problem}"
                ) from problem
            except ConnectError as problem:
                refusals = refusals + 1 if isinstance(problem.__cause__, ConnectionRefusedError) else 0
                if refusals >= _REFUSALS:
                    raise SessionLostError(f"{reason}; and nothing listens there any more") from problem
                if problem.code_name not in _TRY_LATER:
                    raise SessionLostError(f"{reason}; and then: {problem}") from problem
                if time.monotonic() >= until:
                    raise SessionLostError(
                        f"{reason}, and did not come back within {patience_seconds:g} s: {problem}"
                    ) from problem
                logger.debug("skyproxy: the %s connection is not back yet: %s", role, problem)
            self._stop.wait(pause * random.uniform(*_SPREAD))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            left = self._leave(role, recoveries)
            if left is not None:
                return left
        raise SessionLostError("the session was closed")
