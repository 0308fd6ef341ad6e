"""The default dtype of each session: PyTorch has one a process, and a worker many clients.

Integers divided, or multiplied by a fraction, become the default dtype. Nearly every session leaves it at float32, and
their batches run side by side, without a lock. A batch of one that does not runs alone.
"""

from __future__ import annotations

import threading
import weakref
from types import TracebackType

import torch

_USUAL = torch.float32
_LOOKS_AGAIN_SECONDS = 0.001
_alone = threading.RLock()
"""Held by a batch that runs alone."""
_sessions: weakref.WeakSet[DefaultDtype] = weakref.WeakSet()


class DefaultDtype:
    """A session's default dtype; a context in which it is in force, entered for each batch.

    Attributes:
        dtype: in force from the next batch on.
        is_running: whether a batch of the usual dtype runs.
    """

    is_one_alone = False
    """Whether a batch runs alone, or waits until it can."""

    def __init__(self) -> None:
        self.dtype = _USUAL
        self.is_running = False
        self._in_force = _USUAL
        _sessions.add(self)

    def __enter__(self) -> None:
        self._in_force = self.dtype
        if self._in_force is not _USUAL:
            self._enter_alone()
            return
        # First the mark, then the look: the other does it the other way round, and one of the two sees the other.
        self.is_running = True
        while DefaultDtype.is_one_alone:
            self.is_running = False
            with _alone:
                self.is_running = True

    def _enter_alone(self) -> None:
        _alone.acquire()
        DefaultDtype.is_one_alone = True
        pause = threading.Event()
        while any(session.is_running for session in list(_sessions)):
            pause.wait(_LOOKS_AGAIN_SECONDS)
        torch.set_default_dtype(self._in_force)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._in_force is _USUAL:
            self.is_running = False
            return
        torch.set_default_dtype(_USUAL)
        DefaultDtype.is_one_alone = False
        _alone.release()
