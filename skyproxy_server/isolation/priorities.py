"""The priorities of sessions' processes: once a second, those that compute become nicer than those that wait.

`fair_shares` decides; here the processor time is read and the niceness set, in the supervisor, where no client's code
runs. On Linux, threads that do not share a cgroup or an autogroup are compared as groups: so the niceness of a session
is that of its cgroup where it has one, and else of its autogroup and of all its threads.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from skyproxy_server.auth import Identity
from skyproxy_server.isolation.cgroups import Cgroups
from skyproxy_server.isolation.fair_shares import NICEST, FairShares, Place

logger = logging.getLogger("skyproxy.server")

LOOK_SECONDS = 1.0
_CAP_SYS_NICE = 23
_FIELDS_BEFORE_TIMES = 11
"""Fields of /proc/PID/stat between the name of the process and its times: its own, and of children that ended."""


class Prioritized(Protocol):
    """A session, as far as its priority goes."""

    identity: str
    client: Identity

    def while_unreaped(self, act: Callable[[int], None]) -> None:
        """Call with the session's process id, unless it may belong to another process already."""


class Means(Protocol):
    """A way to read what a session has used, and to make it nicer."""

    lowers: bool

    def used_seconds(self, session: str, pid: int) -> float:
        """Return the processor time that a session has used since its beginning.

        Raises:
            OSError: it has ended.
        """

    def set_niceness(self, session: str, pid: int, niceness: int) -> None:
        """Set the niceness of everything that a session runs.

        Raises:
            OSError: it has ended, or this worker may not.
        """


class ProcessMeans:
    """The priority of a process's threads, and of its autogroup where the system has those.

    Attributes:
        lowers: whether this worker may take a niceness back.
    """

    def __init__(self) -> None:
        self.lowers = _may_lower()
        self._own = os.getpriority(os.PRIO_PROCESS, 0)
        self._tick_seconds = 1.0 / os.sysconf("SC_CLK_TCK")

    def used_seconds(self, session: str, pid: int) -> float:
        """Return what the process used, and its children that have ended."""
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        times = text.rpartition(")")[2].split()[_FIELDS_BEFORE_TIMES : _FIELDS_BEFORE_TIMES + 4]
        return sum(map(int, times)) * self._tick_seconds

    def set_niceness(self, session: str, pid: int, niceness: int) -> None:
        """Set it, beside the worker's own, for all threads in the session's process group, and for its autogroup."""
        # The sessions of one autogroup are compared with each other only; this is what counts between them. A worker
        # that is not root may not write it, for the files of a process that hides its memory are root's.
        with suppress(FileNotFoundError, PermissionError):
            Path(f"/proc/{pid}/autogroup").write_text(str(niceness), encoding="ascii")
        os.setpriority(os.PRIO_PGRP, pid, min(self._own + niceness, NICEST))


class CgroupMeans:
    """The priority of a session's cgroup, whatever is in it."""

    lowers = True

    def __init__(self, cgroups: Cgroups) -> None:
        self._cgroups = cgroups

    def used_seconds(self, session: str, pid: int) -> float:
        """Return what all processes of the session used."""
        return self._cgroups.used_seconds(session)

    def set_niceness(self, session: str, pid: int, niceness: int) -> None:
        """Set the weight of the session's cgroup."""
        self._cgroups.set_niceness(session, niceness)


class Priorities:
    """The priorities of a worker's sessions.

    Args:
        means: how they are set.
        clock: seconds that only grow.
    """

    def __init__(self, means: Means, clock: Callable[[], float] = time.monotonic) -> None:
        self._means = means
        self._clock = clock
        self._shares = FairShares(lowers=means.lowers)
        self._sessions: dict[Place, Prioritized] = {}
        self._used: dict[Place, float] = {}
        self._lock = threading.Lock()
        self._several = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_complained = False

    def begin(self, session: Prioritized) -> None:
        """Consider a session; it begins as nice as its client's use until now makes it."""
        place = _place(session)
        with self._several:
            self._sessions[place] = session
            self._used[place] = 0.0
            self._shares.begin(place, self._clock())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="skyproxy-priorities", daemon=True)
                self._thread.start()
            niceness = self._shares.changes(self._clock()).get(place)
            if niceness is not None:
                self._set(place, niceness)
            self._several.notify_all()

    def end(self, session: Prioritized) -> None:
        """Forget a session."""
        place = _place(session)
        with self._lock:
            self._sessions.pop(place, None)
            self._used.pop(place, None)
            self._shares.end(place)

    def close(self) -> None:
        """Change nothing any more."""
        with self._several:
            self._closing.set()
            self._several.notify_all()

    def look(self) -> None:
        """Read what all sessions have used, and set what follows from it."""
        with self._lock:
            for place, session in self._sessions.items():
                session.while_unreaped(partial(self._note, place))
            for place, niceness in self._shares.changes(self._clock()).items():
                self._set(place, niceness)

    def _note(self, place: Place, pid: int) -> None:
        with suppress(OSError, ValueError):
            used = self._means.used_seconds(place[-1], pid)
            self._shares.note(place, max(used - self._used[place], 0.0), self._clock())
            self._used[place] = max(used, self._used[place])

    def _set(self, place: Place, niceness: int) -> None:
        self._sessions[place].while_unreaped(lambda pid: self._set_of(place, pid, niceness))

    def _set_of(self, place: Place, pid: int, niceness: int) -> None:
        try:
            self._means.set_niceness(place[-1], pid, niceness)
        except (BlockingIOError, FileNotFoundError, ProcessLookupError):
            return  # the kernel takes no more now, or the session has just ended; the next look does it
        except OSError as error:
            if not self._has_complained:
                logger.info("sessions that compute do not give way to those that wait: %s", error)
            self._has_complained = True
            return
        self._shares.has_set(place, niceness)

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._several:
                self._several.wait_for(self._is_needed)
            self.look()
            self._closing.wait(LOOK_SECONDS)

    def _is_needed(self) -> bool:
        if self._closing.is_set() or len(self._sessions) > 1:
            return True
        # The last one is as nice again as it began, where that can be.
        return bool(self._sessions) and self._means.lowers and not self._shares.are_even


def _place(session: Prioritized) -> Place:
    return session.client.name, session.client.address, session.identity


def _may_lower() -> bool:
    if resource.getrlimit(resource.RLIMIT_NICE)[0] >= 20:
        return True
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False
