"""The pools of this program whose workers run; they are closed when it ends."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

from skyproxy.errors import ConfigurationError

logger = logging.getLogger("skyproxy")


class RunningPool(Protocol):
    """A pool, as far as its end and those who watch it need it."""

    def close(self) -> None:
        """End its workers."""

    def status(self) -> dict[str, object]:
        """Return what it does."""

    def abandon_in_child(self) -> object:
        """Leave it to the process that this one was forked from; return what must not be let go of here."""


# Strong on purpose: a pool that a program forgets still has workers, and they may cost money.
RUNNING: set[RunningPool] = set()


def running_pools() -> list[RunningPool]:
    """Return the pools of this program whose workers run."""
    return list(RUNNING)


_has_program_ended = False
_is_forked = False
"""True in a process that was forked from one with running pools."""
_of_parent: list[object] = []
"""Parts of those pools: what they do where they are let go of is for the parent alone."""


def check_may_start() -> None:
    """Check that a pool can be started.

    Raises:
        ConfigurationError: the main thread has ended, so that nobody would end the pool.
    """
    if _has_program_ended:
        raise ConfigurationError(
            "the main thread of the program has ended, and with it every pool; none can be started any more. Join the "
            "threads that use pools at the end of the program: thread.join()."
        )


def not_running_text(advice: str = "Use it inside its `with` block, or call start() before.") -> str:
    """Return what to say to who uses a pool that does not run; with this advice, where the program has not ended."""
    if _has_program_ended:
        return (
            "this pool was closed because the main thread of the program has ended. Join the threads that use it "
            "before, at the end of the program: thread.join()."
        )
    if _is_forked:
        advice += (
            " If it ran when this process was forked, it belongs to the process that started it: start one here, or "
            "processes with the 'spawn' method."
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


def _after_fork_in_child() -> None:
    """Leave all pools to the parent, which goes on to use them; a child that ends must not take their workers away."""
    global _is_forked
    _is_forked = _is_forked or bool(RUNNING)
    for pool in list(RUNNING):
        _of_parent.append(pool.abandon_in_child())
    RUNNING.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
