"""Processes that functions fork: they end by the signals that end any other, which a worker takes in another way."""

from __future__ import annotations

import os
import signal
import threading

_ENDS = frozenset({signal.SIGTERM})


class _Blocked(threading.local):
    """The signals that were blocked before a fork of this thread."""

    before: frozenset[int | signal.Signals] = frozenset()


def end_by_signals(*, interrupts: bool) -> None:
    """Have processes that this one forks from now on end by SIGTERM, which `Pool.terminate` waits for without end.

    Args:
        interrupts: whether SIGINT, too, ends them; else they ignore it.
    """
    if not hasattr(os, "register_at_fork"):
        return
    blocked = _Blocked()

    def block() -> None:
        # One that comes before its handler is gone would be lost: Python forgets those that are to be handled.
        blocked.before = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS))

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked.before)

    def begin() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler if interrupts else signal.SIG_IGN)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=begin)


__all__ = ["end_by_signals"]
