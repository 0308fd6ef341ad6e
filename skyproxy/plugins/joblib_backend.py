"""The backend "sky" of joblib. Imports joblib, so only who has it loads this."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from joblib._parallel_backends import AutoBatchingMixin, ParallelBackendBase  # the documented way to write a backend

from skyproxy.errors import ConfigurationError


class SkyBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs joblib's batches as tasks of a pool, each on the rank that has least to do."""

    supports_retrieve_callback = True
    supports_sharedmem = False
    default_n_jobs = -1

    def __init__(self, pool: Any = None, nesting_level: int | None = None, **options: object) -> None:
        """Made by `joblib.parallel_config("sky", pool=pool)`.

        Args:
            pool: an open pool.
            nesting_level: joblib's.
            options: joblib's.
        """
        super().__init__(nesting_level=nesting_level, **options)
        if pool is None:
            raise ConfigurationError('the joblib backend "sky" needs a pool: joblib.parallel_config("sky", pool=pool).')
        self._pool = pool
        self._running: set[Any] = set()
        self._lock = threading.Lock()

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return how many tasks run at once: as many as asked for, or for -1 one on each rank."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        ranks = int(self._pool.spec.world_size)
        if n_jobs is None or n_jobs == -1:
            return ranks
        return n_jobs if n_jobs > 0 else max(1, ranks + 1 + n_jobs)

    def submit(self, func: Callable[[], Any], callback: Callable[[Any], None] | None = None) -> Any:
        """Starts one batch."""
        future = self._pool.submit(func)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._on_end)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def _on_end(self, future: object) -> None:
        with self._lock:
            self._running.discard(future)

    def retrieve_result_callback(self, out: Any) -> object:
        """The batch's results; its exception is raised as the task raised it."""
        return out.result()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Ends the other batches after one failed."""
        with self._lock:
            running = list(self._running)
        for future in running:
            future.cancel()

    def __reduce__(self) -> Any:
        raise TypeError("a joblib backend of a pool stays on the client")
