"""The time in which a session has no worker and needs none: from a last snapshot to the next operation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from skyproxy.protocol import commands
from skyproxy.session.recorder import Recorder
from skyproxy.session.waiters import Waiters


class Suspension:
    """State of a session that may be suspended: whether it is, and whether its program wants something of a worker.

    What died meanwhile wakes nobody: to forget a tensor, no worker need come back.

    Attributes:
        is_on: whether the session is suspended.
        has_ended: whether it was, and a worker goes on.
        is_awaited: tells whether the program waits for something that no question stands for, such as an upload.
    """

    def __init__(self, recorder: Recorder, waiters: Waiters) -> None:
        """Begin with a session that is not suspended.

        Args:
            recorder: what the program wants done.
            waiters: what it waits for.
        """
        self.is_on = self.has_ended = False
        self.is_awaited: Callable[[], bool] = lambda: False
        self._recorder = recorder
        self._waiters = waiters
        self._wanted = threading.Event()
        self._first = 0
        self._began_at = 0.0

    @property
    def seconds(self) -> float:
        """The time since it began."""
        return time.monotonic() - self._began_at

    def begin(self) -> None:
        """Take note that the session needs no worker, for all that it was asked so far is done or kept."""
        self._first = self._recorder.batches
        self._began_at = time.monotonic()
        self._wanted.clear()
        self.is_on, self.has_ended = True, False

    def end(self) -> None:
        """Take note that a worker goes on."""
        self.is_on, self.has_ended = False, True

    def wake(self) -> None:
        """End the wait."""
        self._wanted.set()

    def look(self) -> None:
        """End the wait if the program wants something; called again and again."""
        if self.is_on and not self._wanted.is_set() and self._is_wanted():
            self._wanted.set()

    def wait(self) -> None:
        """Wait until something is wanted, or `wake` is called."""
        self._wanted.wait()

    def _is_wanted(self) -> bool:
        if len(self._waiters) or self.is_awaited():
            return True
        recorder = self._recorder
        widths = recorder.widths
        unsent, _ = recorder.recorded(0, recorder.unsent, recorder.unsent_lines)
        if _does_something(unsent, widths):
            return True
        return any(
            batch.sequence > self._first and _does_something(batch.stream, widths) for batch in recorder.sent_batches()
        )


def _does_something(stream: list[object], widths: dict[int, int]) -> bool:
    """Return whether a stream has more than releases in it."""
    return any(stream[at] != commands.RELEASE for at in commands.walk(stream, widths))
