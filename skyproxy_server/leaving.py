"""The end of a worker that is told to end: its clients are told first, and take last snapshots of their sessions."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from skyproxy_server.listener import SessionHost

logger = logging.getLogger("skyproxy.server")

LEAVING = "leaving"
"""In the load of a `Pong` that nobody asked for: from a worker, the milliseconds until it ends; from a client, 1 where
its worker is to wait for it, 0 where it need not."""
_REACTION_SECONDS = 3.0
"""The time in which a client says that it takes a snapshot; who says nothing is not waited for."""
_LOOK_SECONDS = 0.02


class EndNotice:
    """One session's leave: whether its client was told that the worker ends, and wants to be waited for."""

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._wish: bool | None = None

    def ask(self) -> None:
        """Take note that the client is told."""
        self._asked_at, self._wish = time.monotonic(), None

    def on_load(self, load: Mapping[str, int]) -> None:
        """Hear what the client says of itself; nothing, unless it was asked."""
        if self._asked_at is not None and LEAVING in load:
            self._wish = bool(load[LEAVING])

    @property
    def is_awaited(self) -> bool:
        """True if the client is to be waited for, as long as it is there."""
        if self._asked_at is None:
            return False
        if self._wish is None:
            return time.monotonic() - self._asked_at < _REACTION_SECONDS
        return self._wish


class LeavingHost(SessionHost, Protocol):
    """The sessions of a worker that may end and be suspended."""

    def announce_leaving(self, seconds: float) -> int:
        """Tell the clients that the worker ends after so many seconds; return how many were told."""

    def leaving(self) -> int:
        """Return how many of them are still to be waited for."""

    def staying(self) -> int:
        """Return how many sessions have a connection now."""

    def detached(self) -> int:
        """Return how many sessions have none, and are kept for their clients."""

    def named_sessions(self) -> int:
        """Return how many named sessions are kept that cannot be saved."""

    def save_named(self) -> int:
        """Save the named sessions that no client uses, and were not saved before; return how many."""

    def close(self) -> None:
        """End what it keeps."""


class Stop(threading.Event):
    """Set when the worker is to end.

    Attributes:
        suspends: whether its sessions are to be suspended before.
        is_final: whether nobody can come back to it, so that there is nothing to suspend its sessions for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.suspends = self.is_final = False

    def forgo(self) -> None:
        """Take note that it is ended for good, also while its sessions are being suspended."""
        self.is_final = True

    def suspend(self) -> None:
        """End, and suspend the sessions before."""
        self.suspends = True
        self.set()


def is_idle(host: LeavingHost, activity: Mapping[str, object], seconds: float) -> bool:
    """Return whether nothing has been done for so long, and nothing would be lost if the worker ended.

    Args:
        host: with the sessions.
        activity: what the worker does, its jobs counted.
        seconds: how long.
    """
    idle, calls = activity["idle_seconds"], activity["calls_running"]
    assert isinstance(idle, int | float)
    return idle >= seconds and not calls and not host.detached() and not host.named_sessions()


def take_leave(
    host: LeavingHost,
    seconds: float,
    report_to: Path | None,
    clock: Callable[[], float],
    is_final: Callable[[], bool] = lambda: False,
) -> None:
    """Have the clients suspend their sessions, and wait for them; say what became of it.

    Args:
        host: takes no new sessions any more.
        seconds: the longest time for it.
        report_to: a file for what became of the sessions; None writes none.
        clock: tells the time.
        is_final: whether nobody can come back, which may turn out meanwhile; then nobody is waited for.
    """
    without = host.detached()
    told = host.announce_leaving(seconds)
    until = clock() + seconds
    saved = host.save_named()
    while host.leaving() and clock() < until and not is_final():
        time.sleep(_LOOK_SECONDS)
    if not is_final():
        saved += host.save_named()  # of clients that have said goodbye meanwhile
    left = min(host.staying(), told)
    words = f"{told - left} sessions are suspended" if told - left != 1 else "1 session is suspended"
    if saved:
        words += f", {saved} saved by name"
    named = host.named_sessions()
    lost = left + without + named
    if lost:
        reasons = {"whose clients took no snapshot in time": left, "without a connection": without, "by name": named}
        words += "; lost: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
    logger.info("%s", words)
    if report_to is not None:
        content = json.dumps({"suspended": told - left, "lost": lost, "text": words})
        draft = report_to.with_name(report_to.name + ".partial")
        try:
            with os.fdopen(os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as stream:
                stream.write(content + "\n")
            draft.replace(report_to)
        except OSError as error:
            logger.error("%s cannot be written: %s", report_to, error)
