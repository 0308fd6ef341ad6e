"""The pools of this program whose workers run; they are closed when it ends."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("skyproxy")


class RunningPool(Protocol):
    """A pool, as far as its end and those who watch it need it."""

    def close(self) -> None:
        """End its workers."""

    def status(self) -> dict[str, object]:
        """Return what it does."""


# Strong on purpose: a pool that a program forgets still has workers, and they may cost money.
RUNNING: set[RunningPool] = set()


def running_pools() -> list[RunningPool]:
    """Return the pools of this program whose workers run."""
    return list(RUNNING)


_has_program_ended = False


def not_running_text(advice: str = "Use it inside its `with` block, or call start() before.") -> str:
    """Return what to say to who uses a pool that does not run; with this advice, where the program has not ended."""
    if _has_program_ended:
        return (
            "this pool was closed because the main thread of the program has ended. Join the threads that use it "
            "before, at the end of the program: thread.join()."
        )
    return f"this pool is not running. {advice}"


def _close_all() -> None:
    global _has_program_ended
    _has_program_ended = True
    for pool in list(RUNNING):
        try:
            pool.close()
        except Exception:
            logger.exception("a pool could not be closed")


def _call_at_program_end(close: Callable[[], None]) -> None:
    """Call `close` when the main thread has ended, and while threads can still be used.

    Handlers of `atexit` come too late: executors take no work any more, and closing a pool needs them. `threading`
    calls in reverse order, so what executors registered at their import comes after us.
    """
    import concurrent.futures.thread  # noqa: F401 - registers its own end first

    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(close)


_call_at_program_end(_close_all)
