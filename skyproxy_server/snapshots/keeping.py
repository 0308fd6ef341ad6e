"""The thread of a worker that keeps its word on named sessions to other workers of its volume, gives them what they ask
for, and deletes what has expired there.
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
from skyproxy_server.named_sessions import NamedSession, NamedSessions
from skyproxy_server.saved_sessions import saved_sessions
from skyproxy_server.snapshots.lease_files import ASK, END, FAILED, GIVING, HELD, LEAVE, Claim, Loss
from skyproxy_server.snapshots.leases import BEATS, NameLeases
from skyproxy_server.snapshots.listing import list_rows
from skyproxy_server.snapshots.places import place_of

logger = logging.getLogger("skyproxy.server")

_SWEEP_SECONDS = 3600.0
_END_SECONDS = 5.0
"""The time that a volume has to take the worker's goodbye."""
_ATTEMPTS = 20
_LOOK_SECONDS = 0.5


class NameKeeper:
    """Gives signs of life while the worker has named sessions, gives others what they ask for, ends what another worker
    has taken, and sweeps.

    Args:
        root: the worker's place for snapshots.
        names: the worker's named sessions.
        settings: how soon, and how long what was saved is kept.
        save: writes a named session that nobody uses to the volume; returns whether it could.
        owner: the name of the only token whose sessions are here; None where those of all may be.
        where: what people call the worker.

    Attributes:
        leases: of the worker.
    """

    def __init__(
        self,
        root: FileStore,
        names: NamedSessions,
        settings: Settings,
        save: Callable[[NamedSession], bool] = lambda session: False,
        owner: str | None = None,
        where: str = "",
    ) -> None:
        self.leases = NameLeases(
            root, settings.name_lease_seconds, where=where, return_seconds=settings.named_return_seconds
        )
        self._root = root
        self._names = names
        self._save = save
        self._owner = owner
        self._return_seconds = settings.named_return_seconds
        self._kept_days = settings.saved_session_days
        self._due = threading.Event()
        self._is_over = False
        self._has_failed = False
        self._tended_at = 0.0
        self._swept_at = time.monotonic()  # not at once: a worker that starts has other things to do
        self._expired: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._run, name="skyproxy-names", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._names.leases, self._names.on_gone = self.leases, self._wake
        self.leases.on_held = self._due.set
        self._thread.start()

    def end(self) -> None:
        """Let go of all; wait for it, but not for a volume that hangs."""
        self._is_over = True
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def _wake(self) -> None:
        self._tended_at = 0.0
        self._due.set()

    def _run(self) -> None:
        pause = self.leases.seconds / BEATS
        while not self._is_over:
            if time.monotonic() - self._tended_at >= pause:
                self._tended_at = time.monotonic()
                self._try(self.tend)
            self._try(self.look_for_claims)
            if time.monotonic() - self._swept_at >= _SWEEP_SECONDS:
                self._swept_at = time.monotonic()
                self._try(self.sweep)
            self._due.wait(min(self.leases.look_seconds, pause) if self.leases.names() else pause)
            self._due.clear()
        self._try(self.leases.end)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, SnapshotError) as error:
            if not self._has_failed:
                logger.warning("the volume of snapshots cannot be used for named sessions now: %s", error)
            self._has_failed = True
        except Exception:  # without this thread, all that is held here would count as left by its worker
            logger.exception("what lies on the volume of snapshots could not be read")
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
            for owner, name in self.leases.names():
                about = next((row for row in self._names.rows(owner) if row["name"] == name), None)
                if about is not None:
                    self.leases.describe(owner, name, {key: about[key] for key in ("names", "bytes", "held")})
            for loss in self.leases.losses():
                self._lose(loss)

    def _lose(self, loss: Loss) -> None:
        reason = (
            f"the session {loss.name!r} is used at another worker of the same volume now ({loss.lease.where}), and "
            "what it had here is gone"
        )
        if self._names.lose(loss.owner, loss.name, loss.lease.tag, reason):
            logger.warning("%s", reason)

    def look_for_claims(self) -> None:
        """Answer other workers that want a session of this one.

        Raises:
            OSError: the volume cannot be read or written.
        """
        for owner, name in self.leases.names():
            claim = self.leases.claim_on(owner, name)
            if claim is not None:
                self._answer(owner, name, claim)

    def _answer(self, owner: str, name: str, claim: Claim) -> None:
        if claim.kind == LEAVE:
            if self._names.leave(owner, name, claim.used_by, claim.where):
                self.leases.drop(owner, name, claim.where)
            else:
                self.leases.answer(owner, name, claim, HELD)
        elif claim.kind == END:
            # Its client is told, and need not be waited for: nothing of it is wanted.
            self._names.end(owner, name)
            self.leases.drop(owner, name)
        else:
            used_seconds, deserted_seconds = self._names.use_of(owner, name)
            if claim.kind == ASK and deserted_seconds is None:
                self.leases.answer(owner, name, claim, HELD, used_seconds)
            elif claim.kind != ASK or (deserted_seconds or 0.0) >= self._return_seconds:
                self.leases.answer(owner, name, claim, GIVING)
                # Signs of life go on meanwhile.
                arguments = (owner, name, claim)
                threading.Thread(target=self._give, args=arguments, name="skyproxy-name-gift", daemon=True).start()

    def _give(self, owner: str, name: str, claim: Claim) -> None:
        reason = f"another client took the session {name!r} over; what was put under a name there is kept"
        is_given = False
        try:
            is_given = self._names.give(owner, name, reason, self._save)
        except Exception:
            logger.exception("the named session %r could not be saved for another client", name)
        # The one that asked waits for an answer: also where the volume fails for a moment.
        for _ in range(_ATTEMPTS):
            with suppress(OSError):
                if is_given:
                    self.leases.drop(owner, name)
                else:
                    self.leases.answer(owner, name, claim, FAILED)
                return
            time.sleep(_LOOK_SECONDS)

    def sweep(self) -> None:
        """Delete the saved sessions of all tokens that have expired, and had the last time: a clock may be wrong for a
        while. And the signs of workers that have ended.

        Raises:
            OSError: the volume cannot be read.
        """
        expired: set[tuple[str, str]] = set()
        # Who has a user of its own may not list the others.
        places = [place_of(self._root, self._owner)] if self._owner is not None else self._places()
        for place in places:
            owner = place.name
            self.leases.clear_away(place)
            for one in saved_sessions(list_rows(place), self._kept_days):
                if not one.is_expired:
                    continue
                expired.add((owner, one.place))
                if (owner, one.place) in self._expired:
                    logger.info("the saved session %r has expired, and is deleted", one.name)
                    with suppress(OSError):
                        SnapshotFolder(place.child(one.place)).delete("")
        self._expired = expired

    def _places(self) -> list[FileStore]:
        return [self._root.child(owner) for owner in self._root.places()]
