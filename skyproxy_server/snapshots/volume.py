"""The worker's volume, which may hang: whoever waits for it does so on threads of their own, and not without end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, TypeVar

from skyproxy.errors import SnapshotError
from skyproxy_server.snapshots.threads import DiskThreads

T = TypeVar("T")
_MOST_STUCK = 16
"""Requests of one process that may hang in the volume at a time; each holds a few threads."""


class VolumeHangsError(SnapshotError):
    """The volume has taken or given nothing for too long."""


def hangs(seconds: float) -> VolumeHangsError:
    """Return the error for a volume that has taken nothing for so long."""
    return VolumeHangsError(
        f"the worker's volume has taken nothing for {seconds:g} s (SKYPROXY_SNAPSHOT_STALL_SECONDS). The session goes "
        "on, and the snapshots before are untouched; none is taken until the volume answers again"
    )


def _gives_nothing(seconds: float, what: str) -> VolumeHangsError:
    return VolumeHangsError(
        f"the worker's volume hangs: {what} has come no further for {seconds:g} s (SKYPROXY_SNAPSHOT_STALL_SECONDS). "
        "The session goes on with all that it has, and the snapshots are as they were. Try again when the volume "
        "answers, or use a worker with another one"
    )


class StuckRequests:
    """The requests of a process that the volume has not answered in time, and holds to this day.

    Args:
        most: how many there may be before no further ones are begun.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()

    def note(self, future: Future[Any]) -> None:
        """Count a request until it is answered."""
        with self._lock:
            self._futures.append(future)

    @property
    def are_many(self) -> bool:
        """True if no further request should be begun."""
        with self._lock:
            self._futures = [future for future in self._futures if not future.done()]
            return len(self._futures) >= self._most


STUCK = StuckRequests(_MOST_STUCK)
"""Of this process."""


class VolumeThread:
    """The thread on which a session reads, lists, deletes and copies what is on the volume.

    One thread at a time asks; the next request begins when the one before is done.

    Args:
        stall_seconds: the time for which the volume may give nothing.
        stuck: the requests that hang.
    """

    def __init__(self, stall_seconds: float, stuck: StuckRequests = STUCK) -> None:
        self.stall_seconds = stall_seconds
        self._stuck = stuck
        self._thread = DiskThreads(1, "skyproxy-snapshot-reading")
        self._request: Future[Any] | None = None
        self._moved_at = time.monotonic()

    def note_progress(self) -> None:
        """Take note that the volume has given something. For any thread."""
        self._moved_at = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """True if the request before was given up, and hangs still."""
        return self._request is not None and not self._request.done()

    def run(self, what: str, work: Callable[[], T]) -> T:
        """Have the thread do something; wait for it, for as long as the volume gives something.

        Args:
            what: what that is, for people.
            work: what to do. It may come to its end later than it is waited for.

        Raises:
            VolumeHangsError: the volume gives nothing. At once, where that is known.
        """
        if self.is_stuck or self._stuck.are_many:
            raise _gives_nothing(self.stall_seconds, what)
        self.note_progress()
        request: Future[T] = self._thread.submit(work)
        self._request = request
        while not request.done():
            left = self._moved_at + self.stall_seconds - time.monotonic()
            if left <= 0:
                self._stuck.note(request)
                raise _gives_nothing(self.stall_seconds, what)
            wait([request], left)
        return request.result()

    def end(self, work: Callable[[], object]) -> None:
        """Do something last, where the volume answers; no request may follow."""
        if self._request is not None:
            with suppress(OSError, SnapshotError):
                if self.is_stuck or self._stuck.are_many:
                    self._thread.submit(work)  # when it answers
                else:
                    self.run("the end of a session's requests", work)
        self._thread.shutdown()
