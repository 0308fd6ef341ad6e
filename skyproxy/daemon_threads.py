"""Daemon threads that are in an operation when a program ends.

Python ends a daemon thread where it next asks for the interpreter's lock. Where that is in PyTorch's C++, the process
aborts: `terminate called without an active exception`. A thread that waited for a worker is there for some moments
after its session was closed.
"""

from __future__ import annotations

import sys
import threading
import time
from traceback import walk_stack
from types import FrameType

_PACKAGE = "skyproxy.tensor."
_LIMIT_SECONDS = 2.0
_LOOK_SECONDS = 0.001


class ThreadsInOperations:
    """The other threads that are in an operation now."""

    def __init__(self) -> None:
        this = threading.get_ident()
        # Where each was when it had left our part of the operation.
        self._places: dict[int, tuple[int, int] | None] = {
            thread: None for thread, newest in sys._current_frames().items() if thread != this and _is_inside(newest)
        }

    def wait(self) -> None:
        """Wait until they are out of C++, but for two seconds at most: one may begin operation after operation."""
        limit = time.monotonic() + _LIMIT_SECONDS
        while self._places and time.monotonic() < limit:
            time.sleep(_LOOK_SECONDS)
            frames = sys._current_frames()
            for thread in list(self._places):
                self._look(thread, frames.get(thread))

    def _look(self, thread: int, newest: FrameType | None) -> None:
        if newest is None:  # it has ended
            del self._places[thread]
        elif _is_inside(newest):
            self._places[thread] = None
        else:
            # C++ may still be on its way back to the caller: until the caller goes on.
            place = (id(newest), newest.f_lasti)
            if self._places[thread] in (None, place):
                self._places[thread] = place
            else:
                del self._places[thread]


def _is_inside(newest: FrameType) -> bool:
    """Tell whether a thread is in what PyTorch calls for an operation; the threads of sessions never are."""
    return any(str(frame.f_globals.get("__name__")).startswith(_PACKAGE) for frame, _ in walk_stack(newest))
