"""The thread of a worker that keeps its word on named sessions to other workers of its volume, and deletes what has
expired there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from skyproxy.errors import SnapshotError
from skyproxy.settings import Settings
from skyproxy.snapshots.folder import SnapshotFolder
from skyproxy.snapshots.stores import FileStore
from skyproxy_server.named_sessions import NamedSessions
from skyproxy_server.saved_sessions import saved_sessions
from skyproxy_server.snapshots.leases import BEATS, Loss, NameLeases
from skyproxy_server.snapshots.listing import list_rows

logger = logging.getLogger("skyproxy.server")

_SWEEP_SECONDS = 3600.0
_END_SECONDS = 5.0
"""The time that a volume has to take the worker's goodbye."""


class NameKeeper:
    """Gives signs of life while the worker has named sessions, ends what another worker has taken, and sweeps.

    Args:
        root: the worker's place for snapshots.
        names: the worker's named sessions.
        settings: how soon, and how long what was saved is kept.

    Attributes:
        leases: of the worker.
    """

    def __init__(self, root: FileStore, names: NamedSessions, settings: Settings) -> None:
        self.leases = NameLeases(root, settings.name_lease_seconds)
        self._root = root
        self._names = names
        self._kept_days = settings.saved_session_days
        self._due = threading.Event()
        self._is_over = False
        self._has_failed = False
        self._swept_at = time.monotonic()  # not at once: a worker that starts has other things to do
        self._expired: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._run, name="skyproxy-names", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._names.leases, self._names.on_gone = self.leases, self._due.set
        self._thread.start()

    def end(self) -> None:
        """Let go of all; wait for it, but not for a volume that hangs."""
        self._is_over = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        while not self._is_over:
            self._try(self.tend)
            if time.monotonic() - self._swept_at >= _SWEEP_SECONDS:
                self._swept_at = time.monotonic()
                self._try(self.sweep)
            self._due.wait(self.leases.seconds / BEATS)
            self._due.clear()
        self._try(self.leases.end)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, SnapshotError) as error:
            if not self._has_failed:
                logger.warning("the volume of snapshots cannot be used for named sessions now: %s", error)
            self._has_failed = True
        else:
            self._has_failed = False

    def tend(self) -> None:
        """Let go of what is no longer here, give a sign of life for the rest, and end what is elsewhere.

        Raises:
            OSError: the volume cannot be read or written.
        """
        for owner, name in self.leases.names():
            if not self._names.has(owner, name):
                self.leases.drop(owner, name)
        if self.leases.names():
            self.leases.beat()
            for loss in self.leases.losses():
                self._lose(loss)

    def _lose(self, loss: Loss) -> None:
        reason = (
            f"the session {loss.name!r} is used at another worker of the same volume now ({loss.lease.where}), and "
            "what it had here is gone"
        )
        if self._names.lose(loss.owner, loss.name, loss.lease.tag, reason):
            logger.warning("%s", reason)

    def sweep(self) -> None:
        """Delete the saved sessions of all tokens that have expired, and had the last time: a clock may be wrong for a
        while. And the signs of workers that have ended.

        Raises:
            OSError: the volume cannot be read.
        """
        expired: set[tuple[str, str]] = set()
        for owner in self._root.places():
            place = self._root.child(owner)
            for one in saved_sessions(list_rows(place), self._kept_days):
                if not one.is_expired:
                    continue
                expired.add((owner, one.place))
                if (owner, one.place) in self._expired:
                    logger.info("the saved session %r has expired, and is deleted", one.name)
                    with suppress(OSError):
                        SnapshotFolder(place.child(one.place)).delete("")
        self._expired = expired
        self.leases.clear_away()
