"""The use that is made of this worker, which decides if it may be taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager


class Activity:
    """The time at which the worker last did something, and what it does now.

    An open session alone is not activity: a notebook that is left open all night does not need its GPU.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._running = 0
        self._lock = threading.Lock()

    def touch(self) -> None:
        """Something was done just now. Cheap, and safe on any thread."""
        self._last = self._clock()

    def running(self) -> AbstractContextManager[object]:
        """While this is entered, the worker is in use, however long that takes: around a function, say."""
        return _Running(self)

    def count(self, change: int) -> None:
        """Begin (1) or end (-1) a use."""
        with self._lock:
            self._running += change

    @property
    def calls_running(self) -> int:
        """The number of calls in `running` now."""
        return self._running

    @property
    def idle_seconds(self) -> float:
        """For how long nothing was done; 0 while something runs."""
        return 0.0 if self._running else max(self._clock() - self._last, 0.0)


class _Running(AbstractContextManager[object]):
    """A use of the worker; a class, because each call enters one, and a generator takes longer."""

    __slots__ = ("_activity",)

    def __init__(self, activity: Activity) -> None:
        self._activity = activity

    def __enter__(self) -> None:
        self._activity.count(1)

    def __exit__(self, *_: object) -> None:
        self._activity.count(-1)
        self._activity.touch()
