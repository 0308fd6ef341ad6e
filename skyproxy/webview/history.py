"""A look every so often, and what was seen before; all of it bounded."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

logger = logging.getLogger("skyproxy")

Status = dict[str, Any]
Sample = tuple[float, float, float, float, float]
"""The time, bytes of memory, operations a second, bytes received and sent a second by the workers."""
MAX_SAMPLES = 900


class History:
    """The latest status, and the figures of the plots over time.

    A thread of its own looks at the source, so that no request of a browser waits for a worker.
    """

    def __init__(
        self, look: Callable[[], Status], interval_seconds: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Begin to look.

        Args:
            look: returns a status: "workers", a list of what they answer, and more for the page.
            interval_seconds: between two looks.
            clock: seconds since 1970.
        """
        self._look = look
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._before: dict[str, float] = {}
        self._before_at = 0.0
        self._latest: Status = {"at": clock(), "workers": [], "program": None}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skyproxy-web-view", daemon=True)

    def start(self) -> None:
        """Look from now on, until `stop`."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 1.0) -> None:
        """Look no more; wait a moment for the look that is going on."""
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def status(self) -> Status:
        """Return what the page shows: the latest look, and the samples under "history"."""
        with self._lock:
            return {**self._latest, "history": list(self._samples)}

    def look(self) -> None:
        """Look once."""
        status = self._look()
        with self._lock:
            self._latest = {**status, "at": self._clock()}
            self._samples.append(self._sample(self._latest))

    def _run(self) -> None:
        failed = False
        while not self._stopping.is_set():
            try:
                self.look()
                failed = False
            except Exception:  # whatever a worker says must not end the view, nor fill the log
                if not failed:
                    logger.exception("the web view could not look at the workers")
                failed = True
            self._stopping.wait(self._interval_seconds)

    def _sample(self, status: Status) -> Sample:
        at = float(status["at"])
        now = totals(status["workers"])
        seconds = at - self._before_at
        before, self._before, self._before_at = self._before, now, at

        def rate(name: str) -> float:
            if not before or seconds <= 0:
                return 0.0
            return max(now[name] - before[name], 0.0) / seconds

        return at, now["memory"], rate("commands"), rate("bytes_received"), rate("bytes_sent")


def totals(workers: Iterable[Mapping[str, object]]) -> dict[str, float]:
    """Return the sums over what workers answer; what is missing or no number counts nothing.

    A worker that does not tell its own figures, to a token without the scope `admin`, is summed over its sessions.
    """
    sums = dict.fromkeys(("memory", "commands", "bytes_received", "bytes_sent"), 0.0)
    for answer in workers:
        rows = [row for row in _list(answer.get("sessions")) if isinstance(row, Mapping)]
        worker = answer.get("worker")
        worker = worker if isinstance(worker, Mapping) else {}
        devices = [row for row in _list(worker.get("devices")) if isinstance(row, Mapping)]
        memory = sum(_number(row.get("used_memory_bytes")) for row in devices)
        sums["memory"] += memory or sum(_number(row.get("tensor_bytes")) for row in rows)
        own = worker.get("commands")
        sums["commands"] += _number(own) if own is not None else sum(_number(row.get("commands")) for row in rows)
        for name in ("bytes_received", "bytes_sent"):
            sums[name] += sum(_number(row.get(name)) for row in rows)
    return sums


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1 << 63 else 0.0
