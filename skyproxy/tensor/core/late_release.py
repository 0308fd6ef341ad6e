"""Releases that wait until their owner is gone, where Python's collector calls its finalizer earlier.

The collector finalizes all objects of a circle before it knows which of them stay: a `__del__` of the program, or the
`finally` of a generator, may go on with a tensor whose own finalizer was called before, and keep it. So a finalizer
that the collector calls must give nothing back; it hands that to a `LateRelease`, which its object keeps.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

from skyproxy.interrupts import shielded

_untrack = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


class LateRelease:
    """Calls a function when it is deallocated. The collector does not see it, and so never finalizes it."""

    __slots__ = ("_arguments", "_give_back")

    def __init__(self, give_back: Callable[..., object], *arguments: object) -> None:
        self._give_back, self._arguments = give_back, arguments
        _untrack(self)

    @shielded
    def __del__(self) -> None:
        try:
            give_back, arguments = self._give_back, self._arguments
        except AttributeError:  # an interrupt has struck before they were there
            return
        give_back(*arguments)


def _count_at_death() -> int:
    """Return what `sys.getrefcount(self)` is in the finalizer of an object to which nothing refers any more."""
    getrefcount = sys.getrefcount
    counted: list[int] = []

    class Probe:
        def __del__(self) -> None:
            counted.append(getrefcount(self))

    Probe()
    return counted[0]


REFERENCES_AT_DEATH = _count_at_death()
"""The count of references to an object that ends, in its finalizer. With more of them the collector has called, and the
object may stay."""


__all__ = ["REFERENCES_AT_DEATH", "LateRelease"]
