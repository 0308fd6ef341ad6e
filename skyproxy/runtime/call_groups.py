"""Short calls of one function that travel as one: a worker makes them one after another, and gives back what it has not
begun where one of them turns out to be long.
"""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

_MAX_KEPT = 256
_MAX_VALUES = 64
_MAX_LENGTH = 4096
_DEPTH = 4
_NUMBERS = frozenset({type(None), bool, int, float, complex})
_lock = threading.Lock()
_groups: OrderedDict[str, CallGroup] = OrderedDict()


def is_simple(value: object) -> bool:
    """Return whether a value consists of a few numbers, short strings and containers of them."""
    return _count(value, _DEPTH) <= _MAX_VALUES


def is_constant(value: object) -> bool:
    """Return whether a value is simple and nobody can change it."""
    return _count(value, _DEPTH, (tuple,)) <= _MAX_VALUES


def _count(value: Any, depth: int, containers: tuple[type, ...] = (tuple, list, dict)) -> int:
    """The simple values in a value; more than are allowed where there is anything else."""
    kind = type(value)
    if kind in _NUMBERS:
        return 1
    if kind is str or kind is bytes:
        return 1 if len(value) <= _MAX_LENGTH else _MAX_VALUES + 1
    if depth <= 0 or kind not in containers or len(value) > _MAX_VALUES:
        return _MAX_VALUES + 1
    count = 1
    for item in (*value, *value.values()) if kind is dict else value:
        count += _count(item, depth - 1, containers)
        if count > _MAX_VALUES:
            break
    return count


class CallGroup:
    """The calls of one group, as they are made.

    Args:
        count: how many there are.

    Attributes:
        has_failed: whether one of the calls did.
    """

    def __init__(self, count: int) -> None:
        self.has_failed = False
        self._lock = threading.Lock()
        self._end = count
        self._begun = 0
        self._values: list[object] = []
        self._kept: list[object] = []

    def begin(self) -> int | None:
        """Return the number of the next call, which has begun then; None where there is none."""
        with self._lock:
            if self._begun >= self._end:
                return None
            self._begun += 1
            return self._begun - 1

    def add(self, value: object) -> None:
        """Take what a call returned. What is not simple ends the group, and is asked for by itself."""
        with self._lock:
            if is_simple(value):
                self._values.append(value)
            else:
                self._kept.append(value)
                self._end = self._begun

    def stop(self) -> None:
        """Begin no more."""
        with self._lock:
            self._end = self._begun

    def give_back(self) -> list[object]:
        """Begin no more; return the results that nobody has, and how many calls have begun."""
        with self._lock:
            self._end = self._begun
            values, self._values = self._values, []
            return [values, self._begun]

    def finish(self) -> list[object]:
        """Return the same, and whether another result is to be asked for."""
        return [*self.give_back(), bool(self._kept)]

    @property
    def is_asked_for(self) -> bool:
        """True if it has results that its end did not bring: of calls before one that failed, or one by itself."""
        with self._lock:
            return bool(self._values or self._kept)

    def take(self) -> object:
        """The result that did not go with the others."""
        with self._lock:
            return self._kept.pop()


class GroupTask:
    """A function of a pool that makes several calls of another one.

    Args:
        function: the other one.
    """

    wraps_function = True

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__qualname__ = getattr(function, "__qualname__", self.__name__)

    def __call__(self, key: str, calls: Sequence[Sequence[object]]) -> list[object]:
        """Make the calls, until one fails; see `CallGroup.finish` for what is returned, with the seconds that it took.

        Args:
            key: names the group to `give_back` and `take`; a secret of the caller.
            calls: the arguments of each call.
        """
        group = CallGroup(len(calls))
        with _lock:
            _groups[key] = group
            while len(_groups) > _MAX_KEPT:
                _groups.popitem(last=False)
        started = time.perf_counter()
        try:
            return [*self._make(group, calls), time.perf_counter() - started]
        except BaseException:
            group.has_failed = True
            raise
        finally:
            if not group.is_asked_for:
                with _lock:
                    _groups.pop(key, None)

    def _make(self, group: CallGroup, calls: Sequence[Sequence[object]]) -> list[object]:
        while (index := group.begin()) is not None:
            # In a context of its own, as every call has one.
            group.add(contextvars.copy_context().run(self.function, *calls[index]))
            if any(getattr(stream, "has_begun_line", False) for stream in (sys.stdout, sys.stderr)):
                group.stop()  # what the next one prints is no part of this line
        return group.finish()

    def __reduce__(self) -> tuple[object, ...]:
        return GroupTask, (self.function,)


def give_back(key: str) -> list[object] | None:
    """Have a group begin no more calls.

    Returns:
        The results that it has and nobody was sent, and how many of its calls have begun; None where it is not known.
    """
    with _lock:
        group = _groups.get(key)
        if group is not None and group.has_failed:
            del _groups[key]
    return None if group is None else group.give_back()


def take(key: str) -> object:
    """The result of a group that did not go with the others; only once.

    Raises:
        LookupError: it is gone.
    """
    with _lock:
        group = _groups.pop(key, None)
    if group is None:
        raise LookupError("this result is gone: too many calls were made since")
    return group.take()
