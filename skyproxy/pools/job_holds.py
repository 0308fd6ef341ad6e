"""Jobs of an elastic pool: the processes that they run on are not taken away meanwhile, though the queue is empty."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from skyproxy.errors import SkyproxyError
from skyproxy.jobs.job import Job

logger = logging.getLogger("skyproxy")


class JobHolds:
    """The ranks that jobs of this program run on."""

    def __init__(self, idle_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Hold nothing yet.

        Args:
            idle_seconds: for which a rank is held after its last job has ended, so that its result can be fetched.
            clock: gives the time, in seconds.
        """
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._running: Counter[int] = Counter()
        self._ended_at: dict[int, float] = {}
        self._lock = threading.Lock()

    def has(self, rank: int) -> bool:
        """Return whether a job runs on a rank, or has just ended there."""
        with self._lock:
            ended_at = self._ended_at.get(rank)
            return self._running[rank] > 0 or (ended_at is not None and self._clock() - ended_at < self._idle_seconds)

    @contextmanager
    def submitting(self, ranks: Collection[int]) -> Iterator[Callable[[Job], Job]]:
        """Hold ranks while a job is sent there, and then, for the job that is handed to what this gives, to its end."""
        followed = False

        def follow(job: Job) -> Job:
            nonlocal followed
            followed = True
            threading.Thread(target=self._follow, args=(job, ranks), name="skyproxy-job-hold", daemon=True).start()
            return job

        with self._lock:
            self._running.update(ranks)
        try:
            yield follow
        finally:
            if not followed:
                self._release(ranks)

    def _follow(self, job: Job, ranks: Collection[int]) -> None:
        try:
            job.wait()
        except (SkyproxyError, OSError) as error:  # its worker is gone, or it was removed
            logger.debug("skyproxy: nobody waits for the job %s any more: %s", job.name, error)
        finally:
            self._release(ranks)

    def _release(self, ranks: Collection[int]) -> None:
        with self._lock:
            self._running.subtract(ranks)
            self._ended_at.update(dict.fromkeys(ranks, self._clock()))
