"""The default dtype of each session: PyTorch has one a process, and a worker many clients.

Integers divided, or multiplied by a fraction, become the default dtype. Nearly every session leaves it at float32, and
their batches run side by side. A batch of one that does not runs alone.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

_USUAL = torch.float32
_changed = threading.Condition()
_usual_batches = 0
_is_one_alone = False


class DefaultDtype:
    """A session's default dtype; a context in which it is in force, entered for each batch.

    Attributes:
        dtype: in force from the next batch on.
    """

    def __init__(self) -> None:
        self.dtype = _USUAL
        self._in_force = _USUAL

    def __enter__(self) -> None:
        global _usual_batches, _is_one_alone
        self._in_force = self.dtype
        with _changed:
            if self._in_force is _USUAL:
                while _is_one_alone:
                    _changed.wait()
                _usual_batches += 1
                return
            while _usual_batches or _is_one_alone:
                _changed.wait()
            _is_one_alone = True
        torch.set_default_dtype(self._in_force)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        global _usual_batches, _is_one_alone
        if self._in_force is not _USUAL:
            torch.set_default_dtype(_USUAL)
        with _changed:
            if self._in_force is _USUAL:
                _usual_batches -= 1
            else:
                _is_one_alone = False
            _changed.notify_all()
