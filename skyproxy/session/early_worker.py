"""An embedded worker that was started before anything asked for it, for whoever asks first."""

from __future__ import annotations

import atexit
import os
import threading

from skyproxy.session.local_worker import LocalWorker, worker_environment
from skyproxy.settings import SETTINGS


class EarlyWorker:
    """At most one worker process that waits to be used; it ends with this process, or where nobody can use it.

    A worker lives in the environment and the folder that it was started in: where either is another by the time it is
    asked for, it is of no use, and ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: LocalWorker | None = None
        self._made_for: tuple[object, ...] = ()

    def begin(self, device: str) -> None:
        """Start one, and do not wait for it; do nothing where one waits already.

        Args:
            device: "auto", "cpu" or "cuda".

        Raises:
            WorkerStartError: the process cannot be started.
        """
        with self._lock:
            if self._worker is None:
                circumstances = _circumstances(device)
                self._worker = LocalWorker(device, SETTINGS, wait=False)
                self._made_for = circumstances

    def take(self, device: str) -> LocalWorker | None:
        """Hand over the worker that waits; None where there is none for this device that may still come up.

        Who takes it stops it, and has yet to wait until it listens.
        """
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is None:
            return None
        # A worker that has ended would only show its error to somebody who never asked for an early one.
        if self._made_for == _circumstances(device) and worker.is_running:
            return worker
        worker.stop()
        return None

    def drop(self) -> None:
        """End the worker that waits, if there is one."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()


def _circumstances(device: str) -> tuple[object, ...]:
    """Return what a worker that is started now would depend on."""
    try:
        folder = os.getcwd()
    except OSError:  # removed
        folder = ""
    return device, os.getpid(), folder, worker_environment()


EARLY_WORKER = EarlyWorker()
atexit.register(EARLY_WORKER.drop)
