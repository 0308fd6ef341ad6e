"""Clients that say nothing any more, and whose connections nobody has ended: their machine vanished, or it sleeps."""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from skyproxy.transport.base import Transport

logger = logging.getLogger("skyproxy.server")

_LOOKS = 5
"""Looks in the time after which a client counts as silent."""
_MOST_SECONDS = 2.0


class Client(Protocol):
    """The client of a session, as its worker hears it."""

    @property
    def heard(self) -> int | None:
        """A number that changes with whatever comes from it; None where its silence says nothing."""

    def ask(self) -> None:
        """Have it answer, if it is there; never blocks."""

    def give_up(self) -> None:
        """Let go of its connections. It may come back."""


class SilenceWatch:
    """Looks again and again for clients that have said nothing for too long. It asks before it lets go of one.

    A worker that was stopped itself has heard nothing either: then all get their time anew.

    Args:
        seconds: silence after which a client's connections are cut; 0: never.
        clients: gives those of all sessions, by names that are never given twice.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        seconds: float,
        clients: Callable[[], Iterable[tuple[str, Client]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pause_seconds = min(seconds / _LOOKS, _MOST_SECONDS)
        self._seconds = seconds
        self._clients = clients
        self._clock = clock
        self._looked_at = clock()
        self._heard: dict[str, tuple[int, float]] = {}
        self._starting = threading.Lock()
        self._runs = False

    def begin(self) -> None:
        """Look on a thread, unless one looks already; it ends when there are no clients."""
        with self._starting:
            if self._runs or not self._seconds:
                return
            self._runs = True
        threading.Thread(target=self._run, name="skyproxy-silence", daemon=True).start()

    def _run(self) -> None:
        self._looked_at = self._clock()
        while True:
            time.sleep(self.pause_seconds)
            with self._starting:
                # Under the lock: a session that begins now has a thread that looks.
                if not any(True for _ in self._clients()):
                    self._runs = False
                    return
            try:
                self.look()
            except Exception:
                logger.exception("silent clients could not be looked for")

    def look(self) -> None:
        """Ask who is silent, and let go of who has been silent for too long."""
        now = self._clock()
        was_away = now - self._looked_at > self.pause_seconds + self._seconds / 2
        self._looked_at = now
        found: dict[str, tuple[int, float]] = {}
        for name, client in self._clients():
            count = client.heard
            if count is None:
                continue
            before, since = self._heard.get(name, (-1, now))
            if count != before or was_away:
                since = now
            elif now - since >= self._seconds:
                logger.info("the client of session %s has said nothing for %.0f s", name[:8], now - since)
                client.give_up()
                continue
            elif now - since >= self._seconds / 3:
                client.ask()
            found[name] = count, since
        self._heard = found


def has_hung_up(transport: Transport) -> bool:
    """Return whether the other side has ended a connection, which nobody reads; False where nobody can know."""
    if not hasattr(select, "POLLRDHUP"):
        return False
    descriptor = transport.fileno()
    if descriptor < 0:
        return transport.was_closed
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))
