"""Exceptions that are raised in a thread from outside.

CPython 3.11 and 3.12 have one mark for all threads: in some thread, something is to be raised. While it is set, every
call of a function looks for that (on 3.12 a call takes half as long again), and on 3.11 no traced function begins, in
any thread: whatever a debugger or a profiler follows stands still. It is taken off when the exception is raised;
never, if that was taken back by setting none; and not for an hour, if the thread is in C code for so long. So it is
shown for a moment only, again and again, as long as the exception waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable

_MOMENT_SECONDS = 0.002
"""The time that the mark is shown: long enough for any thread to take a step in Python."""
_PAUSE_SECONDS = 0.05
_START_SECONDS = 5.0
_HAS_ONE_MARK = sys.version_info < (3, 13)


class _Unmark(BaseException):
    """Raised by a thread in itself, which takes the mark off."""


def _set_for(thread: int, kind: type[BaseException] | None) -> None:
    target = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), target)


class _Reminder:
    """A thread that shows the mark, while there is something to be raised.

    It may be traced as well, so that it must not begin a function in Python while the mark is shown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], bool]] = []

    def raise_in(self, thread: int, kind: type[BaseException], waits: Callable[[], bool]) -> None:
        """See `raise_in`."""
        with self._lock:
            if not self._waiting:
                is_ready = threading.Event()
                reminder = threading.Thread(target=self._run, args=(is_ready,), name="skyproxy-reminder", daemon=True)
                with contextlib.suppress(RuntimeError):  # there can be no more threads: the mark stays
                    reminder.start()
                    is_ready.wait(_START_SECONDS)
            self._waiting.append(waits)
            _set_for(thread, kind)

    def _run(self, is_ready: threading.Event) -> None:
        me = ctypes.c_ulong(threading.get_ident())
        unmark = ctypes.py_object(_Unmark)
        show = ctypes.pythonapi.PyThreadState_SetAsyncExc
        is_ready.set()
        while True:
            time.sleep(_PAUSE_SECONDS)
            try:
                show(me, None)
                time.sleep(_MOMENT_SECONDS)
                show(me, unmark)
                time.sleep(0)  # it is raised here at the latest
            except _Unmark:
                pass
            with self._lock:  # nothing is set meanwhile
                self._waiting = [waits for waits in self._waiting if waits()]
                if not self._waiting:
                    return


_reminder = _Reminder()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reminder.__init__)  # type: ignore[misc]


def raise_in(thread: int, kind: type[BaseException], waits: Callable[[], bool]) -> None:
    """Have an exception raised in another thread, at its next step in Python.

    Args:
        thread: the thread's `ident`. Nothing happens where there is none of that number.
        kind: the class of the exception.
        waits: whether the thread may not have raised it yet. Must be short, and end for good with false.
    """
    if _HAS_ONE_MARK:
        _reminder.raise_in(thread, kind, waits)
    else:
        _set_for(thread, kind)


def take_back(kind: type[BaseException]) -> None:
    """Have nothing raised any more in this thread of what was set for it; nobody may set more meanwhile.

    Args:
        kind: the class of the exception: it is raised and caught here, which takes the mark off.
    """
    try:
        _set_for(threading.get_ident(), kind)
        time.sleep(0)  # it is raised here at the latest
    except kind:
        pass


__all__ = ["raise_in", "take_back"]
