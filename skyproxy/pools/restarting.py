"""A call on all processes that is begun again, on all of them, where one of them has failed."""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future

from skyproxy.errors import RankErrors, SessionLostError
from skyproxy.pools.futures import PoolFuture
from skyproxy.runtime.checkpoints import FOLDER_PREFIX, checkpoint_folder
from skyproxy.settings import SETTINGS, Settings

logger = logging.getLogger("skyproxy")

_LONGEST_PAUSE_SECONDS = 60.0
Begin = Callable[[Mapping[str, object]], "Future[list[object]]"]


class Restarting:
    """A broadcast with restarts, on a thread of its own: it waits for each attempt, and between two of them.

    Attributes:
        checkpoints: the name of the folder that all attempts have for checkpoints, on each machine.
    """

    def __init__(
        self,
        begin: Begin,
        future: PoolFuture[list[object]],
        max_restarts: int,
        on_end: Callable[[str], object],
        settings: Settings = SETTINGS,
    ) -> None:
        """Prepare a broadcast; `start` begins its first attempt.

        Args:
            begin: begins the call on all processes, with this beside it, and returns the future of their results.
            future: gets the outcome; cancelling it ends the attempt, and there is no other.
            max_restarts: how often it is begun again at most.
            on_end: called when it is over, with the name of the folder for checkpoints.
            settings: the pause before the first restart.
        """
        self.checkpoints = FOLDER_PREFIX + secrets.token_hex(16)
        self._begin = begin
        self._future = future
        self._max_restarts = max_restarts
        self._on_end = on_end
        self._pause_seconds = settings.job_restart_seconds
        self._cancelled = threading.Event()

    def start(self) -> None:
        """Begin, and come back at once."""
        self._future.on_cancel(self._cancelled.set)
        threading.Thread(target=self._run, name="skyproxy-restarts", daemon=True).start()

    def _run(self) -> None:
        try:
            for restarts in range(self._max_restarts + 1):
                error = self._attempt(restarts)
                if error is None:
                    return
                if restarts == self._max_restarts or not _may_succeed(error):
                    if restarts:
                        error.add_note(f"It was begun {restarts + 1} times.")
                    self._future.fail(error)
                    return
                text = str(error).splitlines() or [type(error).__name__]
                logger.warning(
                    "skyproxy: %s; all ranks begin again (%d of %d times)", text[0], restarts + 1, self._max_restarts
                )
                pause = min(self._pause_seconds * 2.0 ** min(restarts, 16), _LONGEST_PAUSE_SECONDS)
                if self._cancelled.wait(pause):
                    return
        except BaseException as error:  # the last line of defence: whoever waits must learn of it
            self._future.fail(error)
            raise
        finally:
            self._on_end(self.checkpoints)

    def _attempt(self, restarts: int) -> Exception | None:
        """Return why it failed; None where it is over, one way or the other."""
        try:
            attempt = self._begin({"checkpoint_dir": self.checkpoints, "restart_count": restarts})

            def cancel() -> None:
                self._cancelled.set()
                attempt.cancel()

            self._future.on_cancel(cancel)
            self._future.settle(attempt.result())
        except CancelledError:
            self._future.cancel()
        except Exception as error:
            return error
        return None


def _may_succeed(error: Exception) -> bool:
    """Return whether another attempt makes sense: a rank was lost, or its function failed, and not for want of time."""
    if isinstance(error, RankErrors):
        return not all(isinstance(one, TimeoutError) for one in error.exceptions)
    return isinstance(error, SessionLostError)


def remove_checkpoints(name: str) -> None:
    """Remove a folder for checkpoints, on the machine where this runs: the call is over."""
    with contextlib.suppress(OSError):
        shutil.rmtree(checkpoint_folder(name))
